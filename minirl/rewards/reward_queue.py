"""Reward rollouts while others decode: user functions run in worker processes, one call per prompt."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minirl.data.prompts import PromptStream
from minirl.data.task import RewardFunction, Row
from minirl.rewards.functions import (
    OverlongPenalty,
    asked_of_episodes,
    call_arguments,
    compute_rewards,
    episode_arguments,
    judges_groups,
)
from minirl.rewards.reward_workers import Call, FunctionCalls, RewardWorkers, complete, poll
from minirl.rewards.rewarded import RewardedRollouts
from minirl.rollouts import Rollout


@dataclass(frozen=True)
class _Group:
    """The rollouts of a prompt, in order of their samples, with their rows and texts.

    of_episodes: arguments by name, one element for each rollout. calls: by function, for those with workers.
    """

    rollouts: list[Rollout]
    rows: list[Row]
    texts: list[str]
    of_episodes: Mapping[str, list[Any]]
    calls: Mapping[str, Call]


class RewardQueue:
    """Rewards of rollouts, computed in worker processes while others decode. Not collective.

    A call depends on the prompts alone, never on the clock or the number of ranks: it gets the completions of one
    prompt in order of their samples, with the seed of the first. Functions without workers (the task's own, a reward
    model, the overlong penalty) run in this process, in `finish`.

    groups: those that nobody has taken, by the prompt's ordinal.
    """

    def __init__(self, functions: Mapping[str, RewardFunction], prompts: PromptStream):
        self._functions = functions
        self._prompts = prompts
        self._calls = {
            name: FunctionCalls(function)
            for name, function in functions.items()
            if isinstance(function, RewardWorkers)
        }
        self._asked = asked_of_episodes(functions.values())
        self.groups: dict[int, _Group] = {}

    def begin_step(self, num_rollouts: int) -> None:
        """Reset the count of failures: the limit of forgiven ones is a share of `groups` and of these rollouts."""
        num_rollouts += sum(len(group.rollouts) for group in self.groups.values())
        for calls in self._calls.values():
            calls.begin_step(num_rollouts)

    def expect(self, num_rollouts: int) -> None:
        """Record that this rank makes this many more rollouts in this step."""
        for calls in self._calls.values():
            calls.failures.num_total += num_rollouts

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Add this rank's rollouts of one prompt, in any order. Starts calls where a worker is free; never waits."""
        group = sorted(rollouts, key=lambda rollout: rollout.rollout_id.sample)
        # Raises ValueError if they are of several prompts.
        (ordinal,) = {rollout.rollout_id.prompt_ordinal for rollout in group}
        rows = [self._prompts.row(ordinal)] * len(group)
        texts = [self._prompts.completion_text(rollout) for rollout in group]
        of_episodes = episode_arguments(self._prompts, group, texts, self._asked)
        calls = {}
        for name, function_calls in self._calls.items():
            completion_ids = [rollout.completion for rollout in group]
            calls[name] = Call(
                call_arguments(self._functions[name], rows, completion_ids, of_episodes),
                places=[row.place for row in rows],
                texts=texts,
                seeds=[self._prompts.key(rollout.branches[0].rollout_id) for rollout in group],
                is_group=judges_groups(self._functions[name]),
            )
            function_calls.add(calls[name])
        self.groups[ordinal] = _Group(group, rows, texts, of_episodes, calls)

    @property
    def is_busy(self) -> bool:
        """Are calls under way or waiting for a free worker?"""
        return any(calls.is_busy for calls in self._calls.values())

    def ready(self) -> set[int]:
        """Return the prompts for whose rewards `finish` would not wait."""
        return {
            ordinal
            for ordinal, group in self.groups.items()
            if all(call.is_complete for call in group.calls.values())
        }

    def poll(self, timeout_s: float = 0.0) -> None:
        """Send, receive, start the next calls, kill calls that exceed their time.

        While calls are under way it waits for an event, up to `timeout_s` and never more than half a second. Raises
        RewardError naming function, row and completion for a failure that is not forgiven.
        """
        poll(self._calls.values(), timeout_s)

    def finish(self, ordinals: Iterable[int]) -> RewardedRollouts:
        """Take out the N rollouts of these prompts, in order, with their rewards [N, K], for which it waits.

        Raises RewardError like `poll` and `compute_rewards`.
        """
        groups = [self.groups.pop(ordinal) for ordinal in ordinals]
        answers: dict[str, list[float | None]] = {}
        for name, function in self._functions.items():
            if name not in self._calls:
                self.poll()
                answers[name] = _computed_here(function, groups)
        complete(self._calls.values(), [call for group in groups for call in group.calls.values()])
        for name in self._calls:
            answers[name] = [answer for group in groups for answer in group.calls[name].rewards]
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        columns = [
            [math.inf if answer is None else answer for answer in answers[name]] for name in self._functions
        ]
        # The view gives [K, 0] its shape on a rank without rollouts.
        found = torch.tensor(columns, dtype=torch.float64).view(len(columns), len(rollouts)).T
        return RewardedRollouts(
            rollouts=rollouts,
            rows=[row for group in groups for row in group.rows],
            texts=[text for group in groups for text in group.texts],
            # A forgiven failure counts as 0; NaN stands for a reward that does not apply.
            rewards=found.nan_to_num(nan=0.0, posinf=math.nan),
            failed=found.isnan().any(dim=1),
        )


def _computed_here(function: RewardFunction, groups: Sequence[_Group]) -> list[float | None]:
    """Return the rewards of a function without workers: one call, or one per prompt if it judges groups."""
    rewards: list[float | None] = []
    for part in [[group] for group in groups] if judges_groups(function) else [groups]:
        rollouts = [rollout for group in part for rollout in group.rollouts]
        if isinstance(function, OverlongPenalty):
            rewards += map(function.of_rollout, rollouts)
            continue
        names = part[0].of_episodes if part else ()
        rewards += compute_rewards(
            function,
            [row for group in part for row in group.rows],
            completions=[text for group in part for text in group.texts],
            completion_ids=[rollout.completion for rollout in rollouts],
            of_episodes={
                name: list(itertools.chain.from_iterable(group.of_episodes[name] for group in part))
                for name in names
            },
        )
    return rewards
