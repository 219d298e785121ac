"""Losses, ratios and corrections against the worked numbers of four packed responses."""

import math
import runpy
from contextlib import nullcontext

import pytest
import torch

import train_grpo
import train_ppo
from minirl.errors import InputError
from minirl.training.advantages import group_advantages
from minirl.training.batch import Batch
from minirl.training.kl import KL_ESTIMATORS, kl_penalty
from minirl.training.loss_weights import loss_weights
from minirl.training.losses import (
    CORRECTIONS,
    RATIO_LEVELS,
    cispo_loss,
    clipped_policy_loss,
    importance_ratio,
    importance_weights,
    is_clipped,
    is_value_clipped,
    sequence_sums,
    sft_loss,
    value_loss,
)
from minirl.training.scoring import refuse_gradient
from support.jobs import ROOT
from support.worked import (
    DR_GRPO,
    GRPO,
    LENGTHS,
    OLD,
    REWARDS,
    RLOO,
    SAMPLED,
    TRL,
    assert_six_decimals,
    double,
    flat,
    groups_of,
)

NEW = double(
    [-0.40, -1.45, -0.50, -1.30, -0.05, -1.40, -0.50, -1.30, -0.70, -0.03, -0.75, -0.75, -0.15, -1.80]
)
REF = double(
    [-0.60, -1.00, -0.90, -1.00, -0.30, -1.80, -0.70, -1.60, -0.65, -0.10, -1.00, -0.50, -0.30, -2.60]
)
RHO = [
    1.020201,
    0.951229,
    1,
    0.980199,
    1.020201,
    2.459603,
    1,
    0.951229,
    1,
    1,
    1.020201,
    0.980199,
    1,
    0.449329,
]
SEQUENCE_RHO = [0.970446, 2.339647, 1, 0.449329]
NORMS = ("token_mean", "sequence_mean", "constant")

PPO = {"clip_low": 0.2, "clip_high": 0.2}
CLIP_HIGHER = {"clip_low": 0.2, "clip_high": 0.28}
GSPO = {"clip_low": 3e-4, "clip_high": 4e-4}
CAP = {"clip_low": 1.0, "clip_high": 0.3}  # at most 1.3, no lower bound


def spread(per_sequence):
    return per_sequence.repeat_interleave(torch.tensor(LENGTHS))


def weights_of(norm):
    return spread(loss_weights(torch.tensor(LENGTHS), norm=norm, constant=8))


def advantages_of(estimator=DR_GRPO):
    return spread(group_advantages(REWARDS, **estimator)[0])


def ratio_of(new=NEW, old=OLD, level="token", lengths=LENGTHS):
    everywhere = torch.ones(len(new), dtype=torch.bool)
    return importance_ratio(new, old, level=level, lengths=lengths, loss_mask=everywhere)


def clipped(bounds, level="token", *, new=NEW, estimator=DR_GRPO):
    return clipped_policy_loss(ratio_of(new, level=level), advantages_of(estimator), **bounds)


def cispo(bounds, *, new=NEW):
    return cispo_loss(new, ratio_of(new), advantages_of(), **bounds)


def corrected(correction, low, high):
    rho = importance_weights(OLD, SAMPLED, correction=correction, low=low, high=high, lengths=LENGTHS)
    return rho * clipped(PPO)


def gradient(objective, new=NEW):
    """The gradient of `objective(new)` and its value."""
    new = new.clone().requires_grad_()
    value = objective(new)
    value.backward()
    return new.grad, value.detach()


WORKED_LOSSES = {
    "ppo": (lambda: clipped(PPO), [0.078844, 0.015368, 0.034494]),
    "clip_higher": (lambda: clipped(CLIP_HIGHER), [0.072415, 0.009118, 0.031682]),
    "gspo": (lambda: clipped(GSPO, "sequence_mean"), [0.069861, 0.011568, 0.030564]),
    "cispo_cap": (lambda: cispo(CAP), [-0.050295, 0.005015, -0.022004]),
    "cispo_two_bounds": (lambda: cispo(PPO), [-0.057675, -0.001588, -0.025233]),
    "k1": (lambda: kl_penalty(NEW, REF, "k1"), [0.140714, 0.116875, 0.061563]),
    "k2": (lambda: kl_penalty(NEW, REF, "k2"), [0.058568, 0.052905, 0.025623]),
    "k3": (lambda: kl_penalty(NEW, REF, "k3"), [0.053030, 0.048344, 0.023201]),
    "sft": (lambda: sft_loss(NEW), [0.791429, 0.730208]),
    "token_truncated_to_2": (lambda: corrected("token_truncate", 0, 2), [0.175697, 0.086424, 0.076867]),
    "token_masked_to_half_and_2": (lambda: corrected("token_mask", 0.5, 2), [0.027450, -0.014821, 0.012009]),
    "sequence_truncated_to_2": (lambda: corrected("sequence_truncate", 0, 2), [0.403799, 0.255107, 0.176662]),
    "sequence_masked_to_half_and_2": (
        lambda: corrected("sequence_mask", 0.5, 2),
        [-0.062127, -0.061960, -0.027181],
    ),
}


