"""Advantages, returns and loss weights against worked numbers and counts."""

import itertools
import math

import pytest
import torch

import train_grpo
from minirl.training.advantages import (
    ADVANTAGE_NORMS,
    are_equal,
    explained_variance,
    gae,
    group_advantages,
    mean_and_variance,
    returns_to_go,
    select_groups,
    token_rewards,
    weighted_scores,
    whiten,
)
from minirl.training.batch import Batch
from minirl.training.kl import adapted_kl_coef
from minirl.training.loss_weights import loss_weights
from support.worked import (
    DR_GRPO,
    GRPO,
    LENGTHS,
    REWARDS,
    RLOO,
    TRL,
    assert_six_decimals,
    double,
    flat,
    groups_of,
)

COUNTS = torch.tensor(LENGTHS)
# k1 = old - ref of the four worked sequences
K1 = [[0.1, -0.2, 0.1], [0.1, 0.2, -0.2, 0.3, 0.1], [-0.05, 0.05], [-0.1, -0.1, 0.1, -0.4]]

BATCH = {"baseline": "mean", "norm": "batch_std", "eps": 1e-4}
ESTIMATORS = [{"baseline": b, "norm": n} for b in ("mean", "leave_one_out") for n in ADVANTAGE_NORMS]
PER_GROUP = [e for e in ESTIMATORS if e["norm"] != "batch_std"]


@pytest.mark.parametrize(
    ("options", "rewards", "expected"),
    [
        pytest.param(GRPO, REWARDS, [[0.783348, -1.305580, -0.261116, 0.783348]], id="grpo"),
        pytest.param(TRL, REWARDS, [[0.783186, -1.305310, -0.261062, 0.783186]], id="grpo_trl"),
        pytest.param(DR_GRPO, REWARDS, [[0.375, -0.625, -0.125, 0.375]], id="dr_grpo"),
        pytest.param(RLOO, REWARDS, [[0.500000, -0.833333, -0.166667, 0.500000]], id="rloo"),
        pytest.param(
            {"baseline": double([1.0, -1.0]), "norm": "none"},
            double([[1.0, 0.0], [0.5, 0.25]]),
            [[0.0, -1.0], [1.5, 1.25]],
            id="remax",
        ),
        pytest.param({"baseline": "none", "norm": "none"}, REWARDS, REWARDS.tolist(), id="reinforce"),
        pytest.param(
            BATCH,
            double([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]]),
            [[1.402859, -0.467620, -0.467620, -0.467620], [0.467620, 0.467620, -1.402859, 0.467620]],
            id="batch_std",
        ),
    ],
)
def test_advantages_equal_the_worked_numbers(options, rewards, expected):
    """Pitfall 24: ddof 1, the eps added to the std, and the baseline are those of the named recipe."""
    assert_six_decimals(group_advantages(rewards, **options), expected)


