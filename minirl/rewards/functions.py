"""Rewards: functions from texts to numbers, in TRL's shape, and the check that what they return can be trained on.

A reward model is such a function too: texts go through its own tokenizer and template.

A reward function is called with keyword arguments `prompts`, `completions`, `completion_ids` and one list per other
column of the data, as far as it names them (or takes `**kwargs`), and returns one finite number per completion. Text
prompts come with text completions, chat prompts with `[{"role": "assistant", "content": text}]`.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minirl.data.prompts import PromptStream
from minirl.data.task import RewardFunction, Row
from minirl.errors import InputError, RewardError
from minirl.generation.sampling import request_key
from minirl.ranks import watchdog
from minirl.rewards.rewarded import RewardedRollouts
from minirl.rewards.worker import validate_rewards
from minirl.rewards.worker_process import RewardProcess
from minirl.rollouts import Rollout


def overlong_penalty(*, limit: int, buffer: float) -> RewardFunction:
    """A reward of 0 up to limit - buffer tokens, then linearly down to -1 at `limit` and beyond.

    Soft overlong punishment, DAPO, arXiv:2503.14476 eq. 13.
    """

    def overlong(completion_ids: Sequence[Sequence[int]]) -> list[float]:
        return [min(0.0, max(-1.0, (limit - buffer - len(ids)) / buffer)) for ids in completion_ids]

    return overlong


def functions_and_weights(
    functions: Mapping[str, RewardFunction], weights: Sequence[float], *, logged: Mapping[str, RewardFunction]
) -> tuple[dict[str, RewardFunction], Tensor]:
    """All functions, rewards first, and their weights fp64 [K]: 1 each unless given, 0 for those only `logged`.

    Raises InputError when the number of weights is not that of the rewards.
    """
    if weights and len(weights) != len(functions):
        raise InputError(
            f"--reward-weights {' '.join(map(str, weights))}: the rewards are {', '.join(functions)}"
        )
    all_weights = [*(weights or [1.0] * len(functions)), *[0.0] * len(logged)]
    return {**functions, **logged}, torch.tensor(all_weights, dtype=torch.float64)


def required_arguments(function: RewardFunction) -> set[str]:
    """Names of the arguments that the function cannot do without."""
    parameters = inspect.signature(function).parameters.values()
    return {
        p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }


def check_columns(functions: Mapping[str, RewardFunction], rows: Sequence[Row]) -> None:
    """Raise InputError naming row, field and function unless each row has what each function requires."""
    for name, function in functions.items():
        required = required_arguments(function) - {"prompts", "completions", "completion_ids"}
        for row in rows:
            if missing := sorted(required - row.columns.keys()):
                there = f"only {sorted(row.columns)}, and prompts, completions, completion_ids"
                raise InputError(
                    f"{row.place}: no field {missing[0]!r}, which the reward {name} asks for; {there}"
                )


def accepted_arguments(function: RewardFunction, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `arguments` that the function can take."""
    parameters = inspect.signature(function).parameters
    if missing := sorted(required_arguments(function) - arguments.keys()):
        called = getattr(function, "__name__", str(function))
        raise InputError(f"reward {called} asks for {missing[0]!r}; the data has {sorted(arguments)}")
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


def reward_rollouts(
    functions: Mapping[str, RewardFunction], prompts: PromptStream, rollouts: Sequence[Rollout]
) -> RewardedRollouts:
    """This rank's rollouts of these prompts with the rewards of K functions. Not collective.

    A worker's calls are seeded by rollout ids: a random reward does not depend on what ran before. Raises as
    `compute_rewards`.
    """
    rows = [prompts.row(rollout.rollout_id.prompt_ordinal) for rollout in rollouts]
    ids = [rollout.completion for rollout in rollouts]
    texts = [prompts.tokenizer.decode(completion) for completion in ids]
    names = [rollout.rollout_id for rollout in rollouts]
    seeds = [
        request_key(prompts.seed, purpose=prompts.purpose, prompt_ordinal=n.prompt_ordinal, sample=n.sample)
        for n in names
    ]
    columns = []
    for name, function in functions.items():
        watchdog.heartbeat(f"reward {name}")
        columns.append(compute_rewards(function, rows, completions=texts, completion_ids=ids, seeds=seeds))
        watchdog.heartbeat("")
    rewards = torch.tensor(columns, dtype=torch.float64).view(len(functions), len(rows)).T
    failed = rewards.isnan()
    return RewardedRollouts(list(rollouts), rows, texts, rewards.masked_fill(failed, 0), failed.any(dim=1))


def compute_rewards(
    function: RewardFunction,
    rows: Sequence[Row],
    *,
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    seeds: Sequence[int] | None = None,
) -> list[float]:
    """Rewards of this rank's completions of these rows' prompts; nan where a worker's failure is forgiven.

    Not collective. Raises RewardError naming function, row and value unless there is one finite number per completion.
    """
    if not completions:
        return []
    shaped = [
        text if isinstance(row.prompt, str) else [{"role": "assistant", "content": text}]
        for row, text in zip(rows, completions, strict=True)
    ]
    arguments: dict[str, Any] = {"prompts": [row.prompt for row in rows], "completions": shaped}
    arguments["completion_ids"] = [list(ids) for ids in completion_ids]
    for name in sorted({name for row in rows for name in row.columns} - arguments.keys()):
        arguments[name] = [row.columns.get(name) for row in rows]
    accepted, places = accepted_arguments(function, arguments), [row.place for row in rows]
    if isinstance(function, RewardProcess):
        return function.compute(accepted, places=places, texts=completions, seeds=seeds or [0] * len(rows))
    answers = validate_rewards(function(**accepted), len(completions))
    called = getattr(function, "__name__", str(function))
    if isinstance(answers, str):
        raise RewardError(f"reward {called} {answers}")
    for answer, place, text in zip(answers, places, completions, strict=True):
        if isinstance(answer, str):
            raise RewardError(f"reward {called} for the row at {place}, completion {text[:80]!r}: {answer}")
    return [float(answer) for answer in answers]