@pytest.mark.parametrize(("loss", "expected"), WORKED_LOSSES.values(), ids=WORKED_LOSSES)
def test_losses_equal_the_worked_numbers_under_every_norm(loss, expected):
    """sum(weight * loss) is the published objective for the token mean, the sequence mean and the constant."""
    found = [(weights_of(norm) * loss()).sum() for norm in NORMS]
    assert_six_decimals(found[: len(expected)], expected)


WORKED_OBJECTIVES = {
    "grpo": (TRL, "token", PPO, 0.04, "sequence_mean", 0.034030),
    "dapo": (GRPO, "token", CLIP_HIGHER, 0.0, "token_mean", 0.151270),
    "rloo": (RLOO, "sequence_sum", PPO, 0.0, "sequence_mean", 0.042918),
}


@pytest.mark.parametrize(
    ("estimator", "level", "bounds", "kl_coef", "norm", "expected"),
    WORKED_OBJECTIVES.values(),
    ids=WORKED_OBJECTIVES,
)
def test_whole_objectives_equal_the_worked_numbers(estimator, level, bounds, kl_coef, norm, expected):
    """The options of the script compose to GRPO, DAPO, Dr.GRPO and RLOO."""
    loss = clipped(bounds, level, estimator=estimator) + kl_coef * kl_penalty(NEW, REF, "k3")
    assert_six_decimals((weights_of(norm) * loss).sum(), expected)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (
            "token",
            [
                [1.105171, 0.778801, 1.349859],
                [0.670320, 1.051271, 1.822119, 0.904837, 1.221403],
                [1.000000, 1.020201],
                [1.419068, 0.860708, 1.051271, 3.320117],
            ],
        ),
        ("sequence_mean", [[1.051271] * 3, [1.072508] * 5, [1.010050] * 2, [1.436917] * 4]),
        ("sequence_sum", [[1.161834] * 3, [1.419068] * 5, [1.020201] * 2, [4.263115] * 4]),
    ],
)
def test_ratios_equal_the_worked_numbers(level, expected):
    """A ratio is each token's own, or its sequence's at each of its tokens; of equal logprobs it is exactly 1."""
    assert_six_decimals(ratio_of(level=level), flat(expected))
    assert torch.equal(ratio_of(NEW, NEW, level), torch.ones_like(NEW))


@pytest.mark.parametrize(
    ("correction", "low", "high", "expected"),
    [
        ("token_truncate", 0, math.inf, RHO),
        ("token_truncate", 0.5, 2, [min(max(rho, 0.5), 2) for rho in RHO]),
        ("token_mask", 0.5, 2, [rho if 0.5 <= rho <= 2 else 0 for rho in RHO]),
        ("sequence_truncate", 0, math.inf, spread(double(SEQUENCE_RHO)).tolist()),
        ("sequence_truncate", 0.5, 2, spread(double([0.970446, 2, 1, 0.5])).tolist()),
        ("sequence_mask", 0.5, 2, spread(double([0.970446, 0, 1, 0])).tolist()),
    ],
)
def test_importance_weights_equal_the_worked_numbers(correction, low, high, expected):
    """Truncation keeps with the weight of the bound, masking removes; a weight of exactly 1 is exactly 1.

    Pitfall 36: rho is a constant although its logprobs are not.
    """
    old, sampled = OLD.clone().requires_grad_(), SAMPLED.clone().requires_grad_()
    weights = importance_weights(old, sampled, correction=correction, low=low, high=high, lengths=LENGTHS)
    assert not weights.requires_grad
    assert_six_decimals(weights, expected)
    alike = importance_weights(OLD, OLD, correction=correction, low=1.0, high=1.0, lengths=LENGTHS)
    assert torch.equal(alike, torch.ones_like(OLD))


