"""Policy losses and KL estimators against the worked numbers of four packed responses."""

import itertools
import math

import pytest
import torch

from minirl.advantages import group_advantages, loss_weights
from minirl.losses import KL_ESTIMATORS, clipped_policy_loss, is_clipped, kl_penalty

LENGTHS = (3, 5, 2, 4)
REWARDS = [1.0, 0.0, 0.5, 1.0]
OLD = [-0.50, -1.20, -0.80, -0.90, -0.10, -2.00, -0.40, -1.50, -0.70, -0.05, -1.10, -0.60, -0.20, -3.00]
NEW = [-0.40, -1.45, -0.50, -1.30, -0.05, -1.40, -0.50, -1.30, -0.70, -0.03, -0.75, -0.75, -0.15, -1.80]
REF = [-0.60, -1.00, -0.90, -1.00, -0.30, -1.80, -0.70, -1.60, -0.65, -0.10, -1.00, -0.50, -0.30, -2.60]
PPO = {"clip_low": 0.2, "clip_high": 0.2}
CLIP_HIGHER = {"clip_low": 0.2, "clip_high": 0.28}
NORMS = ("token_mean", "sequence_mean", "constant")


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def per_token(per_sequence, lengths=LENGTHS):
    return per_sequence.repeat_interleave(torch.tensor(lengths))


def weights_of(norm, lengths=LENGTHS):
    return per_token(loss_weights(torch.tensor(lengths), norm=norm, constant=8), lengths)


def advantages_of(norm="mean", eps=1e-6):
    return per_token(group_advantages(double([REWARDS]), norm=norm, eps=eps)[0])


def assert_six_decimals(actual, expected):
    torch.testing.assert_close(torch.as_tensor(actual, dtype=torch.float64), double(expected), rtol=0, atol=6e-7)


@pytest.mark.parametrize(
    ("clip", "advantages", "expected"),
    [
        (PPO, advantages_of(), [0.078844, 0.015368, 0.034494]),
        (CLIP_HIGHER, advantages_of(), [0.072415, 0.009118, 0.031682]),
        (PPO, advantages_of("mean_std"), [0.164699, 0.032103, 0.072056]),
    ],
    ids=["ppo", "clip_higher", "ppo_with_grpo_advantages"],
)
def test_clipped_losses_equal_the_worked_numbers_under_every_norm(clip, advantages, expected):
    """sum(weight * loss) is the published objective for the token mean, the sequence mean and the constant."""
    loss = clipped_policy_loss(double(NEW), double(OLD), advantages, **clip)
    assert_six_decimals([float((weights_of(norm) * loss).sum()) for norm in NORMS], expected)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [0.140714, 0.116875, 0.061563]),
        ("k2", [0.058568, 0.052905, 0.025623]),
        ("k3", [0.053030, 0.048344, 0.023201]),
    ],
)
def test_kl_estimates_equal_the_worked_numbers_under_every_norm(estimator, expected):
    """k1, k2 and k3 are signed and measured from the policy to the reference."""
    estimate = kl_penalty(double(NEW), double(REF), estimator)
    assert_six_decimals([float((weights_of(norm) * estimate).sum()) for norm in NORMS], expected)


def test_k3_of_each_token_equals_the_worked_numbers():
    """k3 is exact token by token and never negative."""
    k3 = kl_penalty(double(NEW), double(REF), "k3")
    expected = [0.018731, 0.118312, 0.070320, 0.049859, 0.028801, 0.070320, 0.018731]
    expected += [0.040818, 0.001271, 0.002394, 0.028801, 0.034025, 0.010708, 0.249329]
    assert_six_decimals(k3, expected)
    assert (k3 >= 0).all()


def test_k3_keeps_its_digits_for_nearly_equal_policies():
    """k3 of a tiny difference in fp32 is its square over two, not a rounding error."""
    ref = torch.full((1000,), -1.0)
    new = ref + torch.linspace(1e-3, 2e-3, 1000)
    k3 = kl_penalty(new, ref, "k3")
    d = (new - ref).double()
    torch.testing.assert_close(k3.double(), torch.expm1(-d) + d, rtol=0, atol=2e-10)


