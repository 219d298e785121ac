"""What the memory budget needs to know of a run: its machine, its models and their lengths."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minirl.data.prompts import PromptStream
from minirl.errors import refuse
from minirl.model.config import ModelConfig
from minirl.model.families import read_config
from minirl.model.folders import resolve_folder
from minirl.ranks.process_group import gather_objects, local_world_size, world_size
from minirl.run.budget import MOST_REQUESTS, Budget, Sizes, Workload, budget, choose_sizes
from minirl.run.config import RunConfig, named_folder

# The flags that may be "auto".
OPEN_SIZES = ("cache_tokens", "max_tokens_per_microbatch", "recompute_layers")


class Machine(NamedTuple):
    """The ranks of a run. free: bytes of each."""

    device_type: str
    num_ranks: int
    free: float


def this_machine(device: torch.device) -> Machine:
    """The ranks of this run, with the free bytes of the tightest (collective; before `start` of this rank alone)."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory() / local_world_size()
    return Machine(device.type, world_size(), min(gather_objects(free)))


def free_memory(root: Path = Path("/")) -> int:
    """The bytes of the host that its processes may still take, at most as many as their control groups allow."""
    (available,) = re.findall(r"MemAvailable: +(\d+) kB", (root / "proc/meminfo").read_text())
    free = 1024 * int(available)
    # The lines are "0::PATH" for version 2, "NUMBER:CONTROLLERS:PATH" for version 1. A container may see its host's
    # path although its own group is mounted at the root, so every parent is read, too.
    lines = (root / "proc/self/cgroup").read_text()
    for controllers, path in re.findall(r"^\d+:(|.*\bmemory\b.*):/(.*)$", lines, re.MULTILINE):
        names = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
        group = root / "sys/fs/cgroup" / controllers / path
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # no group, or its limit is "max"
                limit, usage, stat = ((folder / f"memory.{name}").read_text() for name in (*names, "stat"))
                # The last one counts the groups within, too. This cache is given up before memory runs out.
                *_, cached = re.findall(r"inactive_file (\d+)", stat)
                free = min(free, int(limit) - int(usage) + int(cached))
    return free


def plan(config: RunConfig, work: Workload, *, recorded: Mapping[str, Any]) -> tuple[Sizes, Budget]:
    """The sizes of a run and its budget, with whole weights if these fit.

    recorded: the sizes that a resumed run began with, as sums go on rounding alike. Raises InputError for a run that
    does not fit, unless all sizes are given.
    """
    # Sums round depending on these.
    kept = ("max_tokens_per_microbatch", "shard_gradients", "shard_weights")
    given = {name: recorded[name] for name in kept if name in recorded}
    for name in (*OPEN_SIZES, "shard_weights"):
        value = getattr(config, name)
        if value != "auto":
            given[name] = {"on": True, "off": False}.get(value, value)
    forms = [{"shard_weights": False}, {"shard_weights": True, "shard_gradients": True}]
    if work.num_ranks == 1 or not config.trains:
        del forms[1]
    elif "shard_weights" in given:
        forms = [forms[given["shard_weights"]]]
    for form in forms:
        given |= form
        sizes = choose_sizes(work, given)
        needed = budget(work, sizes)
        if needed.fits():
            break
    refuse(
        not needed.fits() and "auto" in (getattr(config, name) for name in OPEN_SIZES),
        f"a rank with {work.free / 1e9:.3g} GB is too small ({'; '.join(lines(sizes, needed))}): take a "
        "smaller --model, or lower --max-new-tokens or --cache-tokens; to train, more ranks (--nproc-per-node), "
        "--offload-optimizer on GPUs, --shard-weights on, a lower --max-tokens-per-microbatch; with all sizes given it "
        "starts anyway",
    )
    return sizes, needed


