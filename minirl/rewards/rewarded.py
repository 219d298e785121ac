"""Rollouts with their examples, texts and rewards."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minirl.data.task import Row
from minirl.rollouts import Rollout


@dataclass(frozen=True)
class RewardedRollouts:
    """Rollouts of this rank with their rows, texts and rewards fp64 [N, K], aligned.

    failed bool [N]: a function failed there, and its reward is 0 (`--on-reward-error zero`).
    """

    rollouts: list[Rollout]
    rows: list[Row]
    texts: list[str]
    rewards: Tensor
    failed: Tensor

    def __add__(self, other: "RewardedRollouts") -> "RewardedRollouts":
        rewards, failed = torch.cat([self.rewards, other.rewards]), torch.cat([self.failed, other.failed])
        return RewardedRollouts(
            self.rollouts + other.rollouts, self.rows + other.rows, self.texts + other.texts, rewards, failed
        )

    def select(self, places: Sequence[int]) -> "RewardedRollouts":
        """Those at these places."""
        rollouts, rows = [self.rollouts[i] for i in places], [self.rows[i] for i in places]
        texts, where = [self.texts[i] for i in places], list(places)
        return RewardedRollouts(rollouts, rows, texts, self.rewards[where], self.failed[where])
