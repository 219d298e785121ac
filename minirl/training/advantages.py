"""Compute advantages from rewards, with pure functions of tensors.

Rollout rewards are [P, G]: P groups, each of G rollouts for one prompt. Per-token rewards are tensors [M] over the
sampled tokens, with the sequences concatenated in order. `mean_and_variance`, `whiten` and `explained_variance` are
collective, because they cover all ranks' tokens; the other functions are not.
"""

import torch
from torch import Tensor

from minirl.ranks.process_group import all_reduce_sum

EPS = 1e-6  # added to standard deviations of rewards
# Differences up to this fraction of a group's largest reward, or of EPS, count as rounding errors: 0.1 + 0.2
# equals 0.3.
RELATIVE_ERROR = 1e-9


def weighted_rewards(rewards: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sums [...] of rewards [..., K], with weights [K].

    NaN marks a reward that does not apply to the completion and is left out of the sum. The sum is NaN if no reward
    applies. Rewards with weight 0 are only logged.
    """
    weighted_sums = rewards.nan_to_num(0.0) @ weights
    has_reward = (~rewards.isnan() & (weights != 0)).any(-1)
    return weighted_sums.masked_fill(~has_reward, torch.nan)


def have_zero_variance(rewards: Tensor) -> Tensor:
    """Return a mask [P] of the zero-variance groups in rewards [P, G].

    A zero-variance group has equal rewards, so it gives no learning signal. Rewards that differ only by a
    rounding error count as equal. NaN rewards are ignored.
    """
    min_rewards = rewards.nan_to_num(torch.inf).amin(1)
    max_rewards = rewards.nan_to_num(-torch.inf).amax(1)
    max_abs_reward = torch.maximum(max_rewards, -min_rewards)
    return max_rewards - min_rewards <= RELATIVE_ERROR * max_abs_reward.clamp(min=EPS)


def group_advantages(rewards: Tensor, *, baseline: str | Tensor, norm: str, eps: float = EPS) -> Tensor:
    """Return the advantages [P, G]: rewards [P, G] minus a baseline, divided by a normalizer (e.g. standard deviation).

    baseline:
        "mean": the group's mean (GRPO, arXiv:2402.03300; with norm "none" Dr.GRPO, arXiv:2503.20783).
        "leave_one_out": the mean of the group's other rewards (RLOO, arXiv:2402.14740).
        "none": 0.
        Tensor [P]: the reward of one greedy rollout per prompt (ReMax, arXiv:2310.10505).
    norm:
        "group_std": the group's standard deviation + eps.
        "batch_std": the standard deviation of all rewards + eps.
        "none", "whiten": 1. `whiten` later normalizes the tokens' advantages.

    Standard deviations use ddof 1. With baseline "mean" or "leave_one_out", a zero-variance group gets exactly 0. A
    NaN reward is left out of all statistics and gets advantage 0. A reward also gets advantage 0 if too few
    rewards exist to compute the statistics.
    """
    if isinstance(baseline, Tensor):
        centered_rewards = rewards - baseline[:, None]
    elif baseline in ("mean", "leave_one_out"):
        centered_rewards = rewards - rewards.nanmean(1, keepdim=True)
        # The mean of equal rewards may differ from the rewards by a rounding error.
        centered_rewards = centered_rewards.masked_fill(have_zero_variance(rewards)[:, None], 0.0)
        if baseline == "leave_one_out":
            # r_i - mean of the others = (r_i - mean of all) G / (G - 1)
            group_size = (~rewards.isnan()).sum(1, keepdim=True).to(rewards)
            centered_rewards = centered_rewards * (group_size / (group_size - 1))
    elif baseline == "none":
        centered_rewards = rewards
    else:
        raise ValueError(f"baseline {baseline!r} is unknown")

    if norm == "group_std":
        centered_rewards = centered_rewards / (_standard_deviation(rewards, [1]) + eps)
    elif norm == "batch_std":
        centered_rewards = centered_rewards / (_standard_deviation(rewards, [0, 1]) + eps)
    elif norm not in ("none", "whiten"):
        raise ValueError(f"advantage norm {norm!r} is unknown")
    # An advantage is NaN if the reward or the greedy reward is missing, or if a standard deviation would be computed
    # from fewer than two rewards.
    return centered_rewards.nan_to_num(0.0)


def _standard_deviation(rewards: Tensor, dims: list[int]) -> Tensor:
    """Return the standard deviation (ddof 1, dims kept) of the non-NaN rewards; NaN for fewer than two rewards."""
    num_rewards = (~rewards.isnan()).sum(dims, keepdim=True)
    squared_deviations = (rewards - rewards.nanmean(dims, keepdim=True)).square()
    return (squared_deviations.nansum(dims, keepdim=True) / (num_rewards - 1)).sqrt()


def select_groups(is_zero_variance: Tensor, count: int) -> list[int]:
    """Select `count` of P groups to train on and return their indices, ascending.

    Takes the first groups with a learning signal and, if there are too few of them, the first zero-variance groups.
    is_zero_variance: bool [P]; see `have_zero_variance`.

    The selection rule is DAPO's dynamic sampling (arXiv:2503.14476 eq. 11). DAPO compares accuracies, because a length
    penalty in the rewards would give every group some variance.
    """
    # A stable sort preserves the order among the zero-variance groups, and among the others.
    return sorted(is_zero_variance.int().argsort(stable=True)[:count].tolist())


def gae(
    rewards: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    bootstrap: Tensor,
) -> Tensor:
    """Return generalised advantage estimates [M] for sampled tokens (arXiv:1506.02438 eq. 16).

    The per-token tensors `rewards` and `values` [M] hold N sequences with `lengths` [N]; estimates never cross from one
    sequence into another. rewards[t] is token t's reward; values[t] is the value of the state before token t. bootstrap
    [N] is the value of the state after the last token, 0 for a finished sequence. Values are trained by regression
    toward the returns (advantage estimates + values).
    """
    advantages = torch.zeros_like(values)
    next_advantage = torch.zeros_like(bootstrap)  # [N]; the advantage estimate for the next token
    next_value = bootstrap.clone()  # [N]; the value of the state after this token
    sequence_ends = lengths.cumsum(0)
    max_length = max(lengths.tolist(), default=0)
    # Go from the last token to the first, in all sequences at once.
    for steps_back in range(1, max_length + 1):
        has_token = lengths >= steps_back
        token_index = (sequence_ends - steps_back)[has_token]
        delta = rewards[token_index] + gamma * next_value[has_token] - values[token_index]
        next_advantage[has_token] = delta + gamma * gae_lambda * next_advantage[has_token]
        next_value[has_token] = values[token_index]
        advantages[token_index] = next_advantage[has_token]
    return advantages


def returns_to_go(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Return the sums [M] of rewards [M] from each token to the end of its sequence."""
    zero_values = torch.zeros_like(rewards)
    bootstrap = rewards.new_zeros(len(lengths))
    return gae(rewards, zero_values, lengths, gamma=1.0, gae_lambda=1.0, bootstrap=bootstrap)


def token_rewards(scores: Tensor, kl: Tensor, lengths: Tensor, *, kl_coef: float) -> Tensor:
    """Return the rewards [M] of sampled tokens: -kl_coef * kl [M], plus the sequence's score [N] at its last token.

    kl is the k1 estimate old - ref (arXiv:2203.02155 eq. 2). The score of a sequence without sampled tokens is dropped.
    """
    rewards = -kl_coef * kl
    has_sampled_tokens = lengths > 0
    last_token_index = lengths.cumsum(0)[has_sampled_tokens] - 1
    rewards[last_token_index] += scores[has_sampled_tokens]
    return rewards


def mean_and_variance(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and variance (ddof 1) of all ranks' values [M_r], fp64 on the host (collective)."""
    values = values.double().cpu()
    total_count, total = all_reduce_sum(values.new_tensor([len(values), float(values.sum())]))
    mean = total / total_count
    squares = all_reduce_sum((values - mean).square().sum())
    variance = squares / (total_count - 1).clamp(min=1)
    return mean, variance


def whiten(values: Tensor) -> Tensor:
    """Shift and scale values [M_r] to mean 0 and variance 1 over all ranks (collective)."""
    mean, variance = mean_and_variance(values)
    if variance.sqrt() <= RELATIVE_ERROR * mean.abs():  # the values differ only by rounding errors
        return torch.zeros_like(values)
    whitened = (values.double().cpu() - mean) * torch.rsqrt(variance + 1e-8)
    return whitened.to(values)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return the fraction of the returns' variance that the values [M_r] explain, across ranks (collective).

    The fraction is at most 1, and is 0 if the returns differ only by rounding error.
    """
    _, unexplained = mean_and_variance(returns - values)
    mean, total = mean_and_variance(returns)
    return float(1 - unexplained / total) if total.sqrt() > RELATIVE_ERROR * mean.abs() else 0.0
