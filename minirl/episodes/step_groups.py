"""Select the groups of a step. A group is all rollouts of one prompt; every rank knows the rewards of all."""

from dataclasses import dataclass

import torch
from torch import Tensor

from minirl.rewards.reward_queue import RewardedRollouts
from minirl.training.advantages import have_zero_variance, select_groups, weighted_rewards
from minirl.training.batch import RolloutInfo, SequenceInfo, gather_infos


@dataclass(frozen=True)
class Groups:
    """P groups of G rollouts to train on. All but `rewarded` is the same on every rank."""

    # This rank's rollouts of these groups.
    rewarded: RewardedRollouts
    # All P * G rollouts, one group after the other.
    infos: list[RolloutInfo]
    # fp64 [P, G, K]; NaN where a reward does not apply to the rollout
    rewards: Tensor
    # fp64 [P, 0 or 1, K]: the rewards of the greedy rollouts, which are not trained on.
    greedy_rewards: Tensor
    # fp64 [K]
    reward_weights: Tensor

    @property
    def weighted_rewards(self) -> Tensor:
        """The `weighted_rewards` fp64 [P, G] of the rewards; NaN where none applies."""
        return weighted_rewards(self.rewards, self.reward_weights)

    @property
    def weighted_greedy_rewards(self) -> Tensor:
        """Those of the greedy rollouts, fp64 [P, 0 or 1]."""
        return weighted_rewards(self.greedy_rewards, self.reward_weights)

    @property
    def num_loss_tokens(self) -> Tensor:
        """How many tokens the policy sampled in each rollout, int64 [P, G]."""
        return torch.tensor([info.num_loss_tokens for info in self.infos]).view(self.rewards.shape[:2])

    @property
    def is_truncated(self) -> Tensor:
        """Whether a limit cut off each rollout, bool [P, G]."""
        return torch.tensor([info.is_truncated for info in self.infos]).view(self.rewards.shape[:2])

    @property
    def sequences(self) -> list[SequenceInfo]:
        """The sequences of all rollouts, one rollout after the other; `rollout_index` is p * G + g."""
        return [
            sequence._replace(rollout_index=number)
            for number, info in enumerate(self.infos)
            for sequence in info.sequences
        ]


@dataclass(frozen=True)
class Selection:
    """The groups selected for a step. All fields except `remaining` are the same on every rank."""

    groups: Groups
    # This rank's rollouts that later steps may select.
    remaining: RewardedRollouts
    # How many groups there are too few, not counting replaceable ones; less than 0 if there are more.
    num_missing: int
    # How many groups have equal first rewards, if such groups are replaced.
    num_zero_variance: int
    # The prompts whose groups were selected or dropped.
    ended_prompts: frozenset[int]


def select_step(
    rewarded: RewardedRollouts,
    num_groups: int,
    group_size: int,
    num_greedy: int = 0,
    *,
    reward_weights: Tensor,
    replaces_zero_variance: bool = False,
) -> Selection:
    """Select `num_groups` of all ranks' groups, the first in order of their prompts (collective).

    rewarded: the groups of this rank, each whole: `group_size` rollouts of a prompt, then `num_greedy` greedy ones.
    reward_weights: fp64 [K].
    replaces_zero_variance: groups with different first rewards come first; the others have no signal, count as missing
    and are dropped if they are not selected.
    """
    infos = gather_infos(rewarded.rollouts, rewarded.rewards)
    # They are in order of the ids: the rollouts of one prompt are adjacent, the greedy ones last.
    per_prompt = group_size + num_greedy
    ordinals = torch.tensor([info.id.prompt_ordinal for info in infos[::per_prompt]])
    rewards = torch.tensor([info.rewards for info in infos], dtype=torch.float64)
    rewards = rewards.view(len(ordinals), per_prompt, len(reward_weights))

    is_zero_variance = torch.zeros(len(ordinals), dtype=torch.bool)
    if replaces_zero_variance:
        is_zero_variance = have_zero_variance(rewards[:, :group_size, 0])
    selected = select_groups(is_zero_variance, num_groups)
    taken = frozenset(ordinals[selected].tolist())
    ended_prompts = taken.union(ordinals[is_zero_variance].tolist())

    # This rank's part, also in order of the ids.
    own = sorted((rollout.rollout_id, i) for i, rollout in enumerate(rewarded.rollouts))
    own_taken = [i for ids, i in own if ids.prompt_ordinal in taken and ids.sample < group_size]
    own_remaining = [i for ids, i in own if ids.prompt_ordinal not in ended_prompts]
    groups = Groups(
        rewarded=rewarded.select(own_taken),
        infos=[info for info in infos if info.id.prompt_ordinal in taken and info.id.sample < group_size],
        rewards=rewards[selected][:, :group_size],
        greedy_rewards=rewards[selected][:, group_size:],
        reward_weights=reward_weights,
    )
    return Selection(
        groups=groups,
        remaining=rewarded.select(own_remaining),
        num_missing=num_groups - int((~is_zero_variance).sum()),
        num_zero_variance=int(is_zero_variance.sum()),
        ended_prompts=ended_prompts,
    )
