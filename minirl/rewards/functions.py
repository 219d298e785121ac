"""Reward functions: their arguments, their return values, and where they run.

A reward is a function with TRL's interface, and may be an `async def`. The function is called with keyword arguments:
`prompts`, `completions`, `completion_ids` and the remaining dataset columns, each a list with one entry per completion.
A function gets only the arguments that it declares, or all arguments if it takes `**kwargs`. The function returns one
number of magnitude at most 1e12 per completion, or None where the reward does not apply. For text prompts, completions
are text. For chat prompts, completions are the messages after the prompt:
`[{"role": "assistant", "content": text}]`, for example.

A function may declare additional parameters, which are also passed as lists with one entry per completion. `episodes`
are dicts with the conversation, turns and more (`PromptGroup.episodes`). Functions that run in this process can also
declare `environments`, the --environment objects, and `rollouts`, the `Rollout` objects. All other arguments are
copies, which the function may modify.

A function's `Reward` determines when and where the function is called:

    WorkerReward     once per prompt, in a process        --reward (`reward_workers`)
    FunctionReward   once per prompt, in a thread         the task's functions, functions that a script passes to
                                                          `Setup` or `Collector`, and --reward functions that declare
                                                          `environments` or `rollouts`
    EpisodeReward    like FunctionReward                  --reward episode, which reads rewards that episodes recorded
    StepReward       once per step, on the main thread    --reward-model (`reward_model`)

To add another kind of reward, subclass `Reward`.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from minirl.data.chat_tokenizer import ChatTokenizer
from minirl.data.conversation import completion_messages, rollout_messages
from minirl.data.messages import Messages
from minirl.data.task import EPISODE_ARGUMENTS, STANDARD_ARGUMENTS, RewardFunction, Row
from minirl.errors import InputError, RewardError, escape_control_chars
from minirl.rewards.calls import (
    CallResult,
    Rewards,
    Signature,
    call_function,
    signature_of,
    validate_rewards,
)
from minirl.rollouts import Rollout, SampledSequence

EPISODE = "episode"  # value of --reward for rewards that episodes record
# Arguments whose entries are live objects of this process, which are neither sent to workers nor copied.
OBJECT_ARGUMENTS = ("environments", "rollouts")
MAX_CONCURRENT_CALLS = 256  # maximum concurrent calls to an `async def`, here or in a worker


@dataclass(frozen=True)
class PromptGroup:
    """The rollouts of one prompt, in sample order, and the arguments that reward functions get for these rollouts.

    The attributes named in STANDARD_ARGUMENTS and EPISODE_ARGUMENTS are passed as arguments, with one entry per
    rollout.
    texts: the completions without special tokens. seed: seed that a worker sets in its global random
    generators before it calls a plain `def`.
    """

    row: Row
    rollouts: Sequence[Rollout]
    texts: Sequence[str]
    tokenizer: ChatTokenizer
    seed: int = 0

    @property
    def prompts(self) -> list[str | Messages]:
        """The row's prompt, once per rollout."""
        return [self.row.prompt] * len(self.rollouts)

    @cached_property
    def completions(self) -> Sequence[str | Messages]:
        """The completions as text or, for chat prompts, as the messages after the prompt."""
        if isinstance(self.row.prompt, str):
            return self.texts
        return [completion_messages(rollout, self.tokenizer) for rollout in self.rollouts]

    @property
    def completion_ids(self) -> list[list[int]]:
        """The token ids after the prompt."""
        return [rollout.completion for rollout in self.rollouts]

    @property
    def environments(self) -> list[Any]:
        """The environment object of each rollout (--environment)."""
        return [rollout.episode.environment for rollout in self.rollouts]

    @cached_property
    def episodes(self) -> list[dict[str, Any]]:
        """One JSON-serializable dict per rollout.

        row: the row's prompt, columns and origin. messages: the whole conversation. text, tokens: the completion as
        text and as token ids.
        finish_reason: the rollout's finish reason. turns: text, num_tokens and finish_reason per turn; empty for a
        rollout without an episode. rewards: all rewards recorded for the episode; None where a reward does not apply.
        """
        row = {"prompt": self.row.prompt, "columns": dict(self.row.columns), "origin": self.row.origin}
        return [
            {
                "row": row,
                "messages": rollout_messages(rollout, self.tokenizer),
                "text": text,
                "tokens": rollout.completion,
                "finish_reason": rollout.finish_reason,
                "turns": self._turn_dicts(rollout),
                "rewards": dict(rollout.episode.rewards),
            }
            for rollout, text in zip(self.rollouts, self.texts, strict=True)
        ]

    def _turn_dicts(self, rollout: Rollout) -> list[dict[str, Any]]:
        branches = {branch.rollout_id.branch: branch for branch in rollout.branches}
        turns = []
        for turn in rollout.episode.turns:
            ids = branches[turn.branch].tokens_after_prompt["id"][turn.start : turn.end]
            text = self.tokenizer.decode(ids)
            turns.append({"text": text, "num_tokens": turn.num_tokens, "finish_reason": turn.finish_reason})
        return turns

    def select_arguments(self, signature: Signature) -> dict[str, Sequence[Any]]:
        """Return the arguments that a function with this signature takes, keyed by name."""
        names = (*STANDARD_ARGUMENTS, *EPISODE_ARGUMENTS)
        columns = self.row.columns.items()
        return {
            **{name: getattr(self, name) for name in names if signature.takes(name)},
            **{name: [value] * len(self.rollouts) for name, value in columns if signature.takes(name)},
        }

    def rewards_or_raise(self, name: str, answer: CallResult, *, where: str = "") -> Rewards:
        """Return the rewards from a call. Raises RewardError, naming the reward and row, if the call failed.

        where: text appended to the row's origin to describe the call's other rows.
        """
        if isinstance(answer, str):
            raise RewardError(
                escape_control_chars(f"reward {name} for the row at {self.row.origin}{where}: {answer}")
            )
        return answer