def test_k3_keeps_its_digits_for_nearly_equal_policies():
    """k3 of a tiny difference in fp32 is its square over two, not a rounding error."""
    ref = torch.full((1000,), -1.0)
    new = ref + torch.linspace(1e-3, 2e-3, 1000)
    k3 = kl_penalty(new, ref, "k3")
    d = (new - ref).double()
    torch.testing.assert_close(k3.double(), torch.expm1(-d) + d, rtol=0, atol=2e-10)


WORKED_GRADIENTS = {
    "ppo": (
        lambda new: clipped(PPO, new=new),
        "token_mean",
        [
            [-0.029603, -0.020861, 0],
            [0, 0.046932, 0.081345, 0.040395, 0.054527],
            [0.008929, 0.009109],
            [0, -0.023055, -0.028159, 0],
        ],
    ),
    "gspo": (
        lambda new: clipped(PPO, "sequence_mean", new=new),
        "sequence_mean",
        [[-0.032852] * 3, [0.033516] * 5, [0.015782] * 2, [0] * 4],
    ),
    "cispo": (
        lambda new: cispo(CAP, new=new),
        "token_mean",
        [
            [-0.029603, -0.020861, -0.034821],
            [0.029925, 0.046932, 0.058036, 0.040395, 0.054527],
            [0.008929, 0.009109],
            [-0.034821, -0.023055, -0.028159, -0.034821],
        ],
    ),
}


@pytest.mark.parametrize(("loss", "norm", "expected"), WORKED_GRADIENTS.values(), ids=WORKED_GRADIENTS)
def test_gradients_equal_the_worked_numbers(loss, norm, expected):
    """Clipped tokens get no gradient of the clipped loss, the others -weight * A * r; CISPO silences no token."""
    assert_six_decimals(gradient(lambda new: (weights_of(norm) * loss(new)).sum())[0], flat(expected))


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),
    [
        (1, 1.5, -1.2, 0.0),
        (1, 0.5, -0.5, -0.5),
        (-1, 0.5, 0.8, 0.0),
        (-1, 1.5, 1.5, 1.5),
        (-1, 5, 5, 5),
        (0, 5, 0.0, 0.0),
    ],
)
def test_single_token_truth_table_of_the_clip(advantage, ratio, loss, slope):
    """Pitfall 37: the clip removes the incentive to move further, and only that."""
    grad, value = gradient(
        lambda new: clipped_policy_loss(new.exp(), double([advantage]), **PPO).sum(),
        double([math.log(ratio)]),
    )
    assert_six_decimals(value, loss)
    assert_six_decimals(grad, [slope])


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(
    ("bounds", "ratio", "weight"),
    [
        ({"clip_low": 1.0, "clip_high": 4.0}, 6.0, 5.0),
        ({"clip_low": 1.0, "clip_high": 4.0}, 0.01, 0.01),
        (PPO, 0.5, 0.8),
        (PPO, 1.5, 1.2),
    ],
)
def test_cispo_bounds_are_relative_to_one_and_ignore_the_sign(bounds, ratio, weight, advantage):
    """Pitfall 37: clip_high 4 caps the weight at 5, clip_low 1 bounds it by 0; the gradient is -weight * A."""
    grad, value = gradient(
        lambda new: cispo_loss(new, new - new.detach() + ratio, double([advantage]), **bounds).sum(),
        double([-0.3]),
    )
    assert_six_decimals(grad, [-weight * advantage])
    assert_six_decimals(value, 0.3 * weight * advantage)


@pytest.mark.parametrize("bounds", [PPO, CLIP_HIGHER, {"clip_low": 0.1, "clip_high": 0.5}])
def test_exactly_the_clipped_tokens_have_no_gradient(bounds):
    """`is_clipped` says of random tokens just what autograd does."""
    generator = torch.Generator().manual_seed(0)
    log_ratio, advantages = torch.randn(2, 500, generator=generator, dtype=torch.float64)
    grad, _ = gradient(lambda x: clipped_policy_loss(x.exp(), advantages, **bounds).sum(), log_ratio)
    low, high = is_clipped(log_ratio.exp(), advantages, **bounds)
    assert torch.equal(grad == 0, low | high)
    assert low.any()
    assert high.any()
    assert (log_ratio[low] < 0).all()
    assert (log_ratio[high] > 0).all()


