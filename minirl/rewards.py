"""Rewards: functions from texts to numbers, in TRL's shape, and the check that what they return can be trained on.

A reward function is called with keyword arguments `prompts`, `completions`, `completion_ids` and one list per other
column of the data, as far as it names them (or takes `**kwargs`), and returns one finite number per completion. Text
prompts come with text completions, chat prompts with `[{"role": "assistant", "content": text}]`.
"""

import importlib.util
import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minirl.tasks import RewardFunction, Row


def load_reward(spec: str) -> RewardFunction:
    """The function that "file.py:name" names. Raises ValueError or FileNotFoundError saying what is wrong with it."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name:
        raise ValueError(f"--reward {spec}: expected file.py:function")
    if not Path(path).is_file():
        raise FileNotFoundError(f"--reward {spec}: there is no file {path}")
    module_spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"--reward {spec}: {path} has no function {name}")
    return function


def accepted_arguments(function: RewardFunction, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `arguments` that the function can take."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


def compute_rewards(
    function: RewardFunction,
    rows: Sequence[Row],
    *,
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
) -> list[float]:
    """Rewards of this rank's completions of these rows' prompts. Not collective.

    Raises ValueError naming function, row and value unless there is one finite number per completion.
    """
    if not completions:
        return []
    shaped = [
        text if isinstance(row.prompt, str) else [{"role": "assistant", "content": text}]
        for row, text in zip(rows, completions, strict=True)
    ]
    arguments: dict[str, Any] = {"prompts": [row.prompt for row in rows], "completions": shaped}
    arguments["completion_ids"] = list(completion_ids)
    for name in sorted({name for row in rows for name in row.columns} - arguments.keys()):
        arguments[name] = [row.columns.get(name) for row in rows]
    rewards = function(**accepted_arguments(function, arguments))
    called = getattr(function, "__name__", str(function))
    if not hasattr(rewards, "__len__") or getattr(rewards, "ndim", 1) == 0:
        raise ValueError(f"reward {called} returned {rewards!r}; expected a list of {len(completions)} numbers")
    if len(rewards) != len(completions):
        raise ValueError(f"reward {called} returned {len(rewards)} values for {len(completions)} completions")
    return [_number(called, r, row.place, text) for r, row, text in zip(rewards, rows, completions, strict=True)]


def _number(function: str, value: Any, place: str, completion: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or isinstance(value, str):
        raise ValueError(
            f"reward {function} returned {value!r} for the row at {place}, completion {completion[:80]!r}; "
            "return a finite number for every completion"
        )
    return number
