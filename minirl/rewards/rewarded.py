"""Rollouts with their rewards and texts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minirl.rollouts import Rollout


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