@pytest.mark.parametrize(
    ("old", "is_corrected"), [(NEW, True), (SAMPLED, False)], ids=["decoupled", "ratio_to_the_sampler"]
)
def test_total_weight_on_old_equal_new_is_exactly_rho(old, is_corrected):
    """Pitfall 39: rho is applied once, by the weights or by the ratio: the gradient is -A rho, never -A rho^2."""
    rho = (NEW - SAMPLED).exp()

    def objective(new):
        loss = clipped_policy_loss(ratio_of(new, old), advantages_of(), clip_low=1.0, clip_high=99.0)
        if is_corrected:
            bounds = {"correction": "token_truncate", "low": 0.0, "high": math.inf}
            loss = loss * importance_weights(old, SAMPLED, lengths=LENGTHS, **bounds)
        return loss.sum()

    grad, _ = gradient(objective)
    torch.testing.assert_close(grad, -advantages_of() * rho, rtol=1e-14, atol=0)


@pytest.mark.parametrize("level", RATIO_LEVELS)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_tokens_outside_the_loss_change_nothing(level, correction):
    """Pitfall 42: prompts, and a sequence of nothing else, are zeros: no NaN, the same losses, the same gradient."""
    lengths = [n + 2 for n in LENGTHS] + [3]
    mask = torch.cat([*(torch.arange(n + 2) >= 2 for n in LENGTHS), torch.zeros(3).bool()])

    def padded(x):
        return torch.zeros(len(mask), dtype=x.dtype).masked_scatter(mask, x)

    def objective(new, lengths, mask, streams):
        old, ref, sampled, advantages, weights = streams
        ratio = importance_ratio(new, old, level=level, lengths=lengths, loss_mask=mask)
        loss = clipped_policy_loss(ratio, advantages, **PPO) + cispo_loss(new, ratio, advantages, **CAP)
        loss = loss * importance_weights(
            old, sampled, lengths=lengths, correction=correction, low=0.5, high=2.0
        )
        loss = loss + sum(kl_penalty(new, ref, estimator) for estimator in KL_ESTIMATORS)
        return (weights * (loss + sft_loss(new))).sum()

    streams = (OLD, REF, SAMPLED, advantages_of(), weights_of("sequence_mean"))
    alone, value = gradient(lambda new: objective(new, LENGTHS, torch.ones(14).bool(), streams))
    among = [padded(x) for x in streams]
    grad, total = gradient(lambda new: objective(padded(new), lengths, mask, among))
    torch.testing.assert_close((total, grad), (value, alone), rtol=0, atol=1e-14)


def test_no_sequences_give_no_tokens():
    """A rank whose share of a step is empty calls the same functions on streams of length 0.

    It also calls backward, for it must meet the others in the collectives.
    """
    empty = double([])
    assert sequence_sums(empty, []).shape == (0,)
    for level in RATIO_LEVELS:
        ratio = ratio_of(empty.clone().requires_grad_(), empty, level, [])
        assert ratio.shape == (0,)
        assert ratio.requires_grad
    for correction in CORRECTIONS:
        weights = importance_weights(empty, empty, correction=correction, low=0, high=2, lengths=[])
        assert weights.shape == (0,)


@pytest.mark.parametrize("advantage", [1.0, 0.0])
@pytest.mark.parametrize("level", ["sequence_mean", "sequence_sum"])
def test_long_completion_that_moved_far_is_clipped_without_nan(level, advantage):
    """Pitfall 42: 0.1 nats at each of 2,000 fp32 tokens are a ratio of e^200; where the clip acts the gradient is 0.

    Fault 31.
    """
    advantages, old = torch.full((2000,), advantage), torch.full((2000,), -0.5)
    bounds = {"clip_low": 0.05, "clip_high": 0.05}
    grad, value = gradient(
        lambda new: clipped_policy_loss(ratio_of(new, old, level, [2000]), advantages, **bounds).mean(),
        old + 0.1,
    )
    assert_six_decimals(value, -1.05 * advantage)
    assert torch.equal(grad, torch.zeros(2000))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: group_advantages(REWARDS, baseline="mean", norm="std"),
            r"'std'.*none, group_std, batch_std",
        ),
        (
            lambda: group_advantages(REWARDS, baseline="greedy", norm="none"),
            r"'greedy'.*mean, leave_one_out, none",
        ),
        (lambda: weights_of("mean"), r"'mean'.*token_mean, sequence_mean, constant"),
        (lambda: kl_penalty(NEW, REF, "k4"), r"'k4'.*k1, k2, k3"),
        (lambda: ratio_of(level="sequence"), r"'sequence'.*token, sequence_mean, sequence_sum"),
        (
            lambda: corrected("token", 0, 2),
            r"'token'.*token_truncate, token_mask, sequence_truncate, sequence_mask",
        ),
    ],
)
def test_unknown_names_are_refused_with_the_choices(call, message):
    """A misspelt name stops with its value and the names that exist."""
    with pytest.raises(ValueError, match=message):
        call()


