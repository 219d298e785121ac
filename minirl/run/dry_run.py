"""`--dry-run`: print the plan of a run and whether it fits, without weights, run folder or process group."""

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from minirl.data.prompts import PromptStream
from minirl.data.task import Messages, RewardFunction, Row, Task, as_messages, conversation
from minirl.data.tools import Tool
from minirl.errors import InputError
from minirl.model.families import read_config
from minirl.model.folders import resolve_folder
from minirl.model.weights import check_weights
from minirl.plan.choice import (
    USABLE,
    can_keep_cache,
    host_too_small,
    largest,
    room_bytes,
    too_large,
)
from minirl.plan.formulas import num_gathers, num_parameters
from minirl.plan.free_memory import free_bytes, free_host_bytes, gb, listed, sum_of
from minirl.plan.needs import always_bytes, host_bytes, phase_bytes
from minirl.plan.workload import Sizes, Workload
from minirl.ranks.process_group import device_type, local_rank, local_world_size, print0, world_size
from minirl.rewards.functions import asked_of_episodes, compute_rewards
from minirl.run.config import RunConfig, ranks_and_bytes
from minirl.run.embedded_model import write_shape
from minirl.run.load_prompts import load_prompts
from minirl.run.load_task import load_task, rollout_workers
from minirl.run.planning import plan
from minirl.run.setup import compute_dtype

SHOWN_PROMPTS = 2
SHOWN_CHARACTERS = 400  # of a prompt or completion
SAMPLE_CHARACTERS = 10_000  # of the completion that rewards judge
MOST_TOKENS = 2**24  # in the largest microbatch and cache that it looks for


@dataclasses.dataclass(frozen=True)
class _Capacity:
    """The ranks that a run would have, and the free bytes of each.

    host_ranks, host_free: ranks on this host, and its free bytes; unknown for another machine.
    """

    device_type: str
    num_ranks: int
    free: float
    host_ranks: int = 1
    host_free: float | None = None


