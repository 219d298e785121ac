"""Select the groups for a step.

A group consists of all rollouts of one prompt. Every rank knows the rewards of all groups.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from minirl.rollouts import RewardedRollout, Rollout, RolloutId
from minirl.training.advantages import have_zero_variance, select_groups, weighted_rewards
from minirl.training.batch import RolloutInfo, SequenceInfo, gather_rollout_infos


@dataclass(frozen=True)
class Groups:
    """P groups of G rollouts to train on. All fields except `rewarded_rollouts` are the same on every rank.

    rewarded_rollouts: this rank's rollouts in these groups.
    rollout_infos: all P * G rollouts, group by group.
    rewards: fp64 [P, G, K]; NaN where a reward does not apply to the rollout.
    greedy_rewards: fp64 [P, 0 or 1, K], the rewards of the greedy rollouts, which are not trained on.
    reward_weights: fp64 [K].
    """

    rewarded_rollouts: list[RewardedRollout]
    rollout_infos: list[RolloutInfo]
    rewards: Tensor
    greedy_rewards: Tensor
    reward_weights: Tensor

    @property
    def rollouts(self) -> list[Rollout]:
        """This rank's rollouts, without their rewards."""
        return [rollout for rollout, _, _ in self.rewarded_rollouts]

    @property
    def weighted_rewards(self) -> Tensor:
        """Each rollout's weighted sum of rewards, fp64 [P, G]; NaN where no reward applies."""
        return weighted_rewards(self.rewards, self.reward_weights)

    @property
    def weighted_greedy_rewards(self) -> Tensor:
        """Each greedy rollout's weighted sum of rewards, fp64 [P, 0 or 1]; NaN where no reward applies."""
        return weighted_rewards(self.greedy_rewards, self.reward_weights)

    @property
    def num_loss_tokens(self) -> Tensor:
        """The number of sampled tokens per rollout, int64 [P, G]."""
        return torch.tensor([info.num_loss_tokens for info in self.rollout_infos]).view(
            self.rewards.shape[:2]
        )

    @property
    def is_truncated(self) -> Tensor:
        """Whether each rollout is truncated, bool [P, G]."""
        return torch.tensor([info.is_truncated for info in self.rollout_infos]).view(self.rewards.shape[:2])

    @property
    def sequences(self) -> list[SequenceInfo]:
        """The sequences of all rollouts, in rollout order; `rollout_index` is p * G + g."""
        return [
            sequence._replace(rollout_index=rollout_index)
            for rollout_index, info in enumerate(self.rollout_infos)
            for sequence in info.sequences
        ]


@dataclass(frozen=True)
class Selection:
    """The groups selected for a step. All fields except `groups.rewarded_rollouts` are the same on every rank.

    num_missing_groups: number of groups still to collect (zero-variance groups do not count); negative if there is a
    surplus. num_zero_variance_groups: number of groups whose first reward has zero variance; 0 if such groups are not
    replaced. finished_prompts: ordinals of the prompts whose groups were selected or dropped.
    """

    groups: Groups
    num_missing_groups: int
    num_zero_variance_groups: int
    finished_prompts: frozenset[int]


def select_step_groups(
    rewarded: Iterable[RewardedRollout],
    num_groups: int,
    group_size: int,
    num_greedy: int = 0,
    *,
    reward_weights: Tensor,
    replaces_zero_variance: bool = False,
) -> Selection:
    """Select the first `num_groups` of all ranks' groups, in prompt order (collective).

    rewarded: this rank's complete groups, each with `group_size` sampled rollouts, then `num_greedy` greedy rollouts.
    reward_weights: fp64 [K].
    replaces_zero_variance: whether to prefer groups whose first reward varies. Zero-variance groups then count as
    missing, and are dropped unless they are needed to fill the step.
    """
    rollout_infos = gather_rollout_infos(rewarded)
    # The infos are sorted by id, so the rollouts of one prompt are adjacent, and the greedy rollouts come last.
    rollouts_per_prompt = group_size + num_greedy
    prompt_ordinals = torch.tensor([info.id.prompt_ordinal for info in rollout_infos[::rollouts_per_prompt]])
    rewards = torch.tensor([info.rewards for info in rollout_infos], dtype=torch.float64)
    rewards = rewards.view(len(prompt_ordinals), rollouts_per_prompt, len(reward_weights))

    is_zero_variance = torch.zeros(len(prompt_ordinals), dtype=torch.bool)
    if replaces_zero_variance:
        is_zero_variance = have_zero_variance(rewards[:, :group_size, 0])
    selected_group_index = select_groups(is_zero_variance, num_groups)
    selected_prompt_ordinals = frozenset(prompt_ordinals[selected_group_index].tolist())
    finished_prompts = selected_prompt_ordinals.union(prompt_ordinals[is_zero_variance].tolist())

    def is_selected(rollout_id: RolloutId) -> bool:
        return rollout_id.prompt_ordinal in selected_prompt_ordinals and rollout_id.sample < group_size

    local_rollouts = [one for one in rewarded if is_selected(one.rollout.rollout_id)]
    groups = Groups(
        rewarded_rollouts=sorted(local_rollouts, key=lambda one: one.rollout.rollout_id),
        rollout_infos=[info for info in rollout_infos if is_selected(info.id)],
        rewards=rewards[selected_group_index][:, :group_size],
        greedy_rewards=rewards[selected_group_index][:, group_size:],
        reward_weights=reward_weights,
    )
    return Selection(
        groups=groups,
        num_missing_groups=num_groups - int((~is_zero_variance).sum()),
        num_zero_variance_groups=int(is_zero_variance.sum()),
        finished_prompts=finished_prompts,
    )
