"""The groups of a step: all rollouts of a prompt, with their rewards, known to every rank."""

from dataclasses import dataclass

from torch import Tensor

from minirl.objective.advantages import select_groups
from minirl.rewards.rewarded import RewardedRollouts
from minirl.training.batch import RolloutTable, gather_table


@dataclass(frozen=True)
class Groups:
    """P groups of G rollouts to train on; all but `rewarded` is the same on every rank."""

    rewarded: RewardedRollouts  # this rank's rollouts of these groups
    table: RolloutTable  # of all P x G rollouts, group after group
    rewards: Tensor  # fp64 [P, G, K]
    greedy_rewards: Tensor  # fp64 [P, 0 or 1, K], of the greedy rollouts, which are not trained on
    num_missing: int  # how many of the groups have no signal, their first rewards being all equal


def gather_groups(
    rewarded: RewardedRollouts, num_groups: int, group_size: int, *, num_greedy: int = 0
) -> Groups:
    """Choose `num_groups` of the groups that the ranks have made so far, those with a signal first (collective).

    A prompt has `group_size` rollouts and after them `num_greedy` greedy ones.
    """
    table = gather_table(rewarded.rollouts, rewarded.rewards)
    num_rewards = rewarded.rewards.shape[1]
    rewards = table.rewards.view(-1, group_size + num_greedy, num_rewards)
    kept, num_missing = select_groups(rewards[:, :group_size, 0], num_groups)
    trained = [group * rewards.shape[1] + sample for group in kept for sample in range(group_size)]
    is_trained = set(trained)
    own = [i for i, index in enumerate(table.indices_of(rewarded.rollouts)) if index in is_trained]
    return Groups(
        rewarded=rewarded.select(own),
        table=table.select(trained),
        rewards=rewards[kept][:, :group_size],
        greedy_rewards=rewards[kept][:, group_size:],
        num_missing=num_missing,
    )