def dry_run(
    config: RunConfig, *, rewards: Mapping[str, RewardFunction] | None = None, tools: Sequence[Tool] = ()
) -> int:
    """Print the plan of the run and the memory of each phase; returns the exit code. Not collective.

    rewards, tools: see `Setup`. It reads data, config.json and tokenizer, and calls the reward functions on two
    prompts. Raises InputError, naming the flags to change, for unusable inputs and for a run that does not fit.
    """
    capacity = _capacity(config)
    task = load_task(config, rewards)
    workers = rollout_workers(config)
    if workers is not None:
        workers.pool.stop()  # they could load the function
    with ExitStack() as stack:
        if config.model is None:
            folder = write_shape(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        else:
            folder = resolve_folder(config.model, with_weights=False)
        model_config = dataclasses.replace(read_config(folder, scalar_head=False), adapters=config.adapters)
        if any(folder.glob("*.safetensors")):
            check_weights(model_config, folder)
        streams = load_prompts(config, task, folder, model_config, tools=tools, workers=workers)
        work, sizes, groups, refusals = plan(
            config,
            model_config,
            of_node=capacity.num_ranks if config.gpus else capacity.host_ranks,
            recorded={},
            free=capacity.free,
            value_folder=None,
            streams=streams,
            dtype=compute_dtype(config.dtype, capacity.device_type),
            device_type=capacity.device_type,
            num_ranks=capacity.num_ranks,
            num_shards=capacity.host_ranks if config.shard_over == "node" else capacity.num_ranks,
        )
    _print_work(config, work, streams)
    _print_decoding(work, groups, refusals)
    _print_memory(work, sizes, capacity)
    _print_prompts(task, streams[0])
    reason = too_large(work, sizes, capacity.free)
    if capacity.host_free is not None:
        reason = reason or host_too_small(work, num_ranks=capacity.host_ranks, free=capacity.host_free)
    if reason:
        raise InputError(f"--dry-run: does not fit: {reason}")
    print0("fits; nothing was loaded or written")
    return 0


def _capacity(config: RunConfig) -> _Capacity:
    """The machine of --gpus, or this one with torchrun's ranks."""
    if config.gpus is not None:
        num_ranks, free = ranks_and_bytes(config.gpus)
        return _Capacity("cuda", num_ranks, free)
    kind = device_type(config.device)
    index = local_rank() if kind == "cuda" else 0
    free = free_bytes(torch.device(kind, index))
    return _Capacity(kind, world_size(), free, local_world_size(), free_host_bytes())


def _print_work(config: RunConfig, work: Workload, streams: Sequence[PromptStream]) -> None:
    prompts, held_out = streams
    dtype = str(work.dtype).removeprefix("torch.")
    parameters = f"{config.model or 'embedded'}: {num_parameters(work.policy):,} parameters"
    print0(f"model    {parameters}, {dtype} on {work.num_ranks} x {work.device_type}")
    print0(
        f"data     {prompts.num_prompts:,} prompts, the longest {work.longest_prompt:,} tokens; "
        f"{held_out.num_prompts:,} held out"
    )
    for note in prompts.notes(per_step=config.prompts_per_step) + held_out.notes():
        print0(f"note     {note}")
    num_epochs = prompts.epoch(config.num_steps * config.prompts_per_step)
    print0(
        f"steps    {config.num_steps:,} steps, {num_epochs:,.2f} epochs, {config.num_updates:,} updates "
        f"({config.updates_per_step} a step)"
    )
    num_rollouts = config.prompts_per_step * config.group_size
    print0(
        f"a step   {num_rollouts:,} completions of {config.prompts_per_step:,} prompts, at most "
        f"{num_rollouts * work.longest:,} tokens: {work.longest:,} each"
    )


def _print_decoding(work: Workload, groups: Sequence[int], refusals: Sequence[str]) -> None:
    """Describe the savings and costs of decoding from shards, and why the run does it or not, if it can."""
    group = groups[-1]
    whole = work.dtype.itemsize * num_parameters(work.policy)
    effect = f"{gb(whole / group)} of weights on each instead of {gb(whole)}, {num_gathers(work.policy)} gathers a step"
    if work.shards_weights:
        why = f"; whole they do not fit: {refusals[0].partition(':')[0]}" if len(groups) > 1 else ""
        print0(f"decode   {group} ranks together: {effect}{why}")
    elif group > 1:
        print0(
            f"decode   each rank alone, as whole weights fit; {group} together (--shard-decode on): {effect}"
        )


def _print_memory(work: Workload, sizes: Sizes, capacity: _Capacity) -> None:
    """The bytes of each phase on a rank, and the largest sizes that would fit."""
    free = capacity.free
    always = always_bytes(work)
    print0(f"sizes    {sizes.flags()}")
    print0(f"memory   {gb(free)} on each rank, of which {gb(USABLE * free)} can be used")
    print0(f"  always {sum_of(always)}")
    keeps_cache = can_keep_cache(work, sizes, free)
    for phase, parts in phase_bytes(work, sizes, keeps_cache=keeps_cache).items():
        total = sum(always.values()) + sum(parts.values())
        print0(f"  {phase} {gb(total)}: always + {listed(parts)}")
    if keeps_cache:
        print0("  the cache is kept from step to step")
    if work.is_cuda:
        needed = host_bytes(work, num_ranks=capacity.host_ranks)
        there = "" if capacity.host_free is None else f" of {gb(capacity.host_free)}"
        ranks = "a rank" if capacity.host_ranks == 1 else f"{capacity.host_ranks} ranks"
        print0(f"  and of the host {gb(sum(needed.values()))}{there} for {ranks}: {listed(needed)}")
    room = room_bytes(work, free)
    endless = dataclasses.replace(work, update_tokens=MOST_TOKENS)
    without, recomputed = (
        largest(
            "max_tokens_per_microbatch",
            endless,
            dataclasses.replace(sizes, recompute_layers=recompute),
            room,
            most=MOST_TOKENS,
        )
        for recompute in (False, True)
    )
    cache = largest("cache_tokens", work, sizes, room, most=MOST_TOKENS)
    print0(
        f"largest  microbatch {without:,} tokens, {recomputed:,} with --recompute-layers on; cache {cache:,} tokens"
    )


def _print_prompts(task: Task, prompts: PromptStream) -> None:
    """Print the first prompts as the model reads them, and each reward of an empty and of a sample completion."""
    tokenizer = prompts.tokenizer
    for ordinal in range(min(SHOWN_PROMPTS, prompts.num_prompts)):
        row = prompts.row(ordinal)
        ids = prompts.prompt_ids(ordinal)
        text = tokenizer.backend.decode(ids, skip_special_tokens=False)
        print0(f"prompt   {row.place}, {len(ids)} tokens: {_shown(text)}")
        samples = ["", _sample_completion(row)]
        sample_ids = [tokenizer.backend(sample, add_special_tokens=False)["input_ids"] for sample in samples]
        for name, function in {**task.rewards, **task.extra_scores}.items():
            if asked_of_episodes([function]) - {"messages"}:
                print0(f"reward   {name}: asks for facts of episodes, and a dry run makes none")
                continue
            values = compute_rewards(
                function,
                [row, row],
                completions=samples,
                completion_ids=sample_ids,
                of_episodes={"messages": [_answered(row, sample) for sample in samples]},
            )
            given = ", ".join(
                f"{_shown(sample)} gets {value}" for sample, value in zip(samples, values, strict=True)
            )
            print0(f"reward   {name}: {given}")


def _answered(row: Row, completion: str) -> Messages:
    """The conversation of the row's prompt and a completion."""
    return conversation(as_messages(row.prompt), [([], lambda: completion)])


def _sample_completion(row: Row) -> str:
    """The row's first text or number besides the prompt, which often is the answer."""
    values = [str(value) for value in row.columns.values() if isinstance(value, str | int | float)]
    sample = values[0] if values else "a completion"
    # Half of a surrogate pair cannot be tokenized, and completions never have one.
    return sample[:SAMPLE_CHARACTERS].encode(errors="replace").decode()


def _shown(text: str) -> str:
    shown = repr(text[:SHOWN_CHARACTERS])
    return shown if len(text) <= SHOWN_CHARACTERS else f"{shown} ..."
