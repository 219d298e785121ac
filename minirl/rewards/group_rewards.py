"""Rewards of functions that judge all rollouts of a prompt together, whichever ranks made them."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import torch

from minirl.data.prompts import PromptStream
from minirl.data.task import RewardFunction
from minirl.ranks.process_group import all_gather_rows, gather_objects, rank
from minirl.rewards.functions import judges_groups
from minirl.rewards.reward_queue import reward_rollouts
from minirl.rewards.rewarded import RewardedRollouts
from minirl.rollouts import Rollout, RolloutId


class GroupRewards:
    """The columns of such functions among the K rewards of rollouts; NaN until a group is judged.

    A group is judged when its last rollout ends. Ranks send its texts to the rank of its first rollout.

    done: the prompts whose groups have been judged, the same on every rank.
    """

    def __init__(self, functions: Mapping[str, RewardFunction], prompts: PromptStream, *, size: int):
        """functions: all K, of which those that judge single rollouts are ignored. size: rollouts of a prompt."""
        self.done: set[int] = set()
        self._prompts = prompts
        self._size = size
        self._functions = {name: function for name, function in functions.items() if judges_groups(function)}
        self._is_of_groups = torch.tensor([name in self._functions for name in functions], dtype=torch.bool)

    def make_room(self, rewarded: RewardedRollouts) -> RewardedRollouts:
        """The rollouts with K columns, given those of the functions that judge single ones. Not collective."""
        rewards = torch.full(
            [len(rewarded.rollouts), len(self._is_of_groups)], torch.nan, dtype=torch.float64
        )
        rewards[:, ~self._is_of_groups] = rewarded.rewards
        return dataclasses.replace(rewarded, rewards=rewards)

    def add(self, rewarded: RewardedRollouts) -> RewardedRollouts:
        """Judge the groups that are now complete (collective). Raises RewardError as `reward_rollouts`."""
        if not self._functions:
            return rewarded
        makers_of = _makers_of_prompts(rewarded.rollouts)
        new = {ordinal for ordinal, makers in makers_of.items() if len(makers) == self._size} - self.done
        self.done |= new
        judge_of = {ordinal: makers_of[ordinal][0] for ordinal in new}
        split = {ordinal for ordinal in new if len(set(makers_of[ordinal])) > 1}
        to_judge: list[Rollout] = []
        away: list[Rollout] = []
        for rollout in rewarded.rollouts:
            ordinal = rollout.rollout_id.prompt_ordinal
            if ordinal in new:
                (to_judge if judge_of[ordinal] == rank() else away).append(rollout)
        if split:
            for rollout in _from_other_ranks(away):
                if judge_of[rollout.rollout_id.prompt_ordinal] == rank():
                    to_judge.append(rollout)
        judged = self._judged(to_judge)
        if split:
            for part in gather_objects({i: one for i, one in judged.items() if i.prompt_ordinal in split}):
                judged |= part
        return self._filled(rewarded, judged)

    def add_here(self, rewarded: RewardedRollouts) -> RewardedRollouts:
        """Judge the groups of rollouts that are all on this rank. Not collective."""
        if not self._functions:
            return rewarded
        return self._filled(rewarded, self._judged(rewarded.rollouts))

    def forget(self, ordinals: Collection[int]) -> None:
        """Forget prompts that are no longer in use."""
        self.done -= set(ordinals)

    def _judged(self, rollouts: Sequence[Rollout]) -> dict[RolloutId, tuple[list[float], bool]]:
        """The rewards of whole groups by rollout, and whether a function failed."""
        judged = reward_rollouts(self._functions, self._prompts, rollouts)
        rewards = zip(judged.rewards.tolist(), judged.failed.tolist(), strict=True)
        ids = [rollout.rollout_id for rollout in judged.rollouts]
        return dict(zip(ids, rewards, strict=True))

    def _filled(
        self, rewarded: RewardedRollouts, judged: Mapping[RolloutId, tuple[list[float], bool]]
    ) -> RewardedRollouts:
        rewards, failed = rewarded.rewards.clone(), rewarded.failed.clone()
        for i, rollout in enumerate(rewarded.rollouts):
            if rollout.rollout_id in judged:
                values, has_failed = judged[rollout.rollout_id]
                rewards[i, self._is_of_groups] = torch.tensor(values, dtype=torch.float64)
                failed[i] |= has_failed
        return dataclasses.replace(rewarded, rewards=rewards, failed=failed)


def _makers_of_prompts(rollouts: Sequence[Rollout]) -> dict[int, list[int]]:
    """Return, by prompt, the ranks that made its rollouts, in order of the samples (collective)."""
    own = []
    for rollout in rollouts:
        own.append((rollout.rollout_id.prompt_ordinal, rollout.rollout_id.sample, rank()))
    rows = all_gather_rows(torch.tensor(own, dtype=torch.int64).view(-1, 3)).tolist()
    makers_of: dict[int, list[int]] = {}
    for ordinal, _, maker in sorted(rows):
        makers_of.setdefault(ordinal, []).append(maker)
    return makers_of


def _from_other_ranks(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Exchange all ranks' rollouts; returns those of the other ranks (collective)."""
    parts = gather_objects(list(rollouts))
    return [rollout for sender, part in enumerate(parts) if sender != rank() for rollout in part]
