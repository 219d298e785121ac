"""Advantages, returns and loss weights against worked numbers and counts."""

import itertools
import math

import pytest
import torch

import train_grpo
from minirl.training.advantages import (
    gae,
    group_advantages,
    have_zero_variance,
    returns_to_go,
    select_groups,
    token_rewards,
    weighted_rewards,
    whiten,
)
from minirl.training.batch import Batch, sequence_infos_from_lengths
from minirl.training.losses import loss_weights
from support.worked import (
    DR_GRPO,
    LENGTHS,
    REWARDS,
    RLOO,
    TRL,
    assert_six_decimals,
    double,
    flat,
    groups_of,
)

# k1 = old - ref for the four worked sequences
K1 = [[0.1, -0.2, 0.1], [0.1, 0.2, -0.2, 0.3, 0.1], [-0.05, 0.05], [-0.1, -0.1, 0.1, -0.4]]
BATCH = {"baseline": "mean", "norm": "batch_std", "eps": 1e-4}
REMAX = {"baseline": double([1.0, -1.0]), "norm": "none"}


@pytest.mark.parametrize(
    ("options", "rewards", "expected"),
    [
        pytest.param(TRL, REWARDS, [[0.783186, -1.305310, -0.261062, 0.783186]], id="grpo_trl"),
        pytest.param(DR_GRPO, REWARDS, [[0.375, -0.625, -0.125, 0.375]], id="dr_grpo"),
        pytest.param(RLOO, REWARDS, [[0.500000, -0.833333, -0.166667, 0.500000]], id="rloo"),
        pytest.param(REMAX, double([[1.0, 0.0], [0.5, 0.25]]), [[0.0, -1.0], [1.5, 1.25]], id="remax"),
        pytest.param(
            BATCH,
            double([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]]),
            [[1.402859, -0.467620, -0.467620, -0.467620], [0.467620, 0.467620, -1.402859, 0.467620]],
            id="batch_std",
        ),
    ],
)
def test_advantages_equal_the_worked_numbers(options, rewards, expected):
    """Pitfall 24: each recipe has its baseline, a std with ddof 1, and its eps, which is added to the std."""
    assert_six_decimals(group_advantages(rewards, **options), expected)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("norm", ["none", "group_std", "batch_std"])
def test_equal_rewards_give_exactly_zero(baseline, norm):
    """Pitfall 23: a tiny std never magnifies rounding errors of the mean or the rewards, whatever the group's size."""
    for reward, group_size in itertools.product((0.0, 0.1, -0.7, 1e-30, 1e16 / 3), (2, 3, 7, 8)):
        rounded = math.nextafter(reward + 0.3 - 0.1 - 0.2, math.inf)
        rewards = double([[rounded, *[reward] * (group_size - 1)], list(range(group_size))])
        advantages = group_advantages(rewards, baseline=baseline, norm=norm)
        assert not advantages[0].any()
        assert advantages[1].any()


MISSING = math.nan
SCORES = [[2, 0, MISSING, 2], [5, 7, MISSING, MISSING], [MISSING, 4, MISSING, MISSING], [MISSING] * 4]
STD = float(double([2, 0, 2, 5, 7, 4]).std())


@pytest.mark.parametrize(
    ("baseline", "norm", "expected"),
    [
        ("leave_one_out", "none", [[1, -2, 0, 1], [-2, 2, 0, 0], [0] * 4, [0] * 4]),
        (
            "mean",
            "group_std",  # 2 / sqrt(3) and sqrt(2)
            [[3**-0.5, -2 * 3**-0.5, 0, 3**-0.5], [-(2**-0.5), 2**-0.5, 0, 0], [0] * 4, [0] * 4],
        ),
        (double([1.0, MISSING, 1.0, 1.0]), "none", [[1, -1, 0, 1], [0] * 4, [0, 3, 0, 0], [0] * 4]),
        (
            "none",
            "batch_std",
            [[2 / STD, 0, 0, 2 / STD], [5 / STD, 7 / STD, 0, 0], [0, 4 / STD, 0, 0], [0] * 4],
        ),
    ],
    ids=str,
)
def test_completions_without_a_score_are_left_out_of_their_groups_statistics(baseline, norm, expected):
    """Worked by hand: only rollouts with a score form the group; other rollouts and a group's only score get 0.

    Without a greedy score, a group's advantages are 0. Other groups do not affect a group's advantages. Pitfall 25.
    """
    got = group_advantages(double(SCORES), baseline=baseline, norm=norm, eps=0.0)
    assert torch.allclose(got, double(expected), rtol=0, atol=1e-12)


