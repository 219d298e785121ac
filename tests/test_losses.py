"""Losses, ratios and corrections against the worked numbers of four packed responses.

The responses follow prompts of two tokens and are packed with a sequence without sampled tokens, so every number and
gradient also holds next to tokens outside the loss.
"""

import math
import runpy

import pytest
import torch

import train_grpo
from minirl.training.advantages import group_advantages
from minirl.training.batch import Batch, sequence_infos_from_lengths
from minirl.training.kl import kl_penalty
from minirl.training.losses import (
    cispo_loss,
    clipped_policy_loss,
    importance_ratio,
    importance_weights,
    loss_weights,
    value_loss,
)
from support.jobs import ROOT
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

MASK = torch.cat([*(torch.arange(n + 2) >= 2 for n in LENGTHS), torch.zeros(3).bool()])
WITH_PROMPTS = [*(n + 2 for n in LENGTHS), 3]


def packed(values):
    """Return a stream with these numbers at the 14 sampled tokens, and 0 elsewhere."""
    stream = torch.zeros(len(MASK), dtype=torch.float64)
    stream[MASK] = torch.as_tensor(values, dtype=torch.float64)
    return stream


def spread(per_sequence):
    return packed(per_sequence.repeat_interleave(torch.tensor(LENGTHS)))


OLD = packed(
    [-0.50, -1.20, -0.80, -0.90, -0.10, -2.00, -0.40, -1.50, -0.70, -0.05, -1.10, -0.60, -0.20, -3.00]
)
SAMPLED = packed(
    [-0.52, -1.15, -0.80, -0.88, -0.12, -2.90, -0.40, -1.45, -0.70, -0.05, -1.12, -0.58, -0.20, -2.20]
)
NEW = packed(
    [-0.40, -1.45, -0.50, -1.30, -0.05, -1.40, -0.50, -1.30, -0.70, -0.03, -0.75, -0.75, -0.15, -1.80]
)
REF = packed(
    [-0.60, -1.00, -0.90, -1.00, -0.30, -1.80, -0.70, -1.60, -0.65, -0.10, -1.00, -0.50, -0.30, -2.60]
)
NORMS = ("token_mean", "sequence_mean", "constant")

PPO = {"clip_low": 0.2, "clip_high": 0.2}
CLIP_HIGHER = {"clip_low": 0.2, "clip_high": 0.28}
GSPO = {"clip_low": 3e-4, "clip_high": 4e-4}
CAP = {"clip_low": 1.0, "clip_high": 0.3}  # at most 1.3, no lower bound


def weights_of(norm):
    return spread(loss_weights(torch.tensor(LENGTHS), norm=norm, constant=8, keep=double([1] * 4)))


def advantages_of(estimator=DR_GRPO):
    return spread(group_advantages(REWARDS, **estimator)[0])


def ratio_of(new, old=OLD, level="token"):
    return importance_ratio(new, old, level=level, lengths=WITH_PROMPTS, loss_mask=MASK)


def clipped(new, bounds, level="token", estimator=DR_GRPO):
    return clipped_policy_loss(ratio_of(new, level=level), advantages_of(estimator), **bounds)


def cispo(new, bounds):
    return cispo_loss(new, ratio_of(new), advantages_of(), **bounds)


def corrected(new, correction, low, high):
    rho = importance_weights(OLD, SAMPLED, correction=correction, low=low, high=high, lengths=WITH_PROMPTS)
    return rho * clipped(new, PPO)


def gradient(objective, new=NEW):
    """Return the gradient and the value of `objective(new)`."""
    new = new.clone().requires_grad_()
    value = objective(new)
    value.backward()
    return new.grad, value.detach()


def paper_grpo(new):
    return clipped(new, PPO, estimator=TRL) + 0.04 * kl_penalty(new, REF, "k3")


