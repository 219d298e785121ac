"""What the memory budget needs to know of a run: its machine, its models and their lengths."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minirl.data.prompts import PromptStream
from minirl.errors import refuse
from minirl.model.config import ModelConfig
from minirl.model.families import read_config
from minirl.model.folders import resolve_folder
from minirl.ranks.process_group import gather_objects, local_world_size, world_size
from minirl.run.budget import MAX_REQUESTS, Budget, Workload, choose_sizes
from minirl.run.config import RunConfig, model_folder_of_field

# The flags that may be "auto", besides --shard-weights.
AUTO_SIZES = ("cache_tokens", "max_tokens_per_microbatch", "recompute_layers")
# Sums of gradients round depending on these, so a resumed run keeps them.
PINNED_SIZES = ("max_tokens_per_microbatch", "shard_gradients", "shard_weights")
FULL_WEIGHTS = {"shard_weights": False}
SHARDED_WEIGHTS = {"shard_weights": True, "shard_gradients": True}
# The files of a control group, versions 1 and 2: its limit and usage, in bytes, and what is in it.
CGROUP_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
CGROUP_V2_FILES = ("memory.max", "memory.current", "memory.stat")


class Machine(NamedTuple):
    """The ranks of a run. free_bytes: of each."""

    device_type: str
    num_ranks: int
    free_bytes: float


def this_machine(device: torch.device) -> Machine:
    """The ranks of this run, with the free bytes of the tightest (collective; before `start` of this rank alone)."""
    free_bytes = free_memory() / local_world_size()
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
    return Machine(device.type, world_size(), min(gather_objects(free_bytes)))


def free_memory(root: Path = Path("/")) -> int:
    """The bytes of the host that its processes may still take, at most as many as their control groups allow."""
    (available_kib,) = re.findall(r"MemAvailable: +(\d+) kB", (root / "proc/meminfo").read_text())
    free = 1024 * int(available_kib)
    # The lines are "0::PATH" for version 2, "NUMBER:CONTROLLERS:PATH" for version 1. A container may see its host's
    # path although its own group is mounted at the root, so every parent is read, too.
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        file_names = CGROUP_V1_FILES if controllers else CGROUP_V2_FILES
        cgroup = root / f"sys/fs/cgroup/{controllers}{path}"
        for folder in (cgroup, *cgroup.parents):
            with contextlib.suppress(OSError, ValueError):  # no group of memory, or its limit is "max"
                limit, usage, stat = ((folder / name).read_text() for name in file_names)
                # The last one counts the groups within, too. This cache is given up before memory runs out.
                *_, cached = re.findall(r"inactive_file (\d+)", stat)
                free = min(free, int(limit) - int(usage) + int(cached))
    return free


def plan(config: RunConfig, work: Workload, *, recorded: Mapping[str, Any]) -> Budget:
    """Choose the sizes of a run, with whole weights if these fit.

    recorded: args.json of a resumed run, {} for a new one. A microbatch can hold the longest sequence, which may have
    become longer since. Raises InputError for a run that does not fit, unless all sizes are given.
    """
    given = {name: recorded[name] for name in PINNED_SIZES if name in recorded}
    for name in (*AUTO_SIZES, "shard_weights"):
        value = getattr(config, name)
        if value != "auto":
            given[name] = {"on": True, "off": False}.get(value, value)
    if "max_tokens_per_microbatch" in given:
        given["max_tokens_per_microbatch"] = max(work.longest_tokens, given["max_tokens_per_microbatch"])
    weight_layouts = [FULL_WEIGHTS]
    if work.num_ranks > 1 and work.trains:
        requested = given.get("shard_weights")
        weight_layouts = [
            weight_layout
            for weight_layout in (FULL_WEIGHTS, SHARDED_WEIGHTS)
            if requested in (None, weight_layout["shard_weights"])
        ]
    for weight_layout in weight_layouts:
        needed = choose_sizes(work, given | weight_layout)
        if needed.fits():
            return needed
    refuse(
        "auto" in (getattr(config, name) for name in AUTO_SIZES),
        f"a rank with {work.free_bytes / 1e9:.3g} GB is too small ({'; '.join(needed.format_plan())}): take a "
        "smaller --model, or lower --max-new-tokens or --cache-tokens; to train, more ranks (--nproc-per-node), "
        "--offload-optimizer on GPUs, --shard-weights on, a lower --max-tokens-per-microbatch; with all sizes given it "
        "starts anyway",
    )
    return needed


def default_microbatch_tokens(max_new_tokens: int) -> int:
    """The tokens of a microbatch unless its flag says otherwise: more at a time are hardly faster."""
    return max(8192, 2 * max_new_tokens)


def workload(
    config: RunConfig,
    policy: ModelConfig,
    machine: Machine,
    *,
    prompts: PromptStream,
    held_out: PromptStream,
    saved: Path | None = None,
) -> Workload:
    """What a run asks of a rank. Of models besides the policy it reads config.json only.

    saved: in a resumed run of whole models, the checkpoint. Raises InputError for models that cannot be used.
    """
    longest_prompt = max(prompts.longest_prompt, held_out.longest_prompt)
    longest = min(longest_prompt + prompts.max_new_tokens, prompts.max_tokens)
    trained = [policy]
    shares_base = False
    if config.num_value_models:
        value_folder = saved / "value" if saved else model_folder_of_field(config, "value_model")
        shares_base = config.adapters is not None and value_folder is None
        value_model = read_config(value_folder) if value_folder else policy
        value_model = dataclasses.replace(value_model, scalar_head=True, adapters=config.adapters)
        trained += [value_model] * config.num_value_models
    frozen = {}
    if config.has_reference and not config.adapters:  # with adapters it is the policy without them
        frozen["reference"] = policy
    if teacher := model_folder_of_field(config, "teacher"):
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
    requests = num_prompts * (config.group_size + 1)
    if config.max_staleness:
        requests *= 2
    num_evaluated = math.ceil(held_out.num_prompts / machine.num_ranks) * (config.eval_samples or 1)
    return Workload(
        **machine._asdict(),
        dtype=config.compute_dtype(machine.device_type),
        trained=trained,
        frozen=frozen,
        longest_tokens=longest,
        default_microbatch_tokens=default_microbatch_tokens(prompts.max_new_tokens),
        step_tokens=num_prompts * config.group_size * longest,
        num_requests=max(requests, min(num_evaluated, MAX_REQUESTS[machine.device_type])),
        trains=config.trains,
        shares_base=shares_base,
        offloads_optimizer=config.offload_optimizer and machine.device_type == "cuda",
    )
