"""Rollouts with their rewards, texts and rows of the data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minirl.data.task import Row
from minirl.rollouts import Rollout


def turn_rewards(rollouts: Sequence[Rollout], weights: Mapping[str, float]) -> Tensor:
    """Return the weighted rewards given at turns, fp32 [T] over the tokens of all rollouts end to end.

    weights: by the reward's name. A turn's rewards are at its last token. Rewards that do not apply, or that were
    given to no turn, are left out.
    """
    streams = [torch.empty(0)]
    for rollout in rollouts:
        applies = {name for name, value in rollout.episode.rewards.items() if value is not None}
        of_branch = {branch.rollout_id.branch: torch.zeros(len(branch.tokens)) for branch in rollout.branches}
        starts = {branch.rollout_id.branch: branch.num_prompt_tokens for branch in rollout.branches}
        for turn in rollout.episode.turns:
            given = sum(
                weights[name] * turn.rewards[name]
                for name in weights
                if name in applies & turn.rewards.keys()
            )
            of_branch[turn.branch][starts[turn.branch] + turn.end - 1] = given
        streams += of_branch.values()
    return torch.cat(streams)


@dataclass(frozen=True)
class RewardedRollouts:
    """N rollouts of this rank, with their rewards of K functions. All fields have one entry per rollout."""

    rollouts: list[Rollout]  # with all branches of each
    # The row of the data for each prompt.
    rows: list[Row]
    # The completions without special tokens.
    texts: list[str]
    # fp64 [N, K]; NaN where a reward does not apply to the completion
    rewards: Tensor

    def __add__(self, other: "RewardedRollouts") -> "RewardedRollouts":
        return RewardedRollouts(
            rollouts=self.rollouts + other.rollouts,
            rows=self.rows + other.rows,
            texts=self.texts + other.texts,
            rewards=torch.cat([self.rewards, other.rewards]),
        )

    def select(self, indices: Sequence[int]) -> "RewardedRollouts":
        """Return the rollouts at these indices, in this order."""
        indices = list(indices)
        return RewardedRollouts(
            rollouts=[self.rollouts[i] for i in indices],
            rows=[self.rows[i] for i in indices],
            texts=[self.texts[i] for i in indices],
            rewards=self.rewards[indices],
        )
