"""Estimators of the KL divergence from another model."""

import torch
from torch import Tensor

from minirl.training.losses import MAX_LOG_RATIO


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token (Schulman, 2020).

    With d = logprobs - ref_logprobs:

        k1 = d: unbiased, for metrics and rewards. The expected gradient of a k1 loss is zero.
        k2 = d^2 / 2: has the gradient of KL(policy || reference).
        k3 = exp(-d) + d - 1: unbiased, with low variance. k3 has the gradient of KL(reference || policy), and is the
            estimator in the GRPO paper. d is clamped at -MAX_LOG_RATIO, below which it has no gradient.
    """
    d = logprobs - ref_logprobs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        clamped_log_ratio = d.clamp(min=-MAX_LOG_RATIO)
        return torch.expm1(-clamped_log_ratio) + clamped_log_ratio
    raise ValueError(f"KL estimator {estimator!r} is unknown")
