"""`--dry-run`: print what a run would read and need, without weights, run folder or process group."""

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from minirl.data.task import RewardFunction
from minirl.data.tools import Tool
from minirl.errors import refuse
from minirl.model.families import read_config
from minirl.model.folders import resolve_folder
from minirl.model.weights import check_weights
from minirl.ranks.process_group import device_type, print0, rank
from minirl.run.budget import num_parameters
from minirl.run.config import RunConfig, ranks_and_bytes
from minirl.run.embedded_model import write_shape
from minirl.run.load_prompts import load_prompts
from minirl.run.load_task import load_rollout, load_task
from minirl.run.planning import Machine, lines, plan, this_machine
from minirl.run.setup import compute_dtype

SHOWN_CHARACTERS = 400  # of a prompt


def dry_run(
    config: RunConfig, *, rewards: Mapping[str, RewardFunction] | None = None, tools: Sequence[Tool] = ()
) -> int:
    """Print the data of the run, its first prompt as the model reads it, and its memory; returns the exit code.

    Not collective. rewards, tools: see `Setup`. It reads data, config.json, tokenizer and reward files. Raises
    InputError, naming the flags to change, for unusable inputs and for a run that does not fit.
    """
    task = load_task(config, rewards)
    user_rollout = load_rollout(config)
    with ExitStack() as stack:
        if config.model is None:
            folder = write_shape(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        else:
            folder = resolve_folder(config.model, with_weights=False)
        policy = dataclasses.replace(read_config(folder, scalar_head=False), adapters=config.adapters)
        if any(folder.glob("*.safetensors")):
            check_weights(policy, folder)
        streams = load_prompts(config, task, folder, policy, tools=tools, user_rollout=user_rollout)
    prompts, held_out = streams
    counts = f"{prompts.num_prompts:,} prompts, the longest {prompts.longest_prompt:,} tokens"
    print0(f"data     {counts}; {held_out.num_prompts:,} held out")
    for note in prompts.notes(per_step=config.prompts_per_step) + held_out.notes():
        print0(f"note     {note}")
    prompt = prompts.tokenizer.backend.decode(prompts.prompt_ids(0), skip_special_tokens=False)
    print0(f"prompt   {prompts.row(0).place}: {prompt[:SHOWN_CHARACTERS]!r}")
    machine = _machine(config)
    dtype = compute_dtype(config.dtype, machine.device_type)
    ranks = f"{machine.num_ranks} x {machine.device_type}"
    print0(f"model    {num_parameters(policy):,} parameters, {dtype} on {ranks}")
    sizes, needed = plan(config, policy, machine, streams=streams, dtype=dtype, recorded={})
    for line in lines(sizes, needed):
        print0(f"memory   {line}")
    refuse(not needed.fits(), "--dry-run: the run does not fit")
    print0("fits; nothing was loaded or written")
    return 0


def _machine(config: RunConfig) -> Machine:
    """The machine of --gpus, or this one."""
    if config.gpus is not None:
        num_ranks, free = ranks_and_bytes(config.gpus)
        return Machine("cuda", num_ranks, free)
    kind = device_type()
    return this_machine(torch.device(kind, rank() if kind == "cuda" else 0))