WORKED = {
    "ppo": (lambda x: clipped(x, PPO), [0.078844, 0.015368, 0.034494]),
    "clip_higher": (lambda x: clipped(x, CLIP_HIGHER), [0.072415, 0.009118, 0.031682]),
    "gspo": (lambda x: clipped(x, GSPO, "sequence_mean"), [0.069861, 0.011568, 0.030564]),
    "cispo_cap": (lambda x: cispo(x, CAP), [-0.050295, 0.005015, -0.022004]),
    "cispo_two_bounds": (lambda x: cispo(x, PPO), [-0.057675, -0.001588, -0.025233]),
    "k1": (lambda x: kl_penalty(x, REF, "k1"), [0.140714, 0.116875, 0.061563]),
    "k2": (lambda x: kl_penalty(x, REF, "k2"), [0.058568, 0.052905, 0.025623]),
    "k3": (lambda x: kl_penalty(x, REF, "k3"), [0.053030, 0.048344, 0.023201]),
    "token_truncated": (lambda x: corrected(x, "token_truncate", 0, 2), [0.175697, 0.086424, 0.076867]),
    "token_clamped": (lambda x: corrected(x, "token_truncate", 0.5, 5), [0.211454]),
    "token_masked": (lambda x: corrected(x, "token_mask", 0.5, 2), [0.027450, -0.014821, 0.012009]),
    "sequence_truncated": (lambda x: corrected(x, "sequence_truncate", 0, 2), [0.403799, 0.255107, 0.176662]),
    "sequence_masked": (lambda x: corrected(x, "sequence_mask", 0.5, 2), [-0.062127, -0.061960, -0.027181]),
    # Whole objectives.
    "grpo": (paper_grpo, [None, 0.034030]),
    "dapo": (lambda x: clipped(x, CLIP_HIGHER, estimator=GRPO), [0.151270]),
    "rloo": (lambda x: clipped(x, PPO, "sequence_sum", RLOO), [None, 0.042918]),
}


@pytest.mark.parametrize(("loss", "expected"), WORKED.values(), ids=WORKED)
def test_losses_equal_the_worked_numbers_under_every_norm(loss, expected):
    """sum(weight * loss) is the published objective for the token mean, the sequence mean and the constant."""
    for norm, number in zip(NORMS, expected, strict=False):
        if number is not None:
            assert_six_decimals((weights_of(norm) * loss(NEW)).sum(), number)


