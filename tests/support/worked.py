"""The four responses to one prompt that objectives were worked out for by hand."""

import torch

from minirl.episodes.step_groups import Groups
from minirl.training.batch import RolloutTable


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def flat(per_sequence):
    return [x for values in per_sequence for x in values]


def assert_six_decimals(actual, expected):
    actual, expected = (torch.as_tensor(numbers, dtype=torch.float64) for numbers in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=0, atol=6e-7)


def groups_of(rewards, counts=None, *, greedy=None):
    """The groups of a reward fp64 [P, G], of rollouts that sampled these numbers of tokens [P, G] or one each."""
    num_prompts, group_size = rewards.shape
    prompts, samples = torch.meshgrid(torch.arange(num_prompts), torch.arange(group_size), indexing="ij")
    counts = torch.ones_like(prompts) if counts is None else counts
    columns = prompts, samples, prompts * 0, prompts * 0, counts, counts, counts, rewards.isinf()
    table = RolloutTable(*(column.flatten().numpy() for column in columns), rewards.view(-1, 1).numpy())
    greedy_rewards = rewards[:, :0, None] if greedy is None else greedy.view(num_prompts, -1, 1)
    return Groups(None, table, rewards[..., None], greedy_rewards, double([1.0]))


LENGTHS = (3, 5, 2, 4)
REWARDS = double([[1.0, 0.0, 0.5, 1.0]])

GRPO = {"baseline": "mean", "norm": "group_std", "eps": 1e-6}
TRL = {"baseline": "mean", "norm": "group_std", "eps": 1e-4}
DR_GRPO = {"baseline": "mean", "norm": "none"}
RLOO = {"baseline": "leave_one_out", "norm": "none"}
