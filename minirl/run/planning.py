"""Describe a run's machine, models and sequence lengths for the memory budget, and plan the run's sizes."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from minirl.data.prompts import PromptStream
from minirl.errors import refuse
from minirl.model.config import ModelConfig
from minirl.model.families import read_config
from minirl.model.folders import resolve_folder
from minirl.ranks.process_group import gather_objects, local_world_size, world_size
from minirl.run.budget import MAX_REQUESTS, Budget, Machine, Workload, choose_sizes
from minirl.run.config import RunConfig, model_folder_from_config

# Fields that may be "auto", in addition to shard_weights.
AUTO_SIZES = ("cache_tokens", "max_tokens_per_microbatch", "recompute_layers")
# Different values change how gradient sums round, so a resumed run keeps the recorded values.
PINNED_SIZES = ("max_tokens_per_microbatch", "shard_gradients", "shard_weights")
FULL_WEIGHTS = {"shard_weights": False}
SHARDED_WEIGHTS = {"shard_weights": True, "shard_gradients": True}
# cgroup v1 and v2 files that hold the memory limit (bytes), memory usage (bytes) and statistics.
CGROUP_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
CGROUP_V2_FILES = ("memory.max", "memory.current", "memory.stat")


def this_machine(device: torch.device) -> Machine:
    """Return this run's machine. The machine's free memory is the minimum over all ranks (collective).

    Before `process_group.start`, only this rank is measured.
    """
    free_bytes = free_memory() / local_world_size()
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
    return Machine(device.type, world_size(), min(gather_objects(free_bytes)))


def free_memory(root: Path = Path("/")) -> int:
    """Return the free host memory in bytes, capped by the memory limits of this process's cgroups."""
    (available_kib,) = re.findall(r"MemAvailable: +(\d+) kB", (root / "proc/meminfo").read_text())
    free_bytes = 1024 * int(available_kib)
    # Lines are "0::PATH" for version 2, "NUMBER:CONTROLLERS:PATH" for version 1. A container may see its cgroup's
    # host path even though the cgroup is mounted at the root, so the files in all parent folders are read too.
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        file_names = CGROUP_V1_FILES if controllers else CGROUP_V2_FILES
        cgroup = root / f"sys/fs/cgroup/{controllers}{path}"
        for folder in (cgroup, *cgroup.parents):
            with contextlib.suppress(OSError, ValueError):  # not a memory cgroup, or its limit is "max"
                limit, usage, stat = ((folder / name).read_text() for name in file_names)
                # The last match includes child cgroups. The kernel reclaims inactive page cache before memory runs out.
                *_, cached = re.findall(r"inactive_file (\d+)", stat)
                free_bytes = min(free_bytes, int(limit) - int(usage) + int(cached))
    return free_bytes


def plan(config: RunConfig, work: Workload, *, recorded: Mapping[str, Any]) -> Budget:
    """Choose a run's sizes, keeping full weights on each rank if they fit.

    recorded: content of a resumed run's args.json, or {} for a new run. A recorded microbatch size is increased if the
    longest sequence no longer fits in a microbatch. Raises InputError for a run that does not fit, unless all sizes are
    given.
    """
    given_sizes = {name: recorded[name] for name in PINNED_SIZES if name in recorded}
    for name in (*AUTO_SIZES, "shard_weights"):
        value = getattr(config, name)
        if value != "auto":
            given_sizes[name] = {"on": True, "off": False}.get(value, value)
    if "max_tokens_per_microbatch" in given_sizes:
        given_sizes["max_tokens_per_microbatch"] = max(
            work.max_sequence_tokens, given_sizes["max_tokens_per_microbatch"]
        )
    can_shard = work.num_ranks > 1 and work.trains
    requested_sharding = given_sizes.get("shard_weights") if can_shard else False
    for weight_layout in (FULL_WEIGHTS, SHARDED_WEIGHTS):
        if requested_sharding in (None, weight_layout["shard_weights"]):
            memory_budget = choose_sizes(work, given_sizes | weight_layout)
            if memory_budget.fits():
                return memory_budget
    refuse(
        "auto" in (getattr(config, name) for name in AUTO_SIZES),
        f"the run does not fit into {work.free_bytes / 1e9:.3g} GB per rank "
        f"({'; '.join(memory_budget.format_plan())}): use a smaller --model, or lower --max-new-tokens or "
        "--cache-tokens. When training, more ranks (--nproc-per-node), --offload-optimizer (on GPUs), `--shard-weights "
        "on` or a lower --max-tokens-per-microbatch also help. The run starts anyway if all sizes are given",
    )
    return memory_budget