THETA, CATEGORY_REF = double([0.5, -0.2, 0.1]), double([-0.1, 0.3, 0.0]).log_softmax(0)
REVERSE, FORWARD = [0.187713, -0.158869, -0.028844], [0.183478, -0.185574, 0.002096]


def expected_kl_loss(theta, term):
    """The expectation over theta's own samples of a KL term: an estimator as a loss, or k1 in the reward."""
    new = theta.log_softmax(0)
    if term == "k1_in_reward":
        advantages = -kl_penalty(new.detach(), CATEGORY_REF, "k1")
        loss = clipped_policy_loss((new - new.detach()).exp(), advantages, **PPO)
    else:
        loss = kl_penalty(new, CATEGORY_REF, term)
    return (new.detach().exp() * loss).sum()


@pytest.mark.parametrize(
    ("term", "expected"),
    [("k1", [0.0, 0.0, 0.0]), ("k2", REVERSE), ("k3", FORWARD), ("k1_in_reward", REVERSE)],
)
def test_expected_kl_gradients_over_three_categories(term, expected):
    """Pitfall 35, by enumeration: k1 as a loss does nothing, k2 descends KL(policy || ref), k3 KL(ref || policy)."""
    grad, _ = gradient(lambda theta: expected_kl_loss(theta, term), THETA)
    assert_six_decimals(grad, expected)


VALUES, NEW_VALUES = double([0.5, 0.4, 0.6, 0.8]), double([0.9, 0.35, 0.2, 1.1])
RETURNS = double([1.027475, 1.060500, 1.190000, 1.000000])


def test_value_loss_equals_the_worked_numbers():
    """Half the greater of the two squared errors; without a clip half the plain one."""
    values = NEW_VALUES, VALUES, RETURNS
    assert_six_decimals(value_loss(*values, clip=0.2), [0.053620, 0.252405, 0.490050, 0.005000])
    assert_six_decimals(value_loss(*values, clip=0.0), [0.008125, 0.252405, 0.490050, 0.005000])
    assert is_value_clipped(*values, clip=0.2).tolist() == [True, False, False, False]


@pytest.mark.parametrize("clip", [0.0, 0.2, 1.0])
def test_exactly_the_clipped_values_have_no_gradient(clip):
    """`is_value_clipped` says of random tokens just what autograd does; the other gradients are the plain error."""
    generator = torch.Generator().manual_seed(0)
    values, old_values, returns = torch.randn(3, 500, generator=generator, dtype=torch.float64)
    grad, _ = gradient(lambda x: value_loss(x, old_values, returns, clip=clip).sum(), values)
    is_clipped_here = is_value_clipped(values, old_values, returns, clip=clip)
    torch.testing.assert_close(grad, torch.where(is_clipped_here, 0.0, values - returns), rtol=1e-14, atol=0)
    assert bool(is_clipped_here.any()) == bool(clip)


bradley_terry_loss = runpy.run_path(str(ROOT / "docs/examples/reward_model.py"))["bradley_terry_loss"]


