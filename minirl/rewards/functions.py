"""Call reward functions on rollouts and check what they return.

The interface is TRL's. A reward function is called with keyword arguments: `prompts`, `completions`,
`completion_ids` and every other column of the data, each a list with one entry per completion. It gets the
arguments that it names, or all of them if it takes `**kwargs`, and returns one number per completion, of at most
1e12, or None where it does not apply. It may be an `async def`.
Text prompts come with text completions, chat prompts with `[{"role": "assistant", "content": text}]`.

A reward model is such a function too: it reads the texts with its own tokenizer and chat template
(`reward_model`).
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minirl.data.task import STANDARD_ARGUMENTS, RewardFunction, Row
from minirl.errors import InputError, RewardError
from minirl.ranks.time_account import spent_on
from minirl.rewards.worker import call_reward, validate_rewards
from minirl.rewards.worker_process import RewardProcess


def overlong_penalty(*, limit: int, buffer: float) -> RewardFunction:
    """Return a reward function that penalises long completions.

    The reward is 0 up to `limit - buffer` tokens, then falls linearly to -1 at `limit` tokens and stays
    there. DAPO's soft overlong punishment, arXiv:2503.14476 eq. 13.
    """

    def overlong(completion_ids: Sequence[Sequence[int]]) -> list[float]:
        rewards = []
        for ids in completion_ids:
            tokens_before_penalty = limit - buffer - len(ids)
            rewards.append(min(0.0, max(-1.0, tokens_before_penalty / buffer)))
        return rewards

    return overlong


def functions_and_weights(
    functions: Mapping[str, RewardFunction], weights: Sequence[float], *, logged: Mapping[str, RewardFunction]
) -> tuple[dict[str, RewardFunction], Tensor]:
    """Return all K functions, rewards before those only `logged`, and their weights fp64 [K].

    Without `weights` each reward weighs 1; the functions that are only logged weigh 0. Raises InputError if
    there are not as many weights as rewards.
    """
    reward_weights = list(weights) or [1.0] * len(functions)
    if len(reward_weights) != len(functions):
        given = " ".join(map(str, weights))
        raise InputError(f"--reward-weights {given}: the rewards are {', '.join(functions)}")
    all_functions = {**functions, **logged}
    all_weights = reward_weights + [0.0] * len(logged)
    return all_functions, torch.tensor(all_weights, dtype=torch.float64)


def required_arguments(function: RewardFunction) -> set[str]:
    """Return the names of the arguments without a default."""
    names = set()
    for parameter in inspect.signature(function).parameters.values():
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_variadic:
            names.add(parameter.name)
    return names


def check_columns(functions: Mapping[str, RewardFunction], rows: Iterable[Row]) -> None:
    """Raise InputError, naming row, field and function, if a row lacks a column that a function requires."""
    required = {}
    for name, function in functions.items():
        required[name] = required_arguments(function).difference(STANDARD_ARGUMENTS)
    if not any(required.values()):
        return  # each row would be read from its file for nothing
    for row in rows:
        for name, columns in required.items():
            missing = sorted(columns - row.columns.keys())
            if missing:
                available = f"only {sorted(row.columns)}, and prompts, completions, completion_ids"
                raise InputError(
                    f"{row.place}: no field {missing[0]!r}, which the reward {name} asks for; {available}"
                )


def accepted_arguments(function: RewardFunction, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `arguments` that the function takes. Raises InputError if a required one is missing."""
    missing = sorted(required_arguments(function) - arguments.keys())
    if missing:
        raise InputError(
            f"reward {_name_of(function)} asks for {missing[0]!r}; the data has {sorted(arguments)}"
        )
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


def all_arguments(
    rows: Sequence[Row], completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return everything that a reward function may take, by argument name."""
    shaped_completions: list[Any] = []
    for row, text in zip(rows, completions, strict=True):
        is_chat = not isinstance(row.prompt, str)
        shaped_completions.append([{"role": "assistant", "content": text}] if is_chat else text)
    arguments: dict[str, Any] = {
        "prompts": [row.prompt for row in rows],
        "completions": shaped_completions,
        "completion_ids": [list(ids) for ids in completion_ids],
    }
    column_names = {name for row in rows for name in row.columns}
    for name in sorted(column_names - arguments.keys()):
        arguments[name] = [row.columns.get(name) for row in rows]
    return arguments


@spent_on("wait_rewards")
def compute_rewards(
    function: RewardFunction,
    rows: Sequence[Row],
    *,
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    seeds: Sequence[int] | None = None,
) -> list[float | None]:
    """Return the rewards of this rank's N completions, one of each row's prompt. Not collective.

    A reward is None where the function says that it does not apply, and NaN where the function failed in its
    worker process and `--on-reward-error zero` forgives the failure. Raises RewardError naming function, row
    and value for anything else that is not one finite number per completion.
    """
    if not completions:
        return []
    arguments = accepted_arguments(function, all_arguments(rows, completions, completion_ids))
    places = [row.place for row in rows]
    if isinstance(function, RewardProcess):
        return function.compute(arguments, places=places, texts=completions, seeds=seeds or [0] * len(rows))
    checked = validate_rewards(call_reward(function, arguments), len(completions))
    if isinstance(checked, str):
        raise RewardError(f"reward {_name_of(function)} {checked}")
    rewards: list[float | None] = []
    for value, place, text in zip(checked, places, completions, strict=True):
        if isinstance(value, str):
            name = _name_of(function)
            raise RewardError(f"reward {name} for the row at {place}, completion {text[:80]!r}: {value}")
        rewards.append(value)
    return rewards


def _name_of(function: RewardFunction) -> str:
    return getattr(function, "__name__", str(function))
