"""Reward rollouts while others decode: one call of each function per prompt."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minirl.data.prompts import PromptStream
from minirl.data.task import RewardFunction
from minirl.ranks.time_account import spent_on
from minirl.rewards.functions import (
    arguments_of,
    asked_of_episodes,
    checked_rewards,
    group_arguments,
    scored_here,
)
from minirl.rewards.reward_model import RewardModel
from minirl.rewards.reward_workers import MAX_TOGETHER, RewardWorkers
from minirl.rollouts import Rollout

Rewards = list[float | None]


@dataclass(frozen=True)
class RewardedRollouts:
    """N rollouts of this rank, with their rewards of K functions. All fields have one entry per rollout."""

    rollouts: list[Rollout]  # with all branches of each
    # The completions without special tokens.
    texts: list[str]
    # fp64 [N, K]; NaN where a reward does not apply to the completion
    rewards: Tensor

    def __add__(self, other: "RewardedRollouts") -> "RewardedRollouts":
        return RewardedRollouts(
            rollouts=self.rollouts + other.rollouts,
            texts=self.texts + other.texts,
            rewards=torch.cat([self.rewards, other.rewards]),
        )

    def select(self, indices: Sequence[int]) -> "RewardedRollouts":
        """Return the rollouts at these indices, in this order."""
        return RewardedRollouts(
            rollouts=[self.rollouts[i] for i in indices],
            texts=[self.texts[i] for i in indices],
            rewards=self.rewards[indices],
        )


@dataclass(frozen=True)
class _Group:
    """The rollouts of a prompt, in order of their samples, with their texts.

    arguments: of all functions, by name. calls: by function, except those that `finish` calls.
    """

    rollouts: list[Rollout]
    texts: list[str]
    arguments: Mapping[str, list[Any]]
    calls: Mapping[str, Future[Rewards]]


class RewardQueue:
    """Rewards of rollouts, computed while others decode. Not collective.

    A call gets the completions of one prompt in order of their samples, and in a process the seed of the first. It
    runs in a process (`RewardWorkers`) or, for a function of the script or the task, in a thread: there an `async def`
    runs for all prompts together, any other function for one after the other. A reward model judges all prompts of a
    step together, in `finish`.

    groups: those that nobody has taken, by the prompt's ordinal.
    """

    def __init__(
        self,
        functions: Mapping[str, RewardFunction],
        prompts: PromptStream,
        *,
        call_timeout: float | None = None,
    ):
        """call_timeout: the most seconds of a call in a thread; None: no limit. Processes have their own."""
        self._functions = functions
        self._prompts = prompts
        self._call_timeout = call_timeout
        self._asked = asked_of_episodes(functions.values())
        # Of each function that runs here: the threads that wait for its calls, and those that run them.
        self._threads = {}
        for name, function in functions.items():
            if not isinstance(function, RewardWorkers | RewardModel):
                num_threads = MAX_TOGETHER if inspect.iscoroutinefunction(function) else 1
                self._threads[name] = ThreadPoolExecutor(num_threads), ThreadPoolExecutor(num_threads)
        self._under_way: set[Future[Rewards]] = set()
        self.groups: dict[int, _Group] = {}

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Add this rank's rollouts of one prompt, in any order, and begin their calls; never waits."""
        group = sorted(rollouts, key=lambda rollout: rollout.rollout_id.sample)
        ordinal = group[0].rollout_id.prompt_ordinal
        row, tokenizer = self._prompts.row(ordinal), self._prompts.tokenizer
        texts = [tokenizer.decode(rollout.completion) for rollout in group]
        given = group_arguments(tokenizer, row, group, texts, self._asked)
        seed = self._prompts.key(group[0].branches[0].rollout_id)
        calls = {}
        for name, function in self._functions.items():
            arguments = arguments_of(function, given)
            if isinstance(function, RewardWorkers):
                calls[name] = function.submit(arguments, row.place, texts, seed=seed)
            elif name in self._threads:
                call = functools.partial(scored_here, name, function, arguments, row.place, texts)
                calls[name] = self._threads[name][0].submit(self._limited, name, row.place, call)
        self._under_way.update(calls.values())
        self.groups[ordinal] = _Group(group, texts, given, calls)

    def _limited(self, name: str, place: str, call: Callable[[], Rewards]) -> Rewards:
        """Return the result of a call, or raise RewardError when it takes too long. Its thread cannot be ended."""
        try:
            return self._threads[name][1].submit(call).result(self._call_timeout)
        except TimeoutError:
            return checked_rewards(
                name, place, f"took more than {self._call_timeout:g} s; see --call-timeout"
            )

    @property
    def is_busy(self) -> bool:
        """Are calls under way or waiting for a process or a thread?"""
        return not all(call.done() for call in self._under_way)

    def ready(self) -> set[int]:
        """Return the prompts for whose rewards `finish` would not wait."""
        return {
            ordinal
            for ordinal, group in self.groups.items()
            if all(call.done() for call in group.calls.values())
        }

    @spent_on("wait_rewards")
    def poll(self, timeout_s: float = 0.0) -> None:
        """Raise the error of a call that failed, see `finish`. While calls are under way, wait for one's end."""
        ended, self._under_way = wait(self._under_way, timeout_s, FIRST_COMPLETED)
        for call in ended:
            call.result()

    @spent_on("wait_rewards")
    def finish(self, ordinals: Iterable[int]) -> RewardedRollouts:
        """Take out the N rollouts of these prompts, in order, with their rewards [N, K], for which it waits.

        Raises RewardError naming function and row.
        """
        groups = [self.groups.pop(ordinal) for ordinal in ordinals]
        calls = [call for group in groups for call in group.calls.values()]
        ended, _ = wait(calls, return_when=FIRST_EXCEPTION)
        for call in ended:
            call.result()
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        texts = [text for group in groups for text in group.texts]
        columns = []
        for name, function in self._functions.items():
            rewards: Rewards = []
            if not isinstance(function, RewardModel):
                rewards = [reward for group in groups for reward in group.calls[name].result()]
            elif rollouts:
                asked = {
                    argument: [value for group in groups for value in group.arguments[argument]]
                    for argument in ("prompts", "completions")
                }
                place = f"{rollouts[0].episode.row.place} and those that follow"
                rewards = scored_here(name, function, asked, place, texts)
            columns.append([math.nan if reward is None else reward for reward in rewards])
        return RewardedRollouts(
            rollouts=rollouts,
            texts=texts,
            # The view gives [K, 0] its shape on a rank without rollouts.
            rewards=torch.tensor(columns, dtype=torch.float64).view(len(columns), len(rollouts)).T,
        )
