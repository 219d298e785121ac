"""From a task's name and files to the task."""

import dataclasses
from collections.abc import Sequence

from minirl.data.gsm8k import load_gsm8k
from minirl.data.jsonl import load_jsonl_task
from minirl.data.sorting import load_sorting
from minirl.data.task import Task
from minirl.errors import InputError
from minirl.rewards.functions import check_columns
from minirl.rewards.worker_process import load_reward

TASKS = ("auto", "sorting", "gsm8k", "jsonl")
RESERVED = {"reward", "mean", "std", "errors", "frac_equal_groups", "kl_coef", "reward_model", "overlong"}


def load_task(
    name: str,
    *,
    data: str | None,
    eval_data: str | None,
    prompt_field: str = "prompt",
    reward: Sequence[str] = (),
    reward_timeout: float = 60.0,
    on_reward_error: str = "stop",
    reward_model: str | None = None,
) -> Task:
    """The task `name` ("auto": jsonl with `data`, else sorting) from its files.

    reward: "file.py:function" each, called in a worker process of its own (`reward_process`). They, or the reward model
    that the caller adds, take the place of the task's own reward, which is then only logged. The whole of each file is
    checked, also for the fields that the rewards ask for. Raises InputError naming file, line, field or flag.
    """
    if name not in TASKS:
        raise InputError(f"--task {name}: choose one of {', '.join(TASKS)}")
    name = ("jsonl" if data else "sorting") if name == "auto" else name
    names = {spec.rpartition(":")[2] for spec in reward}
    if len(names) < len(reward):
        raise InputError(
            f"--reward {' '.join(reward)}: two functions of one name; rename one, metrics go by name"
        )
    if taken := sorted(names & RESERVED):
        raise InputError(
            f"--reward {' '.join(reward)}: the name {taken[0]} is taken by a metric; rename the function"
        )
    loaded = [load_reward(spec, timeout_s=reward_timeout, on_error=on_reward_error) for spec in reward]
    functions = {function.__name__: function for function in loaded}
    if name == "sorting":
        if data or eval_data:
            raise InputError("--task sorting makes its own prompts; leave out --data and --eval-data")
        task = load_sorting()
    elif data is None:
        raise InputError(f"--task {name} needs --data FILE.jsonl")
    elif name == "gsm8k":
        task = load_gsm8k(data, eval_data)
    elif not functions and not reward_model:
        raise InputError(
            "--data FILE.jsonl needs --reward FILE.py:FUNCTION, --reward-model DIR or --task gsm8k"
        )
    else:
        task = load_jsonl_task(data, eval_data, prompt_field=prompt_field)
    if functions or reward_model:
        own = {**task.rewards, **task.extra_scores}
        if taken := sorted(functions.keys() & own):
            raise InputError(
                f"--reward {' '.join(reward)}: task {name} has a score {taken[0]}; rename the function"
            )
        task = dataclasses.replace(task, rewards=functions, extra_scores=own)
    check_columns({**task.rewards, **task.extra_scores}, [*task.train_rows, *task.eval_rows])
    return task
