"""Reward functions: what they get and return, and the kinds of rewards that call them.

A new reward is a function. The interface is TRL's: a reward function is called with keyword arguments, `prompts`,
`completions`, `completion_ids` and every other column of the data, each a list with one entry per completion. It gets
the arguments that it names, or all of them if it takes `**kwargs`, and returns one number per completion, of at most
1e12, or None where it does not apply. It may be an `async def`. Text prompts come with text completions, chat prompts
with the messages after the prompt, as `[{"role": "assistant", "content": text}]`.

A function that names them gets further lists, one entry per completion: `episodes`, dicts with the conversation, turns
and more (`PromptGroup.episodes`). One that runs in this process also gets `environments`, the objects of
--environment, and `rollouts`, each a `Rollout`. It may change what else it gets, which is a copy.

Its `Reward` says when and where it is called:

    WorkerReward     once per prompt, in a process        --reward (`reward_workers`)
    FunctionReward   once per prompt, in a thread         the task's functions, those that a script gives `Setup` or
                                                          `Collector`, and those of --reward that name `environments`
                                                          or `rollouts`
    EpisodeReward    as a FunctionReward                  --reward episode, which reads the rewards that episodes gave
    StepReward       once per step, on the main thread    --reward-model (`reward_model`)

A new kind is a subclass of `Reward`.
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
from minirl.errors import InputError, RewardError, escaped
from minirl.rewards.calls import (
    CallResult,
    Rewards,
    Signature,
    call_function,
    signature_of,
    validate_rewards,
)
from minirl.rollouts import Rollout, SampledSequence

EPISODE = "episode"  # in --reward, instead of a file or module: rewards that rollouts give
# Arguments whose entries are objects of this process: they are neither sent to workers nor copied.
OBJECT_ARGUMENTS = ("environments", "rollouts")
MAX_CONCURRENT_CALLS = 256  # calls of an `async def` at a time, in this process or a worker


@dataclass(frozen=True)
class PromptGroup:
    """The rollouts of one prompt, in order of their samples, and what reward functions get of them.

    Its attributes named in STANDARD_ARGUMENTS and EPISODE_ARGUMENTS are arguments, with one entry per rollout.
    texts: the completions without special tokens. seed: of the random generators for a `def` in a worker.
    """

    row: Row
    rollouts: Sequence[Rollout]
    texts: Sequence[str]
    tokenizer: ChatTokenizer
    seed: int = 0

    @property
    def prompts(self) -> list[str | Messages]:
        """The row's prompt."""
        return [self.row.prompt] * len(self.rollouts)

    @cached_property
    def completions(self) -> Sequence[str | Messages]:
        """Texts, or for a chat the messages after the prompt."""
        if isinstance(self.row.prompt, str):
            return self.texts
        return [completion_messages(rollout, self.tokenizer) for rollout in self.rollouts]

    @property
    def completion_ids(self) -> list[list[int]]:
        """The token ids after the prompt."""
        return [rollout.completion for rollout in self.rollouts]

    @property
    def environments(self) -> list[Any]:
        """The objects of --environment."""
        return [rollout.episode.environment for rollout in self.rollouts]

    @cached_property
    def episodes(self) -> list[dict[str, Any]]:
        """Facts as JSON values.

        row: prompt, columns and origin. messages: the whole conversation. text, tokens: the completion and its ids.
        finish_reason. turns: text, num_tokens and finish_reason of each; empty if no episode made the rollout.
        rewards: by name, all that the episode gave, None for one that does not apply.
        """
        row = {"prompt": self.row.prompt, "columns": dict(self.row.columns), "origin": self.row.origin}
        return [
            {
                "row": row,
                "messages": rollout_messages(rollout, self.tokenizer),
                "text": text,
                "tokens": rollout.completion,
                "finish_reason": rollout.finish_reason,
                "turns": self._turns_of(rollout),
                "rewards": dict(rollout.episode.rewards),
            }
            for rollout, text in zip(self.rollouts, self.texts, strict=True)
        ]

    def _turns_of(self, rollout: Rollout) -> list[dict[str, Any]]:
        branches = {branch.rollout_id.branch: branch for branch in rollout.branches}
        turns = []
        for turn in rollout.episode.turns:
            ids = branches[turn.branch].after_prompt["id"][turn.start : turn.end]
            text = self.tokenizer.decode(ids)
            turns.append({"text": text, "num_tokens": turn.num_tokens, "finish_reason": turn.finish_reason})
        return turns

    def select_arguments(self, signature: Signature) -> dict[str, Sequence[Any]]:
        """Return the arguments that a function takes, by name."""
        names = (*STANDARD_ARGUMENTS, *EPISODE_ARGUMENTS)
        columns = self.row.columns.items()
        return {
            **{name: getattr(self, name) for name in names if signature.takes(name)},
            **{name: [value] * len(self.rollouts) for name, value in columns if signature.takes(name)},
        }

    def rewards_or_raise(self, name: str, answer: CallResult, *, where: str = "") -> Rewards:
        """Return the rewards of an answer; raise an error as RewardError, naming the reward and its row.

        where: further rows that the call was for.
        """
        if isinstance(answer, str):
            raise RewardError(escaped(f"reward {name} for the row at {self.row.origin}{where}: {answer}"))
        return answer