@pytest.mark.parametrize(
    ("advantages", "clip", "kl_coef", "norm", "expected"),
    [
        (advantages_of("mean_std", eps=1e-4), PPO, 0.04, "sequence_mean", 0.034030),
        (advantages_of("mean_std", eps=1e-6), CLIP_HIGHER, 0.0, "token_mean", 0.151270),
        (advantages_of("mean"), PPO, 0.0, "constant", 0.034494),
    ],
    ids=["grpo", "dapo", "dr_grpo"],
)
def test_whole_objectives_equal_the_worked_numbers(advantages, clip, kl_coef, norm, expected):
    """The options of the script compose to GRPO, DAPO and Dr.GRPO."""
    loss = clipped_policy_loss(double(NEW), double(OLD), advantages, **clip)
    loss = loss + kl_coef * kl_penalty(double(NEW), double(REF), "k3")
    assert_six_decimals(float((weights_of(norm) * loss).sum()), expected)


def test_gradient_of_the_clipped_loss_equals_the_worked_numbers():
    """Clipped tokens get no gradient, the others -weight * A * r."""
    new = double(NEW).requires_grad_()
    (weights_of("token_mean") * clipped_policy_loss(new, double(OLD), advantages_of(), **PPO)).sum().backward()
    expected = [-0.029603, -0.020861, 0, 0, 0.046932, 0.081345, 0.040395]
    expected += [0.054527, 0.008929, 0.009109, 0, -0.023055, -0.028159, 0]
    assert_six_decimals(new.grad, expected)


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient"),
    [(1, 1.5, -1.2, 0.0), (1, 0.5, -0.5, -0.5), (-1, 0.5, 0.8, 0.0), (-1, 1.5, 1.5, 1.5), (-1, 5, 5, 5)],
)
def test_single_token_truth_table(advantage, ratio, loss, gradient):
    """The clip removes the incentive to move further, and only that; there is no dual clip."""
    new = double([math.log(ratio)]).requires_grad_()
    value = clipped_policy_loss(new, double([0.0]), double([advantage]), **PPO)
    value.sum().backward()
    assert_six_decimals(value.detach(), [loss])
    assert_six_decimals(new.grad, [gradient])


def test_clip_fractions_equal_the_worked_numbers():
    """One of fourteen tokens is clipped from below and three from above."""
    low, high = is_clipped(double(NEW), double(OLD), advantages_of(), **PPO)
    assert low.nonzero().flatten().tolist() == [3]
    assert high.nonzero().flatten().tolist() == [2, 10, 13]


@pytest.mark.parametrize("clip", [PPO, CLIP_HIGHER, {"clip_low": 0.1, "clip_high": 0.5}])
def test_exactly_the_clipped_tokens_have_no_gradient(clip):
    """`is_clipped` says of random tokens just what autograd does."""
    generator = torch.Generator().manual_seed(0)
    new, old, advantages = torch.randn(3, 500, generator=generator, dtype=torch.float64)
    new.requires_grad_()
    clipped_policy_loss(new, old, advantages, **clip).sum().backward()
    low, high = is_clipped(new.detach(), old, advantages, **clip)
    assert torch.equal(new.grad == 0, low | high)
    assert not (low & high).any()
    assert low.any()
    assert high.any()


def test_objective_does_not_depend_on_the_split_over_ranks():
    """Parts under global weights sum to the objective and its gradient; means of local means are other numbers."""
    ranks = [[0, 1], [2, 3]]
    starts = [0, 3, 8, 10, 14]
    tokens = [[t for i in sequences for t in range(starts[i], starts[i + 1])] for sequences in ranks]
    whole, parts = double(NEW).requires_grad_(), double(NEW).requires_grad_()
    weights, advantages, old = weights_of("token_mean"), advantages_of(), double(OLD)
    (weights * clipped_policy_loss(whole, old, advantages, **PPO)).sum().backward()
    sums = []
    for t in tokens:
        part = (weights[t] * clipped_policy_loss(parts[t], old[t], advantages[t], **PPO)).sum()
        part.backward()
        sums.append(part.detach())
    assert_six_decimals(torch.stack(sums), [0.352611 / 2, -0.194924 / 2])
    assert_six_decimals(sum(sums), 0.078844)
    torch.testing.assert_close(whole.grad, parts.grad, rtol=0, atol=1e-15)

    loss = clipped_policy_loss(double(NEW), old, advantages, **PPO)
    local = [weights_of("token_mean", [LENGTHS[i] for i in sequences]) for sequences in ranks]
    mean_of_rank_means = sum((w * loss[t]).sum() for w, t in zip(local, tokens, strict=True)) / 2
    mean_of_sequence_means = sum(loss[a:b].mean() for a, b in itertools.pairwise(starts)) / 4
    assert_six_decimals([mean_of_rank_means, mean_of_sequence_means], [0.040562, 0.015368])
    assert min(abs(sum(sums) - mean_of_rank_means), abs(sum(sums) - mean_of_sequence_means)) > 0.03