def memory_plan(sizes: Sizes, needed: Budget, phase: str) -> str:
    """The bytes planned for a phase of a step, or for any other work, and the flags that lower them."""
    _, always, training, decoding, _ = lines(sizes, needed)
    decoding += "; lower --cache-tokens"
    if phase.endswith("generate"):
        return decoding
    if phase.endswith(("score", "update")):
        return f"{training}; lower --max-tokens-per-microbatch, or take --recompute-layers on"
    return f"{always}; take a smaller --model or more ranks; {decoding}"


def enough_tokens(max_new_tokens: int) -> int:
    """The tokens of a microbatch unless its flag says otherwise: more at a time are hardly faster."""
    return max(8192, 2 * max_new_tokens)


def lines(sizes: Sizes, needed: Budget) -> list[str]:
    """Sizes and their budget as text."""
    text = [", ".join(f"{name} {value}" for name, value in dataclasses.asdict(sizes).items())]
    for name in ("always", "training", "decoding"):
        parts: dict[str, float] = getattr(needed, name)
        listed = ", ".join(f"{part} {num_bytes / 1e9:.3g}" for part, num_bytes in parts.items())
        text.append(f"{name} {sum(parts.values()) / 1e9:.3g} GB: {listed}")
    is_kept = needed.fits(keeps_cache=True)
    kept = "beside each other: the cache stays" if is_kept else "in turns: the cache is made again each time"
    return [*text, f"{needed.room / 1e9:.3g} GB are left for training and decoding, {kept}"]


def workload(
    config: RunConfig,
    policy: ModelConfig,
    machine: Machine,
    *,
    streams: Sequence[PromptStream],
    value_folder: Path | None = None,
) -> Workload:
    """What a run asks of a rank. Of models besides the policy it reads config.json only.

    streams: training prompts, and held-out ones. value_folder: a resumed run's value model. Raises InputError for
    models that cannot be used.
    """
    prompts, held_out = streams
    longest = min(
        max(stream.longest_prompt for stream in streams) + prompts.max_new_tokens, prompts.max_tokens
    )
    trained = [policy]
    if config.num_value_models:
        value_folder = value_folder or named_folder(config, "value_model")
        value_model = read_config(value_folder) if value_folder else policy
        value_model = dataclasses.replace(value_model, scalar_head=True, adapters=config.adapters)
        trained += [value_model] * config.num_value_models
    frozen = {}
    if config.has_reference and not config.adapters:  # with adapters it is the policy without them
        frozen["reference"] = policy
    if teacher := named_folder(config, "teacher"):
        frozen["teacher"] = dataclasses.replace(read_config(teacher), vocab_size=policy.vocab_size)
    for name, model in config.reward_models.items():
        folder = resolve_folder(model, flag="--reward-model", with_weights=not config.dry_run)
        frozen[name] = read_config(folder, scalar_head=True)
        num_positions = frozen[name].max_position_embeddings
        refuse(
            num_positions < longest,
            f"--reward-model {model}: has {num_positions} positions, and a prompt with its completion up to {longest} "
            "tokens; lower --max-new-tokens, or take shorter prompts",
        )
    num_prompts = math.ceil(config.prompts_per_step / machine.num_ranks)
    # Whole groups, perhaps with a greedy completion for each. With --max-staleness those of two steps are open.
    requests = num_prompts * (config.group_size + 1) * (2 if config.max_staleness else 1)
    num_evaluated = math.ceil(held_out.num_prompts / machine.num_ranks) * (config.eval_samples or 1)
    return Workload(
        **machine._asdict(),
        dtype=config.compute_dtype(machine.device_type),
        trained=trained,
        frozen=frozen,
        longest=longest,
        enough_tokens=enough_tokens(prompts.max_new_tokens),
        step_tokens=num_prompts * config.group_size * longest,
        requests=max(requests, min(num_evaluated, MOST_REQUESTS[machine.device_type])),
        trains=config.trains,
        shares_base=config.adapters is not None and value_folder is None,
        offloads_optimizer=config.offload_optimizer and machine.device_type == "cuda",
    )