class Reward(ABC):
    """One of the run's rewards. The subclass determines when and where the reward function is called.

    signature: the function's signature. episode_reward_name: name of the reward that the function reads from episodes,
    if any.
    """

    signature: Signature
    episode_reward_name: str | None = None

    @abstractmethod
    def submit(self, name: str, group: PromptGroup) -> Future[Any]:
        """Submit the call for a group without blocking; return a future for its rewards, or for the input to `finish`.

        name: the reward's name, reported in the RewardError if the call fails.
        """

    def finish(self, results: Sequence[Any]) -> Rewards:
        """Return the concatenated rewards of several groups. results: the results of the groups' futures."""
        return list(chain(*results))


class FunctionReward(Reward):
    """A function called in threads of this process; calls to an `async` function run concurrently."""

    def __init__(self, function: RewardFunction, call_timeout: float | None = None):
        """call_timeout: time limit (s) for one call, or None for no limit; the thread of a call cannot be killed."""
        self.signature = signature_of(function)
        self._function = function
        self._call_timeout = call_timeout
        num_threads = MAX_CONCURRENT_CALLS if self.signature.is_async else 1
        self._call_threads = ThreadPoolExecutor(num_threads)
        self._wait_threads = ThreadPoolExecutor(num_threads)

    def submit(self, name: str, group: PromptGroup) -> Future[Any]:
        """Queue the call for a group."""
        return self._wait_threads.submit(self._call, name, group, group.select_arguments(self.signature))

    def _call(self, name: str, group: PromptGroup, arguments: Mapping[str, Sequence[Any]]) -> Rewards:
        """Call the function with copies of its arguments, and return the rewards. Raises RewardError."""
        copied_arguments = {
            argument: list(values) if argument in OBJECT_ARGUMENTS else list(map(copy.deepcopy, values))
            for argument, values in arguments.items()
        }
        future = self._call_threads.submit(call_function, self._function, copied_arguments, group.texts)
        call_result: CallResult
        try:
            call_result = future.result(self._call_timeout)
        except TimeoutError:
            call_result = f"took more than {self._call_timeout:g} s; see --call-timeout"
        return group.rewards_or_raise(name, call_result)


