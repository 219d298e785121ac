"""From rewards to advantages and from counts to loss weights: pure functions of what every rank holds.

Sequence-level rewards are [P, G], a group of G rollouts in each row. Token-level streams here hold policy tokens only,
sequence after sequence. `whiten` and `explained_variance` speak of all ranks' tokens and communicate.
"""

import torch
from torch import Tensor

from minirl.ranks.process_group import all_reduce_sum

BASELINES = ("mean", "leave_one_out", "none")
ADVANTAGE_NORMS = ("none", "group_std", "batch_std")


def are_equal(rewards: Tensor) -> Tensor:
    """Which groups of rewards [P, G] have no signal, all being equal, bool [P]."""
    return (rewards == rewards[:, :1]).all(1)


def group_advantages(rewards: Tensor, *, baseline: str | Tensor, norm: str, eps: float = 1e-6) -> Tensor:
    """Advantages [P, G] of rewards [P, G].

    baseline: "mean" of the group (GRPO, arXiv:2402.03300; with norm "none" Dr.GRPO, arXiv:2503.20783), "leave_one_out"
    (the others' mean: RLOO, arXiv:2402.14740), "none", or rewards [P] of a greedy rollout each (ReMax,
    arXiv:2310.10505). norm: "group_std" divides by the group's std + eps, "batch_std" by that of all rewards, ddof 1.
    Against the baseline of its own group, a group of equal rewards gets exactly 0.
    """
    if isinstance(baseline, Tensor):
        centred = rewards - baseline[:, None]
    elif baseline == "none":
        centred = rewards
    elif baseline in BASELINES:
        centred = rewards - rewards.mean(1, keepdim=True)
        centred = centred.masked_fill(are_equal(rewards)[:, None], 0.0)  # their mean may be off by a rounding
        if baseline == "leave_one_out":
            centred = centred * (rewards.shape[1] / (rewards.shape[1] - 1))
    else:
        raise ValueError(f"baseline {baseline!r}: choose one of {', '.join(BASELINES)}, or give rewards [P]")
    if norm == "group_std":
        return centred / (rewards.std(1, keepdim=True) + eps)
    if norm == "batch_std":
        return centred / (rewards.std() + eps)
    if norm != "none":
        raise ValueError(f"advantage norm {norm!r}: choose one of {', '.join(ADVANTAGE_NORMS)}")
    return centred


def separate_advantages(rewards: Tensor, weights: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Advantages [P, G] of K rewards [P, G, K]: each normalised within its group, then summed by
    weight [K] and whitened over the step.

    GDPO, arXiv:2601.05242: rewards of different scales count by their weights alone.
    """
    parts = [group_advantages(r, baseline="mean", norm="group_std", eps=eps) for r in rewards.unbind(-1)]
    total = (torch.stack(parts, -1) * weights).sum(-1)
    return (total - total.mean()) / (total.std() + eps)


def select_groups(accuracy: Tensor, count: int) -> tuple[list[int], int]:
    """Which `count` rows of accuracies [P, G] to train on, and how many of them have no signal, being all equal.

    The first that are not all equal, filled up with the first that are; in order. DAPO's dynamic sampling
    (arXiv:2503.14476 eq. 11), to be judged by accuracy: a length penalty would give every group a difference.
    """
    is_equal = are_equal(accuracy)
    rows = sorted(torch.argsort(is_equal.int(), stable=True)[:count].tolist())
    return rows, int(is_equal[rows].sum())


def gae(
    rewards: Tensor, values: Tensor, lengths: Tensor, *, gamma: float, gae_lambda: float, bootstrap: Tensor
) -> Tensor:
    """Generalised advantage estimates [M] of streams of policy tokens [M], never across sequences of `lengths` [N].

    rewards[t] is paid for token t, values[t] is of the state before it, bootstrap [N] of the state after the last: 0
    where the sequence ended. Returns to regress values on are the estimates + values. arXiv:1506.02438 eq. 16.
    """
    advantages, running, next_value = torch.zeros_like(values), torch.zeros_like(bootstrap), bootstrap.clone()
    ends = lengths.cumsum(0)
    for back in range(1, int(lengths.max()) + 1 if len(lengths) else 1):
        alive = lengths >= back
        token = (ends - back)[alive]
        delta = rewards[token] + gamma * next_value[alive] - values[token]
        running[alive] = delta + gamma * gae_lambda * running[alive]
        next_value[alive] = values[token]
        advantages[token] = running[alive]
    return advantages


def returns_to_go(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Sums [M] of the rewards from each token to the end of its sequence."""
    zeros = torch.zeros_like(rewards)
    return gae(rewards, zeros, lengths, gamma=1.0, gae_lambda=1.0, bootstrap=rewards.new_zeros(len(lengths)))


def token_rewards(scores: Tensor, kl: Tensor, lengths: Tensor, *, kl_coef: float) -> Tensor:
    """Rewards [M] of policy tokens: -kl_coef * kl [M] each, and its sequence's score [N] at its last token.

    arXiv:2203.02155 eq. 2, with kl = old - ref (k1).
    """
    rewards = -kl_coef * kl
    has_tokens = lengths > 0
    rewards[lengths.cumsum(0)[has_tokens] - 1] += scores[has_tokens]
    return rewards


def mean_and_variance(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (ddof 1) of all ranks' values [M_r] together, fp64 (collective)."""
    values = values.double().cpu()
    count, total = all_reduce_sum(torch.stack([torch.tensor(len(values)).double(), values.sum()]))
    mean = total / count
    return mean, all_reduce_sum((values - mean).square().sum()) / (count - 1).clamp(min=1)


def whiten(values: Tensor) -> Tensor:
    """Values [M_r] with mean 0 and variance 1 over all ranks' (collective)."""
    mean, variance = mean_and_variance(values)
    return ((values.double().cpu() - mean) * torch.rsqrt(variance + 1e-8)).to(values)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Share of the variance of all ranks' returns [M_r] that the values explain, at most 1 (collective)."""
    _, unexplained = mean_and_variance(returns - values)
    _, total = mean_and_variance(returns)
    return float(1 - unexplained / total) if total > 0 else 0.0