def test_gradient_is_that_of_the_logprobs_with_advantages_and_old_logprobs_held():
    """Autograd agrees with differences taken in the new logprobs alone, although `old` is made of the same tensor."""
    theta = double(NEW).requires_grad_()
    advantages, weights = advantages_of("mean_std"), weights_of("sequence_mean")

    def objective(new, old):
        loss = clipped_policy_loss(new, old, advantages, **PPO) + 0.04 * kl_penalty(new, double(REF), "k3")
        return (weights * loss).sum()

    objective(theta, theta.detach()).backward()
    assert not advantages.requires_grad
    assert not weights.requires_grad
    for t in range(len(NEW)):
        step = torch.zeros(len(NEW), dtype=torch.float64)
        step[t] = 1e-6
        with torch.no_grad():
            difference = (objective(theta + step, theta) - objective(theta - step, theta)) / 2e-6
        assert abs(float(difference) - float(theta.grad[t])) < 1e-8


def test_first_on_policy_update_is_reinforce():
    """With old = new, detached, every ratio is 1, nothing is clipped and the gradient is that of -A logprob."""
    new, reinforce = double(NEW).requires_grad_(), double(NEW).requires_grad_()
    advantages, weights = advantages_of("mean_std"), weights_of("token_mean")
    loss = clipped_policy_loss(new, new.detach(), advantages, **PPO)
    assert torch.equal(loss.detach(), -advantages)
    assert not torch.stack(is_clipped(new.detach(), new.detach(), advantages, **PPO)).any()
    (weights * loss).sum().backward()
    (weights * -advantages * reinforce).sum().backward()
    assert torch.equal(new.grad, reinforce.grad)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_unselected_tokens_add_nothing(estimator):
    """Tokens of weight 0 are 0 in every stream (`scoring` writes that) and add exactly 0 to value and gradient."""
    new = torch.cat([double(NEW), torch.zeros(3, dtype=torch.float64)]).requires_grad_()
    old, ref, advantages, weights = (
        torch.nn.functional.pad(x, (0, 3))
        for x in (double(OLD), double(REF), advantages_of(), weights_of("token_mean"))
    )
    loss = clipped_policy_loss(new, old, advantages, **PPO) + kl_penalty(new, ref, estimator)
    (weights * loss).sum().backward()
    assert torch.equal(loss[-3:].detach(), torch.zeros(3, dtype=torch.float64))
    assert torch.equal(new.grad[-3:], torch.zeros(3, dtype=torch.float64))
    assert (new.grad[:-3] != 0).any()


def test_unknown_kl_estimator_is_refused_with_the_choices():
    """A misspelt estimator stops with its value and the names that exist."""
    with pytest.raises(ValueError, match=r"'k4'.*k1, k2, k3"):
        kl_penalty(double([0.0]), double([0.0]), "k4")


@pytest.mark.parametrize(
    ("estimator", "mean", "std", "gradient"),
    [
        ("k1", 0.100042, 0.434946, [0.0, 0.0, 0.0]),
        ("k2", 0.099593, 0.069184, [0.187713, -0.158869, -0.028844]),
        ("k3", 0.100042, 0.079028, [0.183478, -0.185574, 0.002096]),
    ],
)
def test_expected_kl_gradients_over_three_categories(estimator, mean, std, gradient):
    """By enumeration: as a loss k1 does nothing, k2 descends KL(policy || ref), k3 descends KL(ref || policy)."""
    theta = double([0.5, -0.2, 0.1]).requires_grad_()
    ref = double([-0.1, 0.3, 0.0]).log_softmax(0)
    new = theta.log_softmax(0)
    pi = new.detach().exp()
    estimate = kl_penalty(new, ref, estimator)
    (pi * estimate).sum().backward()
    value = (pi * estimate.detach()).sum()
    assert_six_decimals(value, mean)
    assert_six_decimals((pi * (estimate.detach() - value).square()).sum().sqrt(), std)
    assert_six_decimals(theta.grad, gradient)

    other = double([0.5, -0.2, 0.1]).requires_grad_()
    p = other.log_softmax(0)
    reverse, forward = (p.exp() * (p - ref)).sum(), (ref.exp() * (ref - p)).sum()
    exact = {"k1": 0 * reverse, "k2": reverse, "k3": forward}[estimator]
    exact.backward()
    torch.testing.assert_close(theta.grad, other.grad, rtol=0, atol=1e-15)