class StepReward(Reward):
    """A function called on the main thread once per step, for all groups. It must not modify its arguments."""

    def __init__(self, function: RewardFunction):
        self.signature = signature_of(function)
        self.function = function

    def submit(self, name: str, group: PromptGroup) -> Future[Any]:
        """Return a finished future; `finish` makes the call."""
        future: Future[Any] = Future()
        future.set_result((name, group))
        return future

    def finish(self, results: Sequence[tuple[str, PromptGroup]]) -> Rewards:
        """Call the function, and propagate its exceptions. Raises RewardError for invalid return values."""
        if not results:
            return []
        name, first = results[0]
        group_arguments = [group.select_arguments(self.signature) for _, group in results]
        arguments = {
            argument: list(chain(*(call[argument] for call in group_arguments)))
            for argument in group_arguments[0]
        }
        texts = list(chain(*(group.texts for _, group in results)))
        returned_rewards = validate_rewards(self.function(**arguments), texts)
        return first.rewards_or_raise(name, returned_rewards, where=" and the following rows")


class EpisodeReward(FunctionReward):
    """A reward that episodes record themselves; None where the reward does not apply."""

    def __init__(self, episode_reward_name: str = "reward"):
        """episode_reward_name: the name in `episode.reward(value, name)`; a returned number is named "reward"."""

        def read_episode_rewards(rollouts: Sequence[Rollout]) -> list[float | None]:
            return [rollout.episode.rewards.get(episode_reward_name) for rollout in rollouts]

        super().__init__(read_episode_rewards)
        self.episode_reward_name = episode_reward_name


# A bare function becomes a `FunctionReward`.
RewardLike = Reward | RewardFunction


def overlong_penalty(*, limit: int, buffer: float) -> RewardFunction:
    """Return DAPO's soft overlong punishment (arXiv:2503.14476 eq. 13) as a reward function.

    The penalty for a branch is 0 up to `limit - buffer` tokens, falls linearly to -1 at `limit` tokens and stays there.
    The reward is the sum over the rollout's branches.
    """

    def penalty(branch: SampledSequence) -> float:
        return min(0.0, max(-1.0, (limit - buffer - len(branch.tokens_after_prompt)) / buffer))

    def score_overlong(rollouts: Sequence[Rollout]) -> list[float]:
        return [sum(map(penalty, rollout.branches)) for rollout in rollouts]

    return score_overlong


def rewards_and_weights(
    rewards: Mapping[str, RewardLike], weights: Sequence[float], *, logged: Mapping[str, RewardLike]
) -> tuple[dict[str, RewardLike], Tensor]:
    """Return all K rewards (trained rewards first, then `logged` rewards) and the K weights as an fp64 tensor.

    Without `weights`, each trained reward has weight 1. Rewards that are only logged have weight 0. Raises InputError
    if the number of weights is not the number of trained rewards.
    """
    reward_weights = list(weights) or [1.0] * len(rewards)
    if len(reward_weights) != len(rewards):
        weights_text = " ".join(map(str, weights))
        raise InputError(
            f"--reward-weights {weights_text}: give one weight for each reward: {', '.join(rewards)}"
        )
    reward_weights += [0.0] * len(logged)
    return {**rewards, **logged}, torch.tensor(reward_weights, dtype=torch.float64)


def check_columns(rewards: Mapping[str, Reward], rows: Iterable[Row], *, has_environment: bool) -> None:
    """Raise InputError, naming the row, field and reward, if a row lacks a column that a reward function requires.

    has_environment: whether the run uses --environment.
    """
    available_arguments = {*STANDARD_ARGUMENTS, *EPISODE_ARGUMENTS} - (
        set() if has_environment else {"environments"}
    )
    for row in rows:
        for name, reward in rewards.items():
            missing_columns = {*reward.signature.required} - available_arguments - row.columns.keys()
            if missing_columns:
                raise InputError(
                    f"{row.origin}: no field {min(missing_columns)!r}, which the reward {name} requires; available: "
                    f"{', '.join(sorted(available_arguments | row.columns.keys()))}"
                )
