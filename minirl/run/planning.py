"""The memory plan's inputs from a run: its workload, and the sizes that flags give."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from minirl.data.prompts import PromptStream
from minirl.errors import refuse
from minirl.model.config import ModelConfig
from minirl.model.families import read_config
from minirl.model.folders import resolve_folder
from minirl.plan.choice import choose_sizes, too_large
from minirl.plan.workload import Sizes, Workload, enough_tokens
from minirl.run.config import RunConfig
from minirl.run.flags import flag_of

_SWITCHES = ("recompute_layers", "shard_gradients")
_ROUNDING = ("max_tokens_per_microbatch", "shard_gradients")  # sums round depending on them


def workload(
    config: RunConfig,
    policy: ModelConfig,
    *,
    value_folder: Path | None,
    streams: Sequence[PromptStream],
    dtype: torch.dtype,
    device_type: str,
    num_ranks: int,
    num_shards: int,
    decode_group: int = 1,
) -> Workload:
    """The workload of a run that trains this policy. Of its other models it reads config.json only.

    num_shards: the number of ranks that decode together, if several do. value_folder: in a resumed run; None:
    --value-model, or the policy's. streams: training prompts, and held-out ones. Raises InputError for models that
    cannot be used.
    """
    trained = [policy]
    if config.num_value_models:
        value_folder = value_folder or named_folder(config, "value_model")
        value_config = read_config(value_folder) if value_folder else policy
        value = dataclasses.replace(value_config, scalar_head=True, adapters=config.adapters)
        trained += [value] * config.num_value_models
    frozen = {}
    if config.has_reference and not config.adapters:  # with adapters it is the policy without them
        frozen["reference"] = policy
    teacher = named_folder(config, "teacher")
    if teacher is not None:
        frozen["teacher"] = dataclasses.replace(read_config(teacher), vocab_size=policy.vocab_size)
    for name, model in config.reward_models.items():
        reward_folder = resolve_folder(model, flag="--reward-model", with_weights=not config.dry_run)
        frozen[name.replace("_", " ")] = read_config(reward_folder, scalar_head=True)
    prompts, held_out = streams
    longest_prompt = max(stream.longest_prompt for stream in streams)
    longest = min(longest_prompt + prompts.max_new_tokens, prompts.max_tokens)
    num_rollouts = config.prompts_per_step * config.group_size
    # With --max-staleness the prompts of two steps are open.
    num_prompts = config.prompts_per_step * (2 if config.max_staleness else 1)
    # An engine samples whole groups, perhaps with a greedy completion for each.
    num_engines = num_ranks // decode_group
    requests_in_training = math.ceil(num_prompts / num_engines) * (config.group_size + 1)
    rollouts_per_update = math.ceil(num_rollouts / config.minibatches_per_epoch / num_ranks)
    return Workload(
        trained=tuple(trained),
        frozen=frozen,
        dtype=dtype,
        device_type=device_type,
        num_ranks=num_ranks,
        num_shards=num_shards if decode_group == 1 else decode_group,
        parks_frozen=config.park_frozen,
        offloads_optimizer=config.offload_optimizer and device_type == "cuda",
        longest_prompt=longest_prompt,
        longest=longest,
        requests=max(
            requests_in_training, math.ceil(held_out.num_prompts / num_engines) * (config.eval_samples or 1)
        ),
        in_flight=requests_in_training if config.max_staleness else 0,
        update_tokens=rollouts_per_update * longest,
        taught_tokens=rollouts_per_update * config.minibatches_per_epoch * longest
        if config.has_kl_loss
        else 0,
        enough_tokens=enough_tokens(prompts.max_new_tokens),
        trains=config.trains,
        shares_base=config.adapters is not None and value_folder is None,
        decode_group=decode_group,
    )


def plan(
    config: RunConfig,
    policy: ModelConfig,
    *,
    num_ranks: int,
    of_node: int,
    recorded: Mapping[str, Any],
    free: float,
    **options: Any,
) -> tuple[Workload, Sizes, list[int], list[str]]:
    """The workload of a run with the first decode group that fits, or the last; its sizes; the groups; reasons.

    The groups: `possible_decode_groups`, which describes of_node. The reasons: a sentence of `too_large` for each group
    that does not fit. recorded: see `given_sizes`. free: bytes of a rank. options: see `workload`. Raises InputError if
    the flags ask for an impossible group.
    """
    groups = possible_decode_groups(config, policy, num_ranks=num_ranks, of_node=of_node, recorded=recorded)
    given = given_sizes(config, recorded=recorded)
    refusals = []
    for group in groups:
        work = workload(config, policy, num_ranks=num_ranks, **options, decode_group=group)
        forced = {"shard_gradients": True} if work.shards_weights else {}
        sizes = choose_sizes(work, free, {**given, **forced, "decode_group": group})
        refusal = too_large(work, sizes, free)
        if refusal is None:
            break
        refusals.append(refusal)
    return work, sizes, groups, refusals


def possible_decode_groups(
    config: RunConfig, policy: ModelConfig, *, num_ranks: int, of_node: int, recorded: Mapping[str, Any]
) -> list[int]:
    """The numbers of ranks that may decode together, the preferred one first.

    of_node: the ranks of a node. recorded: see `given_sizes`. Raises InputError if the flags ask for an impossible
    number.
    """
    if config.shard_decode == "off" or not config.trains:
        return [1]
    heads = policy.num_key_value_heads
    group = config.decode_group or math.gcd(of_node, heads)
    is_on = config.shard_decode == "on"
    refuse(
        is_on and group == 1,
        f"--shard-decode on: the model's {heads} key/value heads cannot be split among the ranks of a node, {of_node}; "
        "--decode-group may be more ranks than those of a node",
    )
    possible = [f"--decode-group {n}" for n in range(2, heads + 1) if heads % n == 0 == num_ranks % n]
    refuse(
        heads % group,
        f"--decode-group {group}: the model's {heads} key/value heads cannot be split among {group} ranks; take "
        f"{' or '.join([*possible, '--shard-decode off'])}",
    )
    if is_on:
        return [group]
    known = recorded.get("decode_group")
    if known in (1, group):
        return [known]
    return [1, group] if group > 1 and config.shard_gradients != "off" else [1]


def named_folder(config: RunConfig, name: str) -> Path | None:
    """The folder of the model in this field, which only some scripts have; None without a model. Raises InputError."""
    model = getattr(config, name, None)
    return resolve_folder(model, flag=flag_of(name), with_weights=not config.dry_run) if model else None


def given_sizes(config: RunConfig, *, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """`Sizes` by name as the flags give them, "auto" where they leave one open.

    recorded: the sizes that a resumed run began with; {} in a new one. Those that change how sums round stay. `plan`
    decides how many ranks decode together.
    """
    names = {field.name for field in dataclasses.fields(Sizes)} - {"decode_group"}
    given = {name: getattr(config, name) for name in names}
    for name in _SWITCHES:
        if given[name] != "auto":
            given[name] = given[name] == "on"
    for name in _ROUNDING:
        if given[name] == "auto":
            given[name] = recorded.get(name, "auto")
    return given