def default_microbatch_tokens(max_new_tokens: int) -> int:
    """Return the default number of tokens per microbatch; larger microbatches are hardly faster."""
    return max(8192, 2 * max_new_tokens)


def make_workload(
    config: RunConfig,
    policy: ModelConfig,
    machine: Machine,
    *,
    prompts: PromptStream,
    held_out: PromptStream,
    saved: Path | None = None,
) -> Workload:
    """Return a rank's workload. For models other than the policy, only config.json is read.

    saved: a resumed run's checkpoint (None for a new run or with adapters). Raises InputError for a model that cannot
    be used.
    """
    # Streams skip prompts that leave fewer than `max_new_tokens` tokens for the completion.
    max_sequence_tokens = max(prompts.prompt_lengths + held_out.prompt_lengths) + prompts.max_new_tokens
    trained_models = [policy]
    value_models_share_base = False
    if config.num_value_models:
        value_folder = saved / "value" if saved else model_folder_from_config(config, "value_model")
        value_models_share_base = config.adapters is not None and value_folder is None
        value_model = read_config(value_folder) if value_folder else policy
        value_model = dataclasses.replace(value_model, scalar_head=True, adapters=config.adapters)
        trained_models += [value_model] * config.num_value_models
    frozen_models = {}
    if (
        config.has_reference_model and not config.adapters
    ):  # with adapters, the reference is the policy without its adapters
        frozen_models["reference"] = policy
    if teacher := model_folder_from_config(config, "teacher"):
        frozen_models["teacher"] = dataclasses.replace(read_config(teacher), vocab_size=policy.vocab_size)
    for name, model in config.reward_models.items():
        reward_model_folder = resolve_folder(model, flag="--reward-model", with_weights=not config.dry_run)
        frozen_models[name] = read_config(reward_model_folder, scalar_head=True)
        max_positions = frozen_models[name].max_position_embeddings
        refuse(
            max_positions < max_sequence_tokens,
            f"--reward-model {model}: has {max_positions} positions, but a prompt with its completion may take "
            f"{max_sequence_tokens} tokens; lower --max-new-tokens, or use shorter prompts",
        )
    num_prompts = math.ceil(config.prompts_per_step / machine.num_ranks)
    # Each group may have an extra greedy completion. With --max-staleness, groups from two steps may be in flight.
    num_requests = num_prompts * (config.group_size + 1)
    if config.max_staleness:
        num_requests *= 2
    num_eval_requests = math.ceil(held_out.num_prompts / machine.num_ranks) * (config.eval_samples or 1)
    return Workload(
        **vars(machine),
        dtype=config.compute_dtype(machine.device_type),
        trained_models=trained_models,
        frozen_models=frozen_models,
        max_sequence_tokens=max_sequence_tokens,
        default_microbatch_tokens=default_microbatch_tokens(prompts.max_new_tokens),
        step_tokens=num_prompts * config.group_size * max_sequence_tokens,
        num_requests=max(num_requests, min(num_eval_requests, MAX_REQUESTS[machine.device_type])),
        trains=config.trains,
        shares_base_weights=value_models_share_base,
        offloads_optimizer=config.offload_optimizer and machine.device_type == "cuda",
    )
