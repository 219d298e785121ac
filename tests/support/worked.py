"""Four responses to one prompt, for which the objectives were computed by hand."""

import torch

from minirl.episodes.step_groups import Groups
from minirl.training.batch import RolloutInfo, sequence_infos_from_lengths


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def flat(per_sequence):
    return [x for values in per_sequence for x in values]


def assert_six_decimals(actual, expected):
    actual, expected = (torch.as_tensor(numbers, dtype=torch.float64) for numbers in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=0, atol=6e-7)


def groups_of(rewards, counts=None, *, greedy=None):
    """Return groups with rewards fp64 [P, G], whose rollouts sampled `counts` [P, G] tokens, by default one."""
    counts = torch.ones_like(rewards).long() if counts is None else counts
    infos = [
        RolloutInfo([one._replace(num_loss_tokens=one.num_tokens)], False, [])
        for one in sequence_infos_from_lengths(counts.flatten().tolist())
    ]
    greedy_rewards = rewards[:, :0, None] if greedy is None else greedy.view(len(rewards), -1, 1)
    return Groups(None, infos, rewards[..., None], greedy_rewards, double([1.0]))


LENGTHS = (3, 5, 2, 4)
REWARDS = double([[1.0, 0.0, 0.5, 1.0]])

GRPO = {"baseline": "mean", "norm": "group_std", "eps": 1e-6}
TRL = {"baseline": "mean", "norm": "group_std", "eps": 1e-4}
DR_GRPO = {"baseline": "mean", "norm": "none"}
RLOO = {"baseline": "leave_one_out", "norm": "none"}
