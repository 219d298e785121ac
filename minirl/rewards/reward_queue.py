"""Reward rollouts while others decode: user functions run in worker processes, one call per prompt."""

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from minirl.data.prompts import PromptStream
from minirl.data.task import RewardFunction, Row
from minirl.ranks import watchdog
from minirl.rewards.functions import (
    OverlongPenalty,
    accepted_arguments,
    all_arguments,
    asked_of_episodes,
    compute_rewards,
    episode_arguments,
    judges_groups,
)
from minirl.rewards.reward_workers import (
    Call,
    FunctionCalls,
    RewardWorkers,
    complete,
    given_up_on_error,
    poll,
)
from minirl.rewards.rewarded import RewardedRollouts
from minirl.rollouts import Rollout, RolloutId


@dataclass(frozen=True)
class _Added:
    """A rollout that was added: its row and text, and its place among the completions of its group's calls."""

    row: Row
    text: str
    calls: Mapping[str, Call]  # by function, for those with workers
    index: int
    of_episodes: Mapping[str, list[Any]]  # its group's arguments by name, one element for each completion


class RewardQueue:
    """Rewards of rollouts, computed in worker processes while others decode. Not collective.

    A call depends on the prompts alone, never on the clock or the number of ranks: it gets the completions of one
    prompt in order of their samples, with the seed of the first. Functions without workers (the task's own, a reward
    model, the overlong penalty) run in this process, in `finish`.
    """

    def __init__(self, functions: Mapping[str, RewardFunction], prompts: PromptStream):
        self._functions = functions
        self._prompts = prompts
        self._calls: dict[str, FunctionCalls] = {}
        for name, function in functions.items():
            if isinstance(function, RewardWorkers):
                self._calls[name] = FunctionCalls(function, num_completions=0)
        self._asked = asked_of_episodes(functions.values())
        self._added: dict[RolloutId, _Added] = {}

    def begin_step(self, num_rollouts: int) -> None:
        """Reset the count of failures; the limit of forgiven ones is a share of these rollouts."""
        for calls in self._calls.values():
            calls.begin_step(num_rollouts)

    def expect(self, num_rollouts: int) -> None:
        """Record that this rank makes this many more rollouts in this step."""
        for calls in self._calls.values():
            calls.expect(num_rollouts)

    def given_up_on_error(self) -> AbstractContextManager[None]:
        """Drop all calls if the block raises; after that nothing can be added."""
        return given_up_on_error(list(self._calls.values()))

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Add this rank's rollouts of one prompt, in any order. Starts calls where a worker is free; never waits."""
        group = sorted(rollouts, key=lambda rollout: rollout.rollout_id.sample)
        # Raises ValueError if they are of several prompts.
        (ordinal,) = {rollout.rollout_id.prompt_ordinal for rollout in group}
        row = self._prompts.row(ordinal)
        rows = [row] * len(group)
        texts = [self._prompts.completion_text(rollout) for rollout in group]
        of_episodes = episode_arguments(self._prompts, group, texts, self._asked)
        arguments = {}
        if self._calls:
            completion_ids = [rollout.completion for rollout in group]
            arguments = all_arguments(rows, of_episodes["completions"], completion_ids)
        calls = {}
        for name, function_calls in self._calls.items():
            calls[name] = Call(
                accepted_arguments(self._functions[name], arguments, of_episodes),
                places=[row.place] * len(group),
                texts=texts,
                seeds=[self._prompts.key(rollout.branches[0].rollout_id) for rollout in group],
                is_group=judges_groups(self._functions[name]),
            )
            function_calls.add(calls[name])
        for i, rollout in enumerate(group):
            self._added[rollout.rollout_id] = _Added(row, texts[i], calls, i, of_episodes)

    @property
    def is_busy(self) -> bool:
        """Are calls under way or waiting for a free worker?"""
        return any(calls.is_busy for calls in self._calls.values())

    def is_ready(self, rollout_id: RolloutId) -> bool:
        """Return whether `finish` would not wait for the rewards of this rollout."""
        return all(call.is_complete for call in self._added[rollout_id].calls.values())

    def poll(self, timeout_s: float = 0.0) -> None:
        """Send, receive, start the next calls, kill calls that exceed their time.

        While calls are under way it waits for an event, up to `timeout_s` and never more than half a second. Raises
        RewardError naming function, row and completion for a failure that is not forgiven, and drops all calls.
        """
        poll(list(self._calls.values()), timeout_s)

    def finish(self, rollouts: Sequence[Rollout]) -> RewardedRollouts:
        """Take N rollouts out with their rewards [N, K], which it waits for, in the order of `rollouts`.

        Raises RewardError like `poll` and `compute_rewards`.
        """
        added = [self._added[rollout.rollout_id] for rollout in rollouts]
        rows = [one.row for one in added]
        texts = [one.text for one in added]
        answers: dict[str, list[float | None]] = {}
        with given_up_on_error(list(self._calls.values())):
            for name, function in self._functions.items():
                if name not in self._calls:
                    self.poll()
                    # A hang report names the user's function while it runs.
                    watchdog.heartbeat(f"reward {name}")
                    answers[name] = self._computed_here(function, rollouts)
                    watchdog.heartbeat("")
            complete(list(self._calls.values()), [call for one in added for call in one.calls.values()])
        for name in self._calls:
            answers[name] = [one.calls[name].rewards[one.index] for one in added]
        for rollout in rollouts:
            del self._added[rollout.rollout_id]

        columns = []
        failures = []
        for name in self._functions:
            is_failed = [answer is not None and math.isnan(answer) for answer in answers[name]]
            failures.append(is_failed)
            # A forgiven failure counts as 0; NaN stands for a reward that does not apply.
            column = [math.nan if answer is None else answer for answer in answers[name]]
            columns.append([0.0 if fails else value for fails, value in zip(is_failed, column, strict=True)])
        # The view gives [K, 0] its shape on a rank without rollouts.
        rewards = torch.tensor(columns, dtype=torch.float64).view(len(self._functions), len(added)).T
        failed = torch.tensor(failures, dtype=torch.bool).view(len(self._functions), len(added)).T
        return RewardedRollouts(
            rollouts=list(rollouts), rows=rows, texts=texts, rewards=rewards, failed=failed.any(dim=1)
        )

    def _computed_here(self, function: RewardFunction, rollouts: Sequence[Rollout]) -> list[float | None]:
        """Return the rewards of a function without workers: one call, or one per prompt if it judges groups."""
        if isinstance(function, OverlongPenalty):
            return [sum(function.of_branches(rollout)) for rollout in rollouts]
        indices = range(len(rollouts))
        parts = [list(indices)]
        if judges_groups(function):
            in_order = sorted(indices, key=lambda i: rollouts[i].rollout_id)
            by_prompt = itertools.groupby(in_order, key=lambda i: rollouts[i].rollout_id.prompt_ordinal)
            parts = [list(group) for _, group in by_prompt]
        rewards: list[float | None] = [None] * len(rollouts)
        for part in parts:
            added = [self._added[rollouts[i].rollout_id] for i in part]
            names = added[0].of_episodes if added else ()
            computed = compute_rewards(
                function,
                [one.row for one in added],
                completions=[one.text for one in added],
                completion_ids=[rollouts[i].completion for i in part],
                of_episodes={name: [one.of_episodes[name][one.index] for one in added] for name in names},
            )
            for i, reward in zip(part, computed, strict=True):
                rewards[i] = reward
        return rewards
