"""Call reward functions on rollouts and check their results.

The interface is TRL's. A reward function is called with keyword arguments: `prompts`, `completions`,
`completion_ids` and every other column of the data, each a list with one entry per completion. It gets the
arguments that it names, or all of them if it takes `**kwargs`, and returns one number per completion, of at most
1e12, or None where it does not apply. It may be an `async def`.
Text prompts come with text completions, chat prompts with the messages after the prompt, as
`[{"role": "assistant", "content": text}]`.

A function that names them gets further lists, one entry per completion: `episodes`, dicts with the conversation, turns
and more (`episode_facts`). One that runs in this process also gets `environments`, the objects of --environment, and
`rollouts`, each a `Rollout`. It may change what it gets, which is a copy.

A reward model is such a function too: it reads the texts with its own tokenizer and chat template
(`reward_model`).
"""

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minirl.data.task import EPISODE_ARGUMENTS, STANDARD_ARGUMENTS, RewardFunction, Row
from minirl.data.tokenizer import Tokenizer
from minirl.data.view import answers_of, messages_of
from minirl.errors import InputError, RewardError, escaped
from minirl.files.user_code import users_traceback
from minirl.rewards.values import Answer, validate_rewards
from minirl.rewards.worker import call_reward, parameters_of
from minirl.rollouts import Rollout

EPISODE = "episode"  # in --reward, instead of a file or module: rewards that rollouts give


def overlong_penalty(*, limit: int, buffer: float) -> RewardFunction:
    """A reward function that penalises long completions.

    The reward is 0 up to `limit - buffer` tokens, then falls linearly to -1 at `limit` tokens and stays
    there. DAPO's soft overlong punishment, arXiv:2503.14476 eq. 13. `limit` is that of a branch: the reward is the sum
    of a rollout's branches.
    """

    def penalty(branch: Rollout) -> float:
        return min(0.0, max(-1.0, (limit - buffer - len(branch.after_prompt)) / buffer))

    def overlong(rollouts: Sequence[Rollout]) -> list[float]:
        return [sum(map(penalty, rollout.branches)) for rollout in rollouts]

    return overlong


class EpisodeReward:
    """The reward function that returns one of an episode's own rewards, or None where it does not apply."""

    def __init__(self, reward_name: str = "reward"):
        """reward_name: as in `episode.reward(value, reward_name)`; a returned number is named "reward"."""
        self.reward_name = reward_name

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        return [rollout.episode.rewards.get(self.reward_name) for rollout in rollouts]


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
    reward_weights += [0.0] * len(logged)
    return {**functions, **logged}, torch.tensor(reward_weights, dtype=torch.float64)


def check_columns(
    functions: Mapping[str, RewardFunction], rows: Iterable[Row], *, has_environment: bool
) -> None:
    """Raise InputError, naming row, field and function, if a row lacks a column that a function requires.

    has_environment: whether the run has --environment.
    """
    given = {*STANDARD_ARGUMENTS, *EPISODE_ARGUMENTS} - (set() if has_environment else {"environments"})
    required = {name: {*parameters_of(function).required} - given for name, function in functions.items()}
    for row in rows:
        for name, columns in required.items():
            for missing in sorted(columns - row.columns.keys()):
                raise InputError(
                    f"{row.place}: no field {missing!r}, which the reward {name} asks for; only {sorted(row.columns)}, "
                    "prompts, completions, completion_ids and, with --environment, environments"
                )


def asked_of_episodes(functions: Iterable[RewardFunction]) -> set[str]:
    """Return those of EPISODE_ARGUMENTS that one of these functions names."""
    named = {name for function in functions for name in parameters_of(function).names}
    return named.intersection(EPISODE_ARGUMENTS)


def group_arguments(
    tokenizer: Tokenizer, row: Row, rollouts: Sequence[Rollout], texts: Sequence[str], asked: Collection[str]
) -> dict[str, list[Any]]:
    """Return all arguments for the rollouts of one prompt, by name; `episodes` only if they are `asked` for.

    row: the prompt's. texts: the completions.
    """
    seen = zip(rollouts, texts, strict=True) if "episodes" in asked else ()
    is_text = isinstance(row.prompt, str)
    return {
        "rollouts": list(rollouts),
        "environments": [rollout.episode.environment for rollout in rollouts],
        "episodes": [episode_facts(tokenizer, rollout, text) for rollout, text in seen],
        **{name: [value] * len(rollouts) for name, value in row.columns.items()},
        "prompts": [row.prompt] * len(rollouts),
        "completions": list(texts) if is_text else [answers_of(rollout, tokenizer) for rollout in rollouts],
        "completion_ids": [rollout.completion for rollout in rollouts],
    }


def arguments_of(function: RewardFunction, given: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Return those of the arguments that a function takes, by name: all but EPISODE_ARGUMENTS with `**kwargs`."""
    parameters = parameters_of(function)
    taken = set(parameters.names)
    if parameters.takes_all:
        taken |= given.keys() - set(EPISODE_ARGUMENTS)
    return {name: values for name, values in given.items() if name in taken}


def episode_facts(tokenizer: Tokenizer, rollout: Rollout, text: str) -> dict[str, Any]:
    """Return a rollout's entry of `episodes`, as JSON.

    row: prompt, columns and place. messages: the whole conversation. text, tokens: the completion and its ids.
    finish_reason. turns: text, num_tokens and finish_reason of each; empty if no episode made the rollout.
    rewards: by name, all that the episode gave, None for one that does not apply.
    """
    row = rollout.episode.row
    turns = []
    branches = {branch.rollout_id.branch: branch for branch in rollout.branches}
    for turn in rollout.episode.turns:
        sampled = branches[turn.branch].after_prompt[turn.start : turn.end]
        turns.append(
            {
                "text": tokenizer.decode(sampled["id"]),
                "num_tokens": turn.num_tokens,
                "finish_reason": turn.finish_reason,
            }
        )
    return {
        "row": {"prompt": row.prompt, "columns": dict(row.columns), "place": row.place},
        "messages": messages_of(rollout, tokenizer),
        "text": text,
        "tokens": rollout.completion,
        "finish_reason": rollout.finish_reason,
        "turns": turns,
        "rewards": dict(rollout.episode.rewards),
    }


def scored_here(
    name: str,
    function: RewardFunction,
    arguments: Mapping[str, list[Any]],
    place: str,
    texts: Sequence[str],
) -> list[float | None]:
    """Call a function in this process, for the completions of the row at `place`; see `checked_rewards`.

    It gets copies, and may change all but environments and rollouts. Raises RewardError, with the traceback, also for
    what the function raises.
    """
    own = {}
    for argument, values in arguments.items():
        is_shared = argument in ("environments", "rollouts")
        own[argument] = list(values) if is_shared else list(map(copy.deepcopy, values))
    answer: Answer
    try:
        answer = validate_rewards(call_reward(function, own), texts)
    except (InputError, RewardError):
        raise
    except (Exception, SystemExit) as error:
        answer = f"raised\n{users_traceback(error)}"
    return checked_rewards(name, place, answer)


def checked_rewards(name: str, place: str, answer: Answer) -> list[float | None]:
    """Return the rewards of a call, None where the function says that it does not apply.

    Raises RewardError naming function, row and value for an answer that is an error.
    """
    if isinstance(answer, str):
        raise RewardError(escaped(f"reward {name} for the row at {place}: {answer}"))
    return answer