@pytest.mark.parametrize("options", ESTIMATORS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(options, dtype):
    """Pitfall 23: no rounding of the mean is blown up by a tiny std, whatever the reward and the group's size."""
    for reward, group_size in itertools.product((0.0, 0.1, -0.7, 1e-30, 1e6 / 3), (2, 3, 7, 8)):
        rewards = torch.tensor([[reward] * group_size, list(range(group_size))], dtype=dtype)
        advantages = group_advantages(rewards, **options)
        assert torch.equal(advantages[0], torch.zeros(group_size, dtype=dtype))
        assert (advantages[1] != 0).any()


@pytest.mark.parametrize("options", PER_GROUP, ids=str)
def test_groups_do_not_mix(options):
    """Pitfall 25: two instances of one prompt are two groups, each with the advantages that it has alone."""
    rewards = double([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    alone = torch.cat([group_advantages(row[None], **options) for row in rewards])
    assert torch.equal(group_advantages(rewards, **options), alone)


@pytest.mark.parametrize(
    ("count", "rows"), [(1, [1]), (3, [1, 3, 5]), (4, [0, 1, 3, 5]), (9, [0, 1, 2, 3, 4, 5])]
)
def test_groups_with_a_signal_are_selected_first(count, rows):
    """The first groups whose accuracies differ, filled up with the first others, in order.

    Judged by accuracy an all-correct group has no signal, whatever its lengths. Pitfalls 26 and 54.
    """
    accuracy = double([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.5, 0.5], [0.5, 1.0]])
    assert select_groups(are_equal(accuracy), count) == rows


KEPT = double([1, 0, 1, 1])


@pytest.mark.parametrize(
    ("lengths", "options", "token_mean", "sequence_mean", "constant"),
    [
        (LENGTHS, {}, 1 / 14, [1 / 12, 1 / 20, 1 / 8, 1 / 16], 1 / 32),
        (LENGTHS, {"keep": KEPT.bool()}, KEPT / 9, [1 / 9, 0, 1 / 6, 1 / 12], KEPT / 24),
        (LENGTHS, {"keep": torch.zeros(4).bool()}, 0, [0] * 4, 0),
        # Each of two minibatches by itself.
        (
            (1, 4, 3, 6),
            {"num_minibatches": 2},
            double([1 / 5, 1 / 5, 1 / 9, 1 / 9]),
            [1 / 2, 1 / 8, 1 / 6, 1 / 12],
            1 / 16,
        ),
        # A sequence without loss tokens stays in N; its own weight is finite and never used.
        ((2, 0, 4), {}, 1 / 6, [1 / 6, 0, 1 / 12], 1 / 24),
        ((0, 0), {}, 0, [0, 0], 0),
    ],
)
def test_loss_weights_equal_their_formulas(lengths, options, token_mean, sequence_mean, constant):
    """1 / sum(L), 1 / (N L_i) and 1 / (N C) over the rollouts that are kept, in double precision.

    Pitfall 34: by the constant a sequence weighs the same beside a short and beside a long one.
    """
    counts = torch.tensor(lengths)
    has_tokens = counts > 0
    expected = {"token_mean": token_mean, "sequence_mean": double(sequence_mean), "constant": constant}
    for norm, wanted in expected.items():
        weights = loss_weights(counts, norm=norm, constant=8, **options)
        assert weights.isfinite().all()
        wanted = wanted + torch.zeros_like(weights)
        torch.testing.assert_close(weights[has_tokens], wanted[has_tokens], rtol=1e-15, atol=0)


TERMINAL = {"rewards": [0, -0.1, 0.2, 1], "values": [0.5, 0.4, 0.6, 0.8], "bootstrap": 0.0}
PENALISED = {
    "rewards": [-0.005, -0.010, 0.010, -0.015, -0.005],
    "values": [0.30, 0.25, 0.35, 0.10, 0.05],
    "bootstrap": 0.0,
}
TRUNCATED = {**PENALISED, "bootstrap": 0.4}
NO_TOKENS = {"rewards": [], "values": [], "bootstrap": 0.7}
PPO_DECAY = {"gamma": 1.0, "gae_lambda": 0.95}


def estimates_of(sequences, **decay):
    streams = {k: double(flat([s[k] for s in sequences])) for k in ("rewards", "values")}
    lengths = torch.tensor([len(s["values"]) for s in sequences], dtype=torch.int64)
    return gae(**streams, lengths=lengths, bootstrap=double([s["bootstrap"] for s in sequences]), **decay)


@pytest.mark.parametrize(
    ("sequence", "decay", "expected"),
    [
        pytest.param(TERMINAL, PPO_DECAY, [0.527475, 0.660500, 0.590000, 0.200000], id="terminal"),
        pytest.param(TERMINAL, {"gamma": 1.0, "gae_lambda": 1.0}, [0.6, 0.7, 0.6, 0.2], id="lambda_1"),
        pytest.param(
            TERMINAL,
            {"gamma": 0.99, "gae_lambda": 0.95},
            [0.497529, 0.639584, 0.580100, 0.2],
            id="gamma_0.99",
        ),
        pytest.param(
            PENALISED, PPO_DECAY, [-0.286627, -0.243818, -0.351387, -0.117250, -0.055000], id="ended"
        ),
        pytest.param(
            TRUNCATED, PPO_DECAY, [0.039175, 0.099132, 0.009612, 0.262750, 0.345000], id="truncated"
        ),
    ],
)
def test_estimates_equal_the_worked_numbers(sequence, decay, expected):
    """Pitfall 31: the state after the last token is worth `bootstrap`, which is 0 where the sequence ended."""
    assert_six_decimals(estimates_of([sequence], **decay), expected)


@pytest.mark.parametrize("decay", [PPO_DECAY, {"gamma": 0.9, "gae_lambda": 0.8}])
def test_estimates_in_a_pack_are_those_of_each_sequence_alone(decay):
    """Pitfall 30: in any order, beside a sequence without tokens, nothing crosses a border."""
    for order in itertools.permutations([TERMINAL, PENALISED, TRUNCATED, NO_TOKENS]):
        alone = torch.cat([estimates_of([sequence], **decay) for sequence in order])
        assert torch.equal(estimates_of(order, **decay), alone)
    assert estimates_of([], **decay).shape == (0,)


def test_estimates_leave_their_arguments_alone():
    """Values and bootstrap are used again after the estimates are made."""
    rewards, values, bootstrap = double([0, 1]), double([0.5, 0.4]), double([0.3])
    gae(rewards, values, torch.tensor([2]), bootstrap=bootstrap, **PPO_DECAY)
    assert (rewards.tolist(), values.tolist(), bootstrap.tolist()) == ([0, 1], [0.5, 0.4], [0.3])


def test_token_rewards_and_returns_equal_the_worked_numbers():
    """Pitfall 30: the score is paid at each sequence's last token, the KL penalty at every one."""
    rewards = token_rewards(double([1.0, 0.0]), double(flat(K1[:2])), COUNTS[:2], kl_coef=0.05)
    assert_six_decimals(rewards, [-0.005, 0.010, 0.995, *PENALISED["rewards"]])
    to_go = returns_to_go(rewards, COUNTS[:2])
    assert_six_decimals(to_go, [1.000, 1.005, 0.995, -0.025, -0.020, -0.010, -0.020, -0.005])


def test_the_score_of_a_sequence_without_tokens_is_paid_to_nobody():
    """Neither its neighbours nor the pack's last token receive it."""
    rewards = token_rewards(double([7.0, 1.0, 9.0]), double([0.0, 0.0]), torch.tensor([0, 2, 0]), kl_coef=0.1)
    assert_six_decimals(rewards, [0.0, 1.0])
    assert token_rewards(double([7.0]), double([]), torch.tensor([0]), kl_coef=0.1).shape == (0,)


def with_kl(rank, baseline):
    """The script's advantages of the worked responses under a KL term in the reward."""
    tokens = torch.arange(14)
    batch = Batch(LENGTHS, tokens, tokens >= 0, double(flat(K1)), rollout=torch.arange(4))
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
    """Pitfall 28. RLOO in TRL: each score loses its sequence's KL, then the leave-one-out baseline is taken.

    REINFORCE in verl: each token loses the KL from there on.
    """
    (advantages,) = one_rank.run(with_kl, baseline)
    assert_six_decimals(advantages, flat(expected))


def test_kl_coefficient_follows_the_worked_numbers():
    """At most 20 % per horizon, up when the KL is above its target and down when below."""
    kl_coef = 0.2
    for kl, expected in ((12, 0.201024), (3, 0.199995), (6.3, 0.200251)):
        kl_coef = adapted_kl_coef(kl_coef, kl, target=6, num_rollouts=256, horizon=10_000)
        assert_six_decimals(kl_coef, expected)


def whitened(rank, parts):
    """The whitened part of this rank, and the mean and variance of all."""
    return whiten(parts[rank]), *map(float, mean_and_variance(parts[rank]))


def explained(rank, values, returns):
    return explained_variance(values[rank], returns[rank])


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        pytest.param(
            double([0.527475, 0.660500, 0.590000, 0.200000]),
            [0.161903, 0.814913, 0.468833, -1.445648],
            id="gae",
        ),
        pytest.param(double([1e8, 1e8 + 1, 1e8 + 2]), [-1.0, 0.0, 1.0], id="far_from_zero"),
        pytest.param(torch.tensor([1.0, 2.0, 4.0]), [-0.872872, -0.218218, 1.091089], id="fp32"),
        pytest.param(double([0.1] * 7), [0.0] * 7, id="all_equal"),
        pytest.param(double([0.0, 1e-4]), [-0.408248, 0.408248], id="1e-8_in_the_variance"),
    ],
)
def test_whitening_is_over_the_tokens_of_all_ranks(one_rank, two_ranks, stream, expected):
    """Pitfall 29: ddof 1, the worked numbers, and the same for every split over two ranks, an empty rank included.

    It is computed in fp64 and rounded once to the stream's precision.
    """
    ((alone, mean, variance),) = one_rank.run(whitened, [stream])
    assert_six_decimals(alone, expected)
    exact, *_ = one_rank.run(whitened, [stream.double()])[0]
    assert torch.equal(alone, exact.to(stream))
    assert mean == pytest.approx(float(stream.double().mean()), rel=1e-14)
    assert variance == pytest.approx(float(stream.double().var()), rel=1e-12, abs=1e-30)
    for cut in (0, 1, len(stream) // 2, len(stream)):
        first, second = two_ranks.run(whitened, [stream[:cut], stream[cut:]])
        torch.testing.assert_close(torch.cat([first[0], second[0]]), alone, rtol=0, atol=1e-12)
        assert first[1:] == second[1:] == pytest.approx((mean, variance), rel=1e-14, abs=1e-30)


RETURNS = [1.0, 2.0, 4.0, 7.0]


@pytest.mark.parametrize(
    ("values", "returns", "expected"),
    [
        ([6.0, 7.0, 9.0, 12.0], RETURNS, 1.0),
        ([0.5, 1.0, 2.0, 3.5], RETURNS, 0.75),
        ([3.0] * 4, RETURNS, 0.0),
        ([-1.0, -2.0, -4.0, -7.0], RETURNS, -3.0),
        (RETURNS, [3.0] * 4, 0.0),
    ],
)
def test_explained_variance_is_a_share_over_all_ranks(one_rank, two_ranks, values, returns, expected):
    """1 for perfect values up to a shift, 0 for a constant, below 0 for worse; the same for every split."""
    values, returns = double(values), double(returns)
    assert one_rank.run(explained, [values], [returns]) == pytest.approx([expected], abs=1e-12)
    for cut in (0, 1, 2):
        parts = [[x[:cut], x[cut:]] for x in (values, returns)]
        assert two_ranks.run(explained, *parts) == pytest.approx([expected] * 2, abs=1e-12)


MISSING = math.nan


def test_a_reward_that_does_not_apply_has_no_part_in_the_score():
    """By weights 1 and 2: 1 + 2 x 0.5; 0; none at all; 2 x 1. A reward of weight 0 is only logged: no score by it."""
    rewards = double([[1.0, 0.5], [0.0, MISSING], [MISSING, 1.0], [MISSING, MISSING]])
    scores = weighted_scores(rewards, double([1.0, 2.0]))
    assert scores[:3].tolist() == [2.0, 0.0, 2.0]
    assert scores[3].isnan()
    assert weighted_scores(rewards, double([1.0, 0.0])).isnan().tolist() == [False, False, True, True]


STD = float(double([2, 0, 2, 5, 7, 4]).std())
SCORES = [[2, 0, MISSING, 2], [5, 7, MISSING, MISSING], [MISSING, 4, MISSING, MISSING], [MISSING] * 4]


@pytest.mark.parametrize(
    ("baseline", "norm", "expected"),
    [
        ("mean", "none", [[2 / 3, -4 / 3, 0, 2 / 3], [-1, 1, 0, 0], [0] * 4, [0] * 4]),
        ("leave_one_out", "none", [[1, -2, 0, 1], [-2, 2, 0, 0], [0] * 4, [0] * 4]),
        ("none", "none", [[2, 0, 0, 2], [5, 7, 0, 0], [0, 4, 0, 0], [0] * 4]),
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
    """Worked by hand: the group is the rollouts with a score; the others, and a single score, get 0.

    A group without a greedy score has no advantage.
    """
    got = group_advantages(double(SCORES), baseline=baseline, norm=norm, eps=0.0)
    assert torch.allclose(got, double(expected), rtol=0, atol=1e-12)


def test_a_group_is_equal_by_the_scores_that_it_has():
    """Missing scores make no difference, and a group without any score has no signal."""
    groups = double([[1, MISSING, 1], [1, MISSING, 0], [MISSING] * 3, [0.1, 0.1, 0.1]])
    assert are_equal(groups).tolist() == [True, False, True, True]
    assert select_groups(are_equal(groups), 2) == [0, 1]