class Reward(ABC):
    """A reward of the run: decides when and where its function is called.

    signature: the function's. episode_reward: the name of the episode's own reward that it reads, if it does.
    """

    signature: Signature
    episode_reward: str | None = None

    @abstractmethod
    def submit(self, name: str, group: PromptGroup) -> Future[Any]:
        """Begin to reward a group, and return at once. The future gets the rewards, or what `finish` needs.

        name: the reward's, for the RewardError of a call that fails.
        """

    def finish(self, results: Sequence[Any]) -> Rewards:
        """Return the rewards of several groups, end to end. results: the results of their futures."""
        return list(chain(*results))


class FunctionReward(Reward):
    """A function called in threads of this process: an `async def` for all prompts together, others one by one."""

    def __init__(self, function: RewardFunction, call_timeout: float | None = None):
        """call_timeout: the limit (s) of one call, whose thread cannot be ended; None: no limit."""
        self.signature = signature_of(function)
        self._function = function
        self._call_timeout = call_timeout
        num_threads = MAX_CONCURRENT_CALLS if self.signature.is_async else 1
        self._callers = ThreadPoolExecutor(num_threads)
        self._waiters = ThreadPoolExecutor(num_threads)

    def submit(self, name: str, group: PromptGroup) -> Future[Any]:
        """Begin to reward a group, in its turn."""
        return self._waiters.submit(self._call, name, group, group.select_arguments(self.signature))

    def _call(self, name: str, group: PromptGroup, arguments: Mapping[str, Sequence[Any]]) -> Rewards:
        """Call the function, with arguments that it may change, and return the rewards. Raises RewardError."""
        copies = {
            argument: list(values) if argument in OBJECT_ARGUMENTS else list(map(copy.deepcopy, values))
            for argument, values in arguments.items()
        }
        call = self._callers.submit(call_function, self._function, copies, group.texts)
        answer: CallResult
        try:
            answer = call.result(self._call_timeout)
        except TimeoutError:
            answer = f"took more than {self._call_timeout:g} s; see --call-timeout"
        return group.rewards_or_raise(name, answer)


class StepReward(Reward):
    """A function called once per step, on the main thread, for all groups. It must not change its arguments."""

    def __init__(self, function: RewardFunction):
        self.signature = signature_of(function)
        self.function = function

    def submit(self, name: str, group: PromptGroup) -> Future[Any]:
        """Return a finished future: the group waits for `finish`."""
        future: Future[Any] = Future()
        future.set_result((name, group))
        return future

    def finish(self, results: Sequence[tuple[str, PromptGroup]]) -> Rewards:
        """Call the function, whose exceptions pass through. Raises RewardError for wrong values."""
        if not results:
            return []
        name, first = results[0]
        calls = [group.select_arguments(self.signature) for _, group in results]
        arguments = {argument: list(chain(*(call[argument] for call in calls))) for argument in calls[0]}
        texts = list(chain(*(group.texts for _, group in results)))
        answer = validate_rewards(self.function(**arguments), texts)
        return first.rewards_or_raise(name, answer, where=" and those that follow")


class EpisodeReward(FunctionReward):
    """One of an episode's own rewards, None where it does not apply."""

    def __init__(self, episode_reward: str = "reward"):
        """episode_reward: the name in `episode.reward(value, name)`; a returned number is named "reward"."""

        def given(rollouts: Sequence[Rollout]) -> list[float | None]:
            return [rollout.episode.rewards.get(episode_reward) for rollout in rollouts]

        super().__init__(given)
        self.episode_reward = episode_reward


# A bare function is called as a `FunctionReward`.
RewardLike = Reward | RewardFunction


def overlong_penalty(*, limit: int, buffer: float) -> RewardFunction:
    """A reward function that penalises long completions.

    The reward is 0 up to `limit - buffer` tokens, then falls linearly to -1 at `limit` tokens and stays
    there. DAPO's soft overlong punishment, arXiv:2503.14476 eq. 13. `limit` is that of a branch: the reward is the sum
    of a rollout's branches.
    """

    def penalty(branch: SampledSequence) -> float:
        return min(0.0, max(-1.0, (limit - buffer - len(branch.after_prompt)) / buffer))

    def overlong(rollouts: Sequence[Rollout]) -> list[float]:
        return [sum(map(penalty, rollout.branches)) for rollout in rollouts]

    return overlong


def rewards_and_weights(
    rewards: Mapping[str, RewardLike], weights: Sequence[float], *, logged: Mapping[str, RewardLike]
) -> tuple[dict[str, RewardLike], Tensor]:
    """Return all K rewards, those to train on before those only `logged`, and their weights fp64 [K].

    Without `weights` each reward to train on weighs 1; those that are only logged weigh 0. Raises InputError if there
    are not as many weights as rewards to train on.
    """
    reward_weights = list(weights) or [1.0] * len(rewards)
    if len(reward_weights) != len(rewards):
        given = " ".join(map(str, weights))
        raise InputError(f"--reward-weights {given}: the rewards are {', '.join(rewards)}")
    reward_weights += [0.0] * len(logged)
    return {**rewards, **logged}, torch.tensor(reward_weights, dtype=torch.float64)


def check_columns(rewards: Mapping[str, Reward], rows: Iterable[Row], *, has_environment: bool) -> None:
    """Raise InputError, naming row, field and function, if a row lacks a column that a function requires.

    has_environment: whether the run has --environment.
    """
    given = {*STANDARD_ARGUMENTS, *EPISODE_ARGUMENTS} - (set() if has_environment else {"environments"})
    for row in rows:
        for name, reward in rewards.items():
            missing = {*reward.signature.required} - given - row.columns.keys()
            if missing:
                raise InputError(
                    f"{row.origin}: no field {min(missing)!r}, which the reward {name} asks for; only "
                    f"{', '.join(sorted(given | row.columns.keys()))}"
                )
