"""Select the groups of a step. A group is all rollouts of one prompt; every rank knows the rewards of all."""

from dataclasses import dataclass

import torch
from torch import Tensor

from minirl.objective.advantages import are_equal, select_groups
from minirl.rewards.rewarded import RewardedRollouts
from minirl.training.batch import RolloutTable, gather_table


@dataclass(frozen=True)
class Groups:
    """P groups of G rollouts to train on. All fields except `rewarded` are the same on every rank."""

    # This rank's rollouts of these groups.
    rewarded: RewardedRollouts
    # The branches of all P * G rollouts, one group after the other.
    table: RolloutTable
    # fp64 [P, G, K]
    rewards: Tensor
    # fp64 [P, G, B, K]: those of each rollout's branch b, see `RolloutTable.rewards_by_branch`
    branch_rewards: Tensor
    # fp64 [P, 0 or 1, K]: the rewards of the greedy rollouts, which are not trained on.
    greedy_rewards: Tensor


@dataclass(frozen=True)
class Selection:
    """The groups selected for a step. All fields except `left` are the same on every rank."""

    groups: Groups
    # This rank's rollouts that later steps may select.
    left: RewardedRollouts
    # How many of P groups are missing: not complete, or replaceable.
    num_missing: int
    # How many groups have equal first rewards, if such groups are replaced.
    num_equal: int
    # The prompts whose groups were selected or dropped.
    ended: frozenset[int]

    @property
    def num_selected(self) -> int:
        """The number of complete groups that were selected, up to P."""
        return len(self.groups.rewards)


def select_step(
    rewarded: RewardedRollouts,
    num_groups: int,
    group_size: int,
    num_greedy: int = 0,
    *,
    branch_rewards: Tensor | None = None,
    replaces_equal: bool = False,
) -> Selection:
    """Select `num_groups` of all ranks' groups, the first in order of their prompts (collective).

    rewarded: the groups of this rank, each whole: `group_size` rollouts of a prompt, then `num_greedy` greedy ones.
    branch_rewards: see `gather_table`.
    replaces_equal: groups with different first rewards come first; the others have no signal, count as missing and
    are dropped if they are not selected.
    """
    table = gather_table(rewarded.rollouts, rewarded.rewards, branch_rewards)
    episodes = table.first_branches()
    # The table is sorted by rollout id, so the rollouts of one prompt are adjacent, the greedy ones last.
    rollouts_per_prompt = group_size + num_greedy
    ordinals = episodes.prompt_ordinal[::rollouts_per_prompt]
    rows = torch.arange(len(episodes.prompt_ordinal)).view(-1, rollouts_per_prompt)
    rewards = episodes.rewards[rows]
    by_branch = table.rewards_by_branch()[rows[:, :group_size]]

    given_up = torch.arange(0)
    if replaces_equal:
        first_rewards = by_branch[..., 0]
        selected, num_taken_equal = select_groups(first_rewards, num_groups)
        given_up = are_equal(first_rewards).nonzero()[:, 0]
    else:
        selected, num_taken_equal = list(range(min(num_groups, len(ordinals)))), 0
    chosen = rows[selected, :group_size].flatten()
    is_chosen = torch.isin(table.episode, chosen)
    ended = {*ordinals[selected].tolist(), *ordinals[given_up].tolist()}

    # This rank's part, also in order of the ids.
    own_episodes = table.episode[table.indices_of(rewarded.rollouts)].tolist()
    own_index = {episode: i for i, episode in enumerate(own_episodes)}
    own = [own_index[episode] for episode in chosen.tolist() if episode in own_index]
    left = [
        i for _, i in sorted(own_index.items()) if rewarded.rollouts[i].rollout_id.prompt_ordinal not in ended
    ]
    groups = Groups(
        rewarded=rewarded.select(own),
        table=table.select(is_chosen.nonzero()[:, 0].tolist()),
        rewards=rewards[selected][:, :group_size],
        branch_rewards=by_branch[selected],
        greedy_rewards=rewards[selected][:, group_size:],
    )
    return Selection(
        groups=groups,
        left=rewarded.select(left),
        num_missing=num_groups - len(selected) + num_taken_equal,
        num_equal=len(given_up),
        ended=frozenset(ended),
    )
