"""Per-token losses as pure functions on aligned fp32 streams [T]; all are minimised, none divides by anything.

The caller weighs and sums: objective = sum(loss_weights * loss) (`advantages.loss_weights`).
"""

import torch
from torch import Tensor

KL_ESTIMATORS = ("k1", "k2", "k3")


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """PPO's clipped surrogate max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(new - old).

    arXiv:1707.06347 eq. 7; clip_high > clip_low is DAPO's clip-higher, arXiv:2503.14476 eq. 10.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))


def is_clipped(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Which tokens lose their gradient to the clip, bool [T]: below 1 - clip_low and above 1 + clip_high."""
    ratio = torch.exp(logprobs - old_logprobs)
    return (ratio < 1 - clip_low) & (advantages < 0), (ratio > 1 + clip_high) & (advantages > 0)


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(policy || reference) per sampled token, with d = new - ref (Schulman, 2020).

    k1 = d: unbiased, but its expected gradient is zero: a metric, no penalty. k2 = d^2 / 2: the gradient of
    KL(policy || reference). k3 = exp(-d) + d - 1: unbiased, low variance, the gradient of KL(reference || policy);
    GRPO's published choice.
    """
    d = logprobs - ref_logprobs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        return torch.expm1(-d) + d
    raise ValueError(f"KL estimator {estimator!r}: choose one of {', '.join(KL_ESTIMATORS)}")