@pytest.mark.parametrize(
    ("chosen", "rejected", "options", "losses", "slopes"),
    [
        ([1.2, -0.3], [0.4, 0.5], {}, [0.371101, 1.171101], [-0.310026, -0.689974]),
        ([1.2, -0.3], [0.4, 0.5], {"margin": 0.5}, [0.554355, 1.541008], [-0.425557, -0.785835]),
        ([1.2, -0.3], [0.4, 0.5], {"center_coef": 0.01}, [0.396701, 1.171501], [-0.278026, -0.685974]),
        ([-100.0], [900.0], {}, [1000.0], [-1.0]),
    ],
)
def test_bradley_terry_losses_and_gradients_equal_the_worked_numbers(
    chosen, rejected, options, losses, slopes
):
    """-log sigmoid of the difference, a margin that asks for more, scores kept around 0; far apart nothing overflows.

    The gradient is that of the chosen scores.
    """
    scores = double(chosen), double(rejected)
    assert_six_decimals(bradley_terry_loss(*scores, **options), losses)
    grad, _ = gradient(lambda x: bradley_terry_loss(x, scores[1], **options).sum(), scores[0])
    assert_six_decimals(grad, slopes)


NO_STD, ALL = {"advantage_norm": "none"}, [1] * 6
DIFFERENT, HAS_SCORE = [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("flags", "greedy", "expected"),
    [
        # Rollouts of equal rewards, and those without a weight, are left out.
        ({}, None, DIFFERENT),
        (NO_STD, None, DIFFERENT),
        ({"policy_loss": "cispo"}, None, DIFFERENT),
        # Rollouts of equal rewards may all be better than another baseline.
        ({"baseline": "greedy", **NO_STD}, [[0.0], [0.0], [1.0]], [1, 0, 1, 1, 0, 0]),
        ({"baseline": "none", **NO_STD}, None, [1, 0, 1, 1, 1, 0]),
        # A term that teaches without an advantage.
        ({"kl_coef": 1e-3}, None, HAS_SCORE),
        ({"entropy_coef": 1e-3}, None, HAS_SCORE),
        # Statistics over all tokens of the step leave none out.
        ({"advantage_norm": "whiten"}, None, ALL),
        ({"kl_reward_coef": 1e-3, "baseline": "none", **NO_STD}, None, ALL),
    ],
    ids=str,
)
def test_the_script_trains_on_what_can_teach(flags, greedy, expected):
    """Of three pairs of rollouts: rewards differ, are equal, or one is missing."""
    groups = groups_of(double([[1.0, 0.0], [0.1, 0.1], [1.0, math.nan]]), greedy=greedy and double(greedy))
    config = train_grpo.Config(**flags)
    is_skipped = train_grpo.can_skip(config, groups, train_grpo.rollout_weights(config, groups, 8))
    assert (~is_skipped).int().flatten().tolist() == expected


@pytest.mark.parametrize(
    ("term", "is_refused"),
    [
        (lambda new, entropy: 0.0, False),
        (lambda new, entropy: 0.1 * (0.5 - entropy).relu(), True),
        (lambda new, entropy: -0.01 * new, True),
    ],
    ids=["none", "hinge", "cross-entropy"],
)
def test_a_gradient_on_rollouts_that_the_script_skips_is_refused(term, is_refused):
    """Wherever the term has it, as a hinge on the entropy has, only where it is low."""
    mask = torch.tensor([False, True] * 3)
    entropy = torch.tensor([0.0, 0.2, 0.0, 0.9, 0.0, 0.3], requires_grad=True)
    new = torch.zeros(6, requires_grad=True)
    advantages = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    micro = Batch((2, 2, 2), torch.arange(6), mask, rollout=torch.tensor([1, 0, 2]))
    objective = (mask * (-advantages * new + term(new, entropy))).sum()
    refusal = pytest.raises(InputError, match="can_skip: skips rollouts")
    with refusal if is_refused else nullcontext():
        refuse_gradient(objective, new, entropy, micro, torch.tensor([True, False, True]))
    objective.backward()  # the graph is still there


@pytest.mark.parametrize("script", [train_grpo, train_ppo], ids=lambda script: script.__name__)
@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
def test_without_an_entropy_bonus_the_loss_does_not_depend_on_entropies(script, entropy_coef):
    """So autograd gives the head no gradient for them, zeros neither, and the head does not compute with it."""
    zeros = torch.zeros(3)
    batch = Batch((3,), torch.arange(3), torch.arange(3) > 0, advantages=zeros + 1, old_logprobs=zeros)
    new, entropy = zeros.clone().requires_grad_(), torch.ones(3, requires_grad=True)
    loss, _ = script.token_loss(script.Config(entropy_coef=entropy_coef), batch, new, entropy)
    (gradient,) = torch.autograd.grad(loss.sum(), entropy, allow_unused=True)
    assert (gradient is None) == (entropy_coef == 0)