def test_a_reward_that_does_not_apply_has_no_part_in_the_score():
    """With weights 1 and 2, the scores are 1 + 2 x 0.5, 0, 2 x 1 and NaN. A reward with weight 0 gives no score."""
    rewards = double([[1.0, 0.5], [0.0, MISSING], [MISSING, 1.0], [MISSING, MISSING]])
    scores = weighted_rewards(rewards, double([1.0, 2.0]))
    assert scores[:3].tolist() == [2.0, 0.0, 2.0]
    assert scores[3].isnan()
    assert weighted_rewards(rewards, double([1.0, 0.0])).isnan().tolist() == [False, False, True, True]


@pytest.mark.parametrize(("count", "rows"), [(3, [1, 3, 5]), (4, [0, 1, 3, 5]), (9, list(range(6)))])
def test_groups_with_a_signal_are_selected_first(count, rows):
    """Groups with different accuracies are taken first, then the first other groups; the order stays.

    An all-correct group has no signal; missing scores and rounding errors make no difference. Pitfall 54.
    """
    accuracy = double([[0.1 + 0.2, 0.3], [0.0, 1.0], [0.1, MISSING], [1.0, 0.0], [MISSING] * 2, [0.5, 1.0]])
    assert select_groups(have_zero_variance(accuracy), count) == rows


KEPT = double([1, 0, 1, 1])


@pytest.mark.parametrize(
    ("lengths", "options", "token_mean", "sequence_mean", "constant"),
    [
        (LENGTHS, {"keep": KEPT}, KEPT / 9, [1 / 9, 0, 1 / 6, 1 / 12], KEPT / 24),
        # Two minibatches are normalised separately.
        (
            (1, 4, 3, 6),
            {"num_minibatches": 2},
            double([1 / 5, 1 / 5, 1 / 9, 1 / 9]),
            [1 / 2, 1 / 8, 1 / 6, 1 / 12],
            1 / 16,
        ),
        # A sequence without loss tokens stays in N; its own weight is finite and never used.
        ((2, 0, 4), {}, 1 / 6, [1 / 6, 1 / 3, 1 / 12], 1 / 24),
    ],
)
def test_loss_weights_equal_their_formulas(lengths, options, token_mean, sequence_mean, constant):
    """The weights are 1 / sum(L), 1 / (N L_i) and 1 / (N C) over the kept rollouts, in double precision.

    Pitfall 34: with `constant`, a sequence's weight does not depend on the lengths of other sequences.
    """
    options = {"keep": torch.ones(len(lengths))} | options
    for norm, expected in (
        ("token_mean", token_mean),
        ("sequence_mean", double(sequence_mean)),
        ("constant", constant),
    ):
        weights = loss_weights(torch.tensor(lengths), norm=norm, constant=8, **options)
        torch.testing.assert_close(weights, expected + torch.zeros_like(weights), rtol=1e-15, atol=0)


TERMINAL = ([0, -0.1, 0.2, 1], [0.5, 0.4, 0.6, 0.8], 0.0)
PENALISED = ([-0.005, -0.010, 0.010, -0.015, -0.005], [0.30, 0.25, 0.35, 0.10, 0.05], 0.0)
TRUNCATED = (*PENALISED[:2], 0.4)
NO_TOKENS = ([], [], 0.7)


