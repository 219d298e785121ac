"""From a task's name and files to the task."""

import dataclasses

from minirl.rewards import load_reward
from minirl.tasks import Task
from minirl.tasks.gsm8k import load_gsm8k
from minirl.tasks.jsonl import load_jsonl_task
from minirl.tasks.sorting import load_sorting

TASKS = ("auto", "sorting", "gsm8k", "jsonl")


def load_task(
    name: str, *, data: str | None, eval_data: str | None, prompt_field: str = "prompt", reward: str | None = None
) -> Task:
    """The task `name` ("auto": jsonl with `data`, else sorting) from its files; `reward` is "file.py:function".

    The whole of each file is checked. Raises ValueError or FileNotFoundError naming file, line, field or flag.
    """
    if name not in TASKS:
        raise ValueError(f"--task {name}: choose one of {', '.join(TASKS)}")
    name = ("jsonl" if data else "sorting") if name == "auto" else name
    if name == "sorting":
        if data or eval_data:
            raise ValueError("--task sorting makes its own prompts; leave out --data and --eval-data")
        task = load_sorting()
    elif data is None:
        raise ValueError(f"--task {name} needs --data FILE.jsonl")
    elif name == "gsm8k":
        task = load_gsm8k(data, eval_data)
    elif reward is None:
        raise ValueError("--data FILE.jsonl needs --reward FILE.py:FUNCTION, or --task gsm8k")
    else:
        return load_jsonl_task(data, eval_data, prompt_field=prompt_field, reward=load_reward(reward))
    return dataclasses.replace(task, reward=load_reward(reward)) if reward else task
