"""`--dry-run`: print a run's data, first prompt and memory plan.

A dry run does not load weights, create a run folder or initialize a process group.
"""

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from minirl.data.messages import Tool
from minirl.data.task import RewardFunction
from minirl.errors import InputError, refuse
from minirl.model.folders import resolve_folder
from minirl.ranks.process_group import print0, select_device
from minirl.run.budget import Machine, num_parameters
from minirl.run.config import RunConfig
from minirl.run.embedded_model import CONFIG, save_tokenizer
from minirl.run.inputs import load_prompts, load_rewards, load_rollout_function, load_task
from minirl.run.planning import make_workload, plan, this_machine

SHOWN_CHARACTERS = 400  # maximum length of the printed prompt


def print_plan(
    config: RunConfig,
    *,
    rewards: Mapping[str, RewardFunction] | None = None,
    tools: Sequence[Tool] = (),
    scalar_head: bool = False,
) -> int:
    """Print the run's data, the first prompt as the model sees it, and the memory plan; return the exit code.

    Not collective. Reads only the data, config.json and the tokenizer. Takes the same arguments as `Setup`. Raises
    InputError, naming the flags to change, for invalid inputs and for a run that does not fit into memory.
    """
    user_rollout = load_rollout_function(config)
    task = load_task(config, has_rewards=rewards is not None)
    load_rewards(config, task)
    with tempfile.TemporaryDirectory() as temporary:
        if config.model is None:
            folder = Path(temporary)
            save_tokenizer(folder)
            (folder / "config.json").write_text(json.dumps(CONFIG))
        else:
            folder = resolve_folder(config.model, with_weights=False)
        policy, prompts, held_out = load_prompts(
            config, task, folder, tools=tools, user_rollout=user_rollout, scalar_head=scalar_head
        )
    print0(
        f"data     {prompts.num_prompts:,} prompts, the longest {max(prompts.prompt_lengths):,} tokens; "
        f"{held_out.num_prompts:,} held out"
    )
    for note in prompts.notes(per_step=config.prompts_per_step) + held_out.notes():
        print0(f"note     {note}")
    row = prompts.row(0)
    prompt = prompts.tokenizer.backend.decode(prompts.tokenizer.encode(row), skip_special_tokens=False)
    print0(f"prompt   {row.origin}: {prompt[:SHOWN_CHARACTERS]!r}")
    work = make_workload(config, policy, _machine(config), prompts=prompts, held_out=held_out)
    print0(
        f"model    {num_parameters(policy):,} parameters, {work.dtype} on {work.num_ranks} x {work.device_type}"
    )
    needed = plan(config, work, recorded={})
    for line in needed.format_plan():
        print0(f"memory   {line}")
    refuse(not needed.fits(), "--dry-run: the run does not fit")
    print0("fits; nothing was loaded or written")
    return 0


def _machine(config: RunConfig) -> Machine:
    """Return the machine that --gpus describes, or this machine if the flag is not given.

    Raises InputError for an invalid --gpus.
    """
    if config.gpus is None:
        return this_machine(select_device(may_use_cpu=config.uses_bundled_model))
    found = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5}(?:\.\d+)?)", config.gpus, re.ASCII)
    if not found:
        raise InputError(
            f"--gpus {config.gpus}: expected the number of GPUs and the GB of memory per GPU, such as 8x80"
        )
    return Machine("cuda", int(found[1]), float(found[2]) * 1e9)