@pytest.mark.parametrize(
    ("sequences", "gamma", "expected"),
    [
        (
            [NO_TOKENS, TERMINAL, TRUNCATED, NO_TOKENS, PENALISED],
            1.0,
            [
                *(0.527475, 0.660500, 0.590000, 0.200000),
                *(0.039175, 0.099132, 0.009612, 0.262750, 0.345000),
                *(-0.286627, -0.243818, -0.351387, -0.117250, -0.055000),
            ],
        ),
        ([TERMINAL], 0.99, [0.497529, 0.639584, 0.580100, 0.2]),
        ([], 1.0, []),
    ],
    ids=["pack", "gamma_0.99", "nothing"],
)
def test_estimates_equal_the_worked_numbers(sequences, gamma, expected):
    """In a packed batch, no estimate crosses a sequence border. Pitfall 30.

    The value of the state after the last token is `bootstrap`, 0 for finished sequences. Pitfall 31.
    """
    rewards, values = (double(flat([sequence[i] for sequence in sequences])) for i in (0, 1))
    lengths = torch.tensor([len(sequence[1]) for sequence in sequences], dtype=torch.int64)
    bootstrap = double([sequence[2] for sequence in sequences])
    estimates = gae(rewards, values, lengths, gamma=gamma, gae_lambda=0.95, bootstrap=bootstrap)
    assert_six_decimals(estimates, expected)


def test_token_rewards_and_returns_equal_the_worked_numbers():
    """Each sequence's last token gets the score, and every token the KL penalty. Pitfall 30.

    The score of a sequence without tokens is dropped.
    """
    lengths = torch.tensor([0, 3, 5, 0])
    rewards = token_rewards(double([7.0, 1.0, 0.0, 9.0]), double(flat(K1[:2])), lengths, kl_coef=0.05)
    assert_six_decimals(rewards, [-0.005, 0.010, 0.995, *PENALISED[0]])
    to_go = returns_to_go(rewards, lengths)
    assert_six_decimals(to_go, [1.000, 1.005, 0.995, -0.025, -0.020, -0.010, -0.020, -0.005])


def with_kl(rank, baseline):
    """Return the script's advantages for the worked responses with a KL term in the reward."""
    tokens = torch.arange(14)
    batch = Batch(sequence_infos_from_lengths(LENGTHS), tokens, tokens >= 0, double(flat(K1)))
    config = train_grpo.Config(baseline=baseline, advantage_norm="none", kl_reward_coef=0.05)
    batch = batch.replace(ref_logprobs=double([0.0] * 14))
    return train_grpo.token_advantages(config, groups_of(REWARDS), batch)


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        ("leave_one_out", [[0.5] * 3, [-0.866667] * 5, [-0.166667] * 2, [0.533333] * 4]),
        (
            "none",
            [
                [1.0, 1.005, 0.995],
                [-0.025, -0.020, -0.010, -0.020, -0.005],
                [0.5, 0.4975],
                [1.025, 1.020, 1.015, 1.020],
            ],
        ),
    ],
)
def test_kl_is_before_the_baseline_or_without_one_stays_with_its_own_tokens(one_rank, baseline, expected):
    """Pitfall 28. As in TRL's RLOO, the KL is subtracted from the scores before the leave-one-out baseline.

    As in verl's REINFORCE, the advantage of a token loses the KL of that token and all later ones.
    """
    (advantages,) = one_rank.run(with_kl, baseline)
    assert_six_decimals(advantages, flat(expected))


def whitened(rank, parts):
    return whiten(parts[rank])


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        ([0.527475, 0.6605, 0.59, 0.2], [0.161903, 0.814913, 0.468833, -1.445648]),
        ([0.0, 1e-4], [-0.408248, 0.408248]),  # 1e-8 in the variance
    ],
    ids=str,
)
def test_whitening_equals_the_worked_numbers(two_ranks, stream, expected):
    """Pitfall 29: the variance has ddof 1 and covers the tokens of all ranks; a rank may have no tokens."""
    for cut in (0, 1):
        parts = two_ranks.run(whitened, [double(stream[:cut]), double(stream[cut:])])
        assert_six_decimals(torch.cat(parts), expected)
