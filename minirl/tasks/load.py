"""From a task's name and files to the task."""

import dataclasses
from collections.abc import Mapping, Sequence

from minirl.errors import InputError
from minirl.reward_process import RewardProcess
from minirl.rewards import required_columns
from minirl.tasks import RewardFunction, Task
from minirl.tasks.gsm8k import load_gsm8k
from minirl.tasks.jsonl import load_jsonl_task
from minirl.tasks.sorting import load_sorting

TASKS = ("auto", "sorting", "gsm8k", "jsonl")
MAX_REWARD_ERRORS = 0.05  # share of completions, where errors are tolerated
RESERVED = {"reward", "errors", "mean", "std", "frac_equal_groups", "kl_coef", "reward_model", "overlong"}


def load_task(
    name: str,
    *,
    data: str | None,
    eval_data: str | None,
    prompt_field: str = "prompt",
    reward: Sequence[str] = (),
    reward_model: str | None = None,
    reward_timeout: float = 60.0,
    on_reward_error: str = "stop",
) -> Task:
    """The task `name` ("auto": jsonl with `data`, else sorting) from its files.

    reward: "file.py:function" each. They, or the reward model that the caller adds, take the place of the task's own
    reward, which is then only logged. They run in processes of their own, `reward_timeout` seconds a call at most;
    on_reward_error "zero" tolerates few errors. The whole of each file is checked. Raises InputError naming
    file, line, field or flag.
    """
    if name not in TASKS:
        raise InputError(f"--task {name}: choose one of {', '.join(TASKS)}")
    name = ("jsonl" if data else "sorting") if name == "auto" else name
    how = dict(timeout_s=reward_timeout, max_errors=MAX_REWARD_ERRORS if on_reward_error == "zero" else 0.0)
    functions = {spec.rpartition(":")[2]: RewardProcess(spec, **how) for spec in reward}
    if len(functions) < len(reward):
        raise InputError(f"--reward {' '.join(reward)}: two functions of one name; rename one, metrics go by name")
    if taken := sorted(functions.keys() & RESERVED):
        raise InputError(f"--reward {' '.join(reward)}: the name {taken[0]} is taken by a metric; rename the function")
    if name == "sorting":
        if data or eval_data:
            raise InputError("--task sorting makes its own prompts; leave out --data and --eval-data")
        task = load_sorting()
    elif data is None:
        raise InputError(f"--task {name} needs --data FILE.jsonl")
    elif name == "gsm8k":
        task = load_gsm8k(data, eval_data)
    elif not functions and not reward_model:
        raise InputError("--data FILE.jsonl needs --reward FILE.py:FUNCTION, --reward-model DIR or --task gsm8k")
    else:
        task = load_jsonl_task(data, eval_data, prompt_field=prompt_field)
    _refuse_missing_columns(task, {**task.rewards, **task.extra_scores, **functions})
    if not functions and not reward_model:
        return task
    own = {**task.rewards, **task.extra_scores}
    if taken := sorted(functions.keys() & own):
        raise InputError(f"--reward {' '.join(reward)}: task {name} has a score called {taken[0]}; rename the function")
    return dataclasses.replace(task, rewards=functions, extra_scores=own)


def _refuse_missing_columns(task: Task, functions: Mapping[str, RewardFunction]) -> None:
    for name, function in functions.items():
        required = required_columns(function)
        for row in (*task.train_rows, *task.eval_rows):
            if missing := sorted(required - row.columns.keys()):
                there = ", ".join(sorted(row.columns)) or "none"
                raise InputError(f"{row.place}: no field {missing[0]!r}, which reward {name} needs; fields: {there}")
