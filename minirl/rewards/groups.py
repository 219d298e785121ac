"""Select the groups of a step. A group is all rollouts of one prompt; every rank knows the rewards of all."""

from dataclasses import dataclass

from torch import Tensor

from minirl.objective.advantages import select_groups
from minirl.rewards.rewarded import RewardedRollouts
from minirl.training.batch import RolloutTable, gather_table


@dataclass(frozen=True)
class Groups:
    """P groups of G rollouts to train on. All fields but `rewarded` are the same on every rank."""

    # This rank's rollouts of these groups.
    rewarded: RewardedRollouts
    # All P * G rollouts, one group after the other.
    table: RolloutTable
    # fp64 [P, G, K]
    rewards: Tensor
    # fp64 [P, 0 or 1, K]: the rewards of the greedy rollouts, which are not trained on.
    greedy_rewards: Tensor
    # How many of the groups have no signal, because all rollouts have the same first reward.
    num_missing: int


def gather_groups(
    rewarded: RewardedRollouts, num_groups: int, group_size: int, num_greedy: int = 0
) -> Groups:
    """Select `num_groups` of all ranks' groups, those with a signal first (collective).

    `rewarded` is all that this rank has generated in the step so far. Each prompt has `group_size` rollouts,
    followed by `num_greedy` greedy ones.
    """
    table = gather_table(rewarded.rollouts, rewarded.rewards)
    num_rewards = rewarded.rewards.shape[1]
    # The table is sorted by rollout id, so the rollouts of one prompt are adjacent, the greedy ones last.
    rollouts_per_prompt = group_size + num_greedy
    rewards = table.rewards.view(-1, rollouts_per_prompt, num_rewards)
    first_rewards = rewards[:, :group_size, 0]
    selected_groups, num_missing = select_groups(first_rewards, num_groups)

    table_indices: list[int] = []
    for group in selected_groups:
        first = group * rollouts_per_prompt
        table_indices.extend(range(first, first + group_size))

    # Which of this rank's rollouts are among them.
    selected = set(table_indices)
    own_indices = [i for i, index in enumerate(table.indices_of(rewarded.rollouts)) if index in selected]
    return Groups(
        rewarded=rewarded.select(own_indices),
        table=table.select(table_indices),
        rewards=rewards[selected_groups][:, :group_size],
        greedy_rewards=rewards[selected_groups][:, group_size:],
        num_missing=num_missing,
    )
