"""The KL divergence to the reference: its estimators, and the coefficient that adapts to a target."""

import torch
from torch import Tensor

KL_ESTIMATORS = ("k1", "k2", "k3")


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(policy || reference) per sampled token, with d = new - ref (Schulman, 2020).

    k1 = d: unbiased, but its expected gradient is zero: for metrics and rewards, no loss. k2 = d^2 / 2: the gradient of
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


def adapted_kl_coef(kl_coef: float, kl: float, *, target: float, num_rollouts: int, horizon: float) -> float:
    """The next KL coefficient, up to 20 % per `horizon` rollouts towards where kl (nats per completion) is `target`.

    arXiv:1909.08593 section 2.2.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * min(1.0, num_rollouts / horizon))