WORKED_GRADIENTS = {
    "ppo": (
        lambda x: clipped(x, PPO),
        "token_mean",
        [
            [-0.029603, -0.020861, 0],
            [0, 0.046932, 0.081345, 0.040395, 0.054527],
            [0.008929, 0.009109],
            [0, -0.023055, -0.028159, 0],
        ],
    ),
    "gspo": (
        lambda x: clipped(x, PPO, "sequence_mean"),
        "sequence_mean",
        [[-0.032852] * 3, [0.033516] * 5, [0.015782] * 2, [0] * 4],
    ),
    "cispo": (
        lambda x: cispo(x, CAP),
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
    """Clipped tokens get no gradient from the clipped loss, other tokens -weight * A * r. CISPO keeps all gradients.

    Pitfalls 37 and 42.
    """
    grad, _ = gradient(lambda new: (weights_of(norm) * loss(new)).sum())
    assert_six_decimals(grad[MASK], flat(expected))


@pytest.mark.parametrize("is_corrected", [True, False], ids=["decoupled", "ratio_to_the_sampler"])
def test_total_weight_on_old_equal_new_is_exactly_rho(is_corrected):
    """Rho is applied once, by the ratio or by importance weights, which carry no gradient.

    The gradient is -A rho, never -A rho^2. Pitfalls 36 and 39.
    """

    def objective(new):
        old = new if is_corrected else SAMPLED
        ratio = ratio_of(new, old.detach())
        loss = clipped_policy_loss(ratio, advantages_of(), clip_low=1.0, clip_high=99.0)
        rho = importance_weights(
            old, SAMPLED, lengths=WITH_PROMPTS, correction="token_truncate", high=math.inf
        )
        return (loss * rho).sum()

    rho = (NEW - SAMPLED).exp()
    torch.testing.assert_close(gradient(objective)[0], -advantages_of() * rho, rtol=1e-14, atol=0)


def test_by_default_a_gap_of_the_sampled_logprobs_is_corrected_and_without_one_no_bit_changes():
    """Pitfall 60."""

    def loss(sampled, correction="auto"):
        config = train_grpo.Config(correction=correction)
        sequences, streams = sequence_infos_from_lengths(WITH_PROMPTS), {"advantages": advantages_of()}
        micro = Batch(sequences, MASK, MASK, sampled, old_logprobs=OLD, **streams)
        return train_grpo.token_loss(config, micro, NEW, OLD)[0].tolist()

    assert loss(SAMPLED) == loss(SAMPLED, "token_truncate") != loss(SAMPLED, "none")
    assert loss(OLD) == loss(OLD, "none")


@pytest.mark.parametrize("level", ["token", "sequence_mean", "sequence_sum"])
def test_a_long_completion_that_moved_far_is_clipped_without_nan(level):
    """0.1 nats at each of 2,000 fp32 tokens give a ratio of e^200; clipped tokens have gradient 0. Fault 31, pitfall
    42.

    The KL term k3 is limited like the ratio if the reference's probability is e^200 times the policy's. Without a
    sequence, the empty loss still has a gradient.
    """
    old, bounds = torch.full((2000,), -0.5), {"clip_low": 0.05, "clip_high": 0.05}

    def loss(new, lengths, advantage=1.0):
        mask = torch.ones(len(new), dtype=torch.bool)
        ratio = importance_ratio(new, old[: len(new)], level=level, lengths=lengths, loss_mask=mask)
        k3 = kl_penalty(new - 200, old[: len(new)], "k3")
        return (clipped_policy_loss(ratio, torch.full((len(new),), advantage), **bounds) + 0 * k3).sum()

    for advantage in (1.0, 0.0):
        grad, value = gradient(lambda new: loss(new, [2000], advantage), old + 0.1)  # noqa: B023
        assert value / 2000 == pytest.approx(-1.05 * advantage)
        assert torch.equal(grad, torch.zeros(2000))
    assert gradient(lambda new: loss(new, []), torch.zeros(0))[0].shape == (0,)


THETA, CATEGORY_REF = double([0.5, -0.2, 0.1]), double([-0.1, 0.3, 0.0]).log_softmax(0)
REVERSE, FORWARD = [0.187713, -0.158869, -0.028844], [0.183478, -0.185574, 0.002096]


def expected_kl_loss(theta, term):
    """Return the expectation of a KL term over theta's samples: an estimator as a loss, or k1 in the reward."""
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
    """k1 as a loss has no effect, k2 descends KL(policy || ref), and k3 descends KL(ref || policy). Pitfall 35.

    In the reward, like a teacher's logprobs, k1 descends KL(policy || ref).
    """
    grad, _ = gradient(lambda theta: expected_kl_loss(theta, term), THETA)
    assert_six_decimals(grad, expected)


@pytest.mark.parametrize(("clip", "first"), [(0.2, 0.053620), (0.0, 0.008125)])
def test_value_losses_equal_the_worked_numbers(clip, first):
    """The loss is half the larger squared error; without a clip, half the plain one. Clipped values get gradient 0."""
    values, old_values = double([0.9, 0.35, 0.2, 1.1]), double([0.5, 0.4, 0.6, 0.8])
    returns = double([1.027475, 1.060500, 1.190000, 1.000000])
    found = value_loss(values, old_values, returns, clip=clip)
    assert_six_decimals(found, [first, 0.252405, 0.490050, 0.005000])
    grad, _ = gradient(lambda x: value_loss(x, old_values, returns, clip=clip).sum(), values)
    is_clipped = torch.tensor([clip > 0, False, False, False])
    assert_six_decimals(grad, torch.where(is_clipped, 0.0, values - returns))


bradley_terry_loss = runpy.run_path(str(ROOT / "docs/examples/reward_model.py"))["bradley_terry_loss"]


@pytest.mark.parametrize(
    ("chosen", "rejected", "options", "losses", "slopes"),
    [
        ([1.2, -0.3], [0.4, 0.5], {"margin": 0.5}, [0.554355, 1.541008], [-0.425557, -0.785835]),
        ([-100.0], [900.0], {}, [1000.0], [-1.0]),
    ],
)
def test_bradley_terry_losses_equal_the_worked_numbers(chosen, rejected, options, losses, slopes):
    """A margin increases the loss, and distant scores do not overflow. Gradients are with respect to chosen scores."""
    scores = double(chosen), double(rejected)
    assert_six_decimals(bradley_terry_loss(*scores, **options), losses)
    grad, _ = gradient(lambda x: bradley_terry_loss(x, scores[1], **options).sum(), scores[0])
    assert_six_decimals(grad, slopes)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        # Rollouts with equal rewards or without a loss weight are skipped.
        ({}, [1, 1, 0, 0, 0, 0]),
        # Rollouts with equal rewards may all exceed another baseline.
        ({"baseline": "greedy", "advantage_norm": "none"}, [1, 0, 1, 1, 0, 0]),
        # The KL term has a gradient without an advantage.
        ({"kl_coef": 1e-3}, [1, 1, 1, 1, 1, 0]),
        # Whitening depends on all tokens of the step, so no rollout is skipped.
        ({"advantage_norm": "whiten"}, [1] * 6),
    ],
    ids=str,
)
def test_the_script_trains_on_what_can_teach(flags, expected):
    """Rewards differ in the first pair of rollouts and are equal in the second; the third pair lacks one."""
    rewards = double([[1.0, 0.0], [0.1, 0.1], [1.0, math.nan]])
    groups = groups_of(rewards, greedy=double([[0.0], [0.0], [1.0]]))
    config = train_grpo.Config(**flags)
    is_skipped = train_grpo.skippable_rollouts(
        config, groups, train_grpo.rollout_loss_weights(config, groups, 8)
    )
    assert (~is_skipped).int().flatten().tolist() == expected
