"""Group advantages and loss weights against worked numbers and counts."""

import pytest
import torch

from minirl.advantages import group_advantages, loss_weights


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def assert_six_decimals(actual, expected):
    torch.testing.assert_close(actual, double(expected), rtol=0, atol=6e-7)


@pytest.mark.parametrize(
    ("norm", "eps", "expected"),
    [
        ("mean_std", 1e-6, [0.783348, -1.305580, -0.261116, 0.783348]),
        ("mean_std", 1e-4, [0.783186, -1.305310, -0.261062, 0.783186]),
        ("mean", 1e-6, [0.375, -0.625, -0.125, 0.375]),
    ],
    ids=["grpo", "grpo_trl", "dr_grpo"],
)
def test_advantages_equal_the_worked_numbers(norm, eps, expected):
    """GRPO divides by the std with ddof 1 plus eps, Dr.GRPO by nothing."""
    assert_six_decimals(group_advantages(double([[1.0, 0.0, 0.5, 1.0]]), norm=norm, eps=eps), [expected])


def test_a_group_of_two_gets_its_known_advantages():
    """One right of two is plus and minus 1 / sqrt(2)."""
    assert_six_decimals(group_advantages(double([[1.0, 0.0]]), norm="mean_std"), [[0.707106, -0.707106]])


@pytest.mark.parametrize(
    ("num_correct", "right", "wrong"),
    [(1, 2.474867, -0.353552), (4, 0.935413, -0.935413), (7, 0.353552, -2.474867)],
)
def test_a_group_of_eight_gets_its_known_advantages(num_correct, right, wrong):
    """The rarer answer of a group gets the larger advantage, by the table."""
    rewards = double([[1.0] * num_correct + [0.0] * (8 - num_correct)])
    expected = [[right] * num_correct + [wrong] * (8 - num_correct)]
    assert_six_decimals(group_advantages(rewards, norm="mean_std"), expected)


@pytest.mark.parametrize("norm", ["mean", "mean_std"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -0.7, 1e-30, 1e6 / 3])
def test_equal_rewards_give_exactly_zero(norm, dtype, reward):
    """No rounding of the mean is blown up by a tiny std, whatever the reward and the group's size."""
    for group_size in (2, 3, 7, 8):
        rewards = torch.tensor([[reward] * group_size, list(range(group_size))], dtype=dtype)
        advantages = group_advantages(rewards, norm=norm)
        assert torch.equal(advantages[0], torch.zeros(group_size, dtype=dtype))
        assert (advantages[1] != 0).any()


def test_three_rewards_of_a_tenth_have_a_mean_that_is_off():
    """The case of [0.1] * 3 is real: without the exact rule its advantages would not be 0."""
    rewards = double([[0.1] * 3])
    assert (rewards - rewards.mean(1, keepdim=True)).abs().max() > 0
    assert torch.equal(group_advantages(rewards, norm="mean_std", eps=1e-9), torch.zeros(1, 3, dtype=torch.float64))


@pytest.mark.parametrize("norm", ["mean", "mean_std"])
def test_groups_do_not_mix(norm):
    """Two instances of one prompt are two groups: each row's advantages are those of the row alone."""
    rewards = double([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    together = group_advantages(rewards, norm=norm)
    alone = torch.cat([group_advantages(row[None], norm=norm) for row in rewards])
    assert torch.equal(together, alone)
    merged = group_advantages(rewards[:2].reshape(1, 8), norm=norm).reshape(2, 4)
    assert (together[:2] - merged).abs().max() > 0.1


@pytest.mark.parametrize("norm", ["mean", "mean_std"])
def test_advantages_follow_a_permutation_of_the_group(norm):
    """Which sample came from which rank does not matter."""
    rewards = double([[0.25, 1.0, 0.0, 0.5, 0.125]])
    order = torch.tensor([3, 1, 4, 0, 2])
    permuted = group_advantages(rewards[:, order], norm=norm)
    torch.testing.assert_close(permuted, group_advantages(rewards, norm=norm)[:, order], rtol=0, atol=1e-15)


def test_unknown_advantage_norm_is_refused_with_the_choices():
    """A misspelt norm stops with its value and the names that exist, also when all rewards are equal."""
    with pytest.raises(ValueError, match=r"'std'.*mean, mean_std"):
        group_advantages(double([[1.0, 1.0]]), norm="std")


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        ("token_mean", [1 / 14] * 4),
        ("sequence_mean", [1 / 12, 1 / 20, 1 / 8, 1 / 16]),
        ("constant", [1 / 32] * 4),
    ],
)
def test_loss_weights_equal_their_formulas(norm, expected):
    """1 / sum(L), 1 / (N L_i) and 1 / (N C), in double precision."""
    weights = loss_weights(torch.tensor([3, 5, 2, 4]), norm=norm, constant=8)
    torch.testing.assert_close(weights, double(expected), rtol=1e-15, atol=0)


@pytest.mark.parametrize(("norm", "total"), [("token_mean", 1.0), ("sequence_mean", 1.0), ("constant", 14 / 32)])
def test_weights_of_all_tokens_sum_to_a_known_total(norm, total):
    """Means weigh 1 in all; the constant divisor weighs the share of N * C that was used."""
    lengths = torch.tensor([3, 5, 2, 4])
    weights = loss_weights(lengths, norm=norm, constant=8)
    assert float((weights * lengths).sum()) == pytest.approx(total, abs=1e-15)


def test_constant_norm_does_not_depend_on_the_longest_completion():
    """A sequence weighs the same beside a short and beside a long one."""
    short = loss_weights(torch.tensor([3, 4]), norm="constant", constant=8)
    long = loss_weights(torch.tensor([3, 8]), norm="constant", constant=8)
    assert torch.equal(short, long)


@pytest.mark.parametrize(
    ("norm", "expected"),
    [("token_mean", [1 / 6] * 3), ("sequence_mean", [1 / 6, None, 1 / 12]), ("constant", [1 / 24] * 3)],
)
def test_a_sequence_without_loss_tokens_counts_but_weighs_nothing(norm, expected):
    """It stays in N, every weight is finite, and its zero tokens add zero."""
    lengths = torch.tensor([2, 0, 4])
    weights = loss_weights(lengths, norm=norm, constant=8)
    assert torch.isfinite(weights).all()
    for weight, wanted in zip(weights.tolist(), expected, strict=True):
        assert wanted is None or weight == pytest.approx(wanted, rel=1e-15)


@pytest.mark.parametrize("norm", ["token_mean", "sequence_mean", "constant"])
def test_loss_weights_are_finite_when_no_sequence_has_tokens(norm):
    """An optimizer step without a single loss token divides by nothing."""
    weights = loss_weights(torch.tensor([0, 0]), norm=norm, constant=8)
    assert weights.shape == (2,)
    assert torch.isfinite(weights).all()


def test_unknown_loss_norm_is_refused_with_the_choices():
    """A misspelt norm stops with its value and the names that exist."""
    with pytest.raises(ValueError, match=r"'mean'.*token_mean, sequence_mean, constant"):
        loss_weights(torch.tensor([1]), norm="mean", constant=8)
