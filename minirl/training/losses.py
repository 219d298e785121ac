"""Per-token losses to minimise, and their weights: pure functions of aligned fp32 per-token tensors [T].

No loss is divided by a count: the caller computes objective = sum(loss_weights * loss). Policy losses take the ratio
from `importance_ratio`, which repeats a sequence-level ratio for every token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minirl.model.attention import to_device

# Maximum log ratio, as in verl and OpenRLHF. Without a limit, the exp of a long completion's summed log ratios would
# overflow, and inf * 0 is NaN.
MAX_LOG_RATIO = 20.0
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def sequence_sums(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Sum a per-token tensor [T] over each sequence, given the sequence lengths; return the sums [N]."""
    if not lengths:
        return values[:0]
    return torch.stack([part.sum() for part in values.split(list(lengths))])


def repeat_over_tokens(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Repeat each sequence's value [N] for all its tokens [T]."""
    repeats = to_device(torch.tensor(lengths, dtype=torch.int64), values.device)
    # Without output_size, `repeat_interleave` would force a host-device synchronization.
    return values.repeat_interleave(repeats, output_size=sum(lengths))


def importance_ratio(
    logprobs: Tensor,
    old_logprobs: Tensor,
    *,
    level: str = "token",
    lengths: Sequence[int],
    loss_mask: Tensor,
) -> Tensor:
    """Return the ratio of new to old probability at each token [T], differentiable with respect to `logprobs`.

    With d = logprobs - old_logprobs:

        "token": exp(d).
        "sequence_mean": exp of the mean of d over the sequence's loss tokens (GSPO, arXiv:2507.18071 eq. 7).
        "sequence_sum": exp of the sum of d over the sequence, the ratio of whole completions (RLOO,
            arXiv:2402.14740).

    Each branch of a rollout is a separate sequence, whose ratio covers only the tokens sampled in that branch.

    lengths [N]: number of tokens per sequence. loss_mask: bool [T]; both logprob tensors are 0 outside the mask.
    """
    log_ratio = logprobs - old_logprobs
    if level == "token":
        return log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    sequence_log_ratios = sequence_sums(log_ratio, lengths)
    if level == "sequence_mean":
        num_loss_tokens = sequence_sums(loss_mask, lengths)
        sequence_log_ratios = sequence_log_ratios / num_loss_tokens.clamp(min=1)
    elif level != "sequence_sum":
        raise ValueError(f"ratio level {level!r}: choose token, sequence_mean or sequence_sum")
    sequence_ratios = sequence_log_ratios.clamp(max=MAX_LOG_RATIO).exp()
    return repeat_over_tokens(sequence_ratios, lengths)


def clipped_policy_loss(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """Return PPO's clipped surrogate loss [T] (arXiv:1707.06347 eq. 7).

    max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), with A the advantage and r the ratio. clip_high >
    clip_low is DAPO's clip-higher (arXiv:2503.14476 eq. 10).
    """
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(-advantages * ratio, -advantages * clipped_ratio)


def cispo_loss(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Return CISPO's loss [T]: REINFORCE weighted by the clipped ratio, so that no token loses its gradient.

    -stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs, arXiv:2506.13585 eq. 4. The bounds are
    relative to 1, as in the other losses: clip_high 4 caps the ratio at 5, clip_low 1 sets no lower bound.
    """
    clipped_ratio = ratio.detach().clamp(1 - clip_low, 1 + clip_high)
    return -clipped_ratio * advantages * logprobs


@torch.no_grad()
def importance_weights(
    old_logprobs: Tensor,
    sample_logprobs: Tensor,
    *,
    correction: str,
    lengths: Sequence[int],
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor:
    """Return importance weights [T] of the old policy relative to the sampling policy, computed under no_grad.

    rho = exp(old_logprobs - sample_logprobs), per token for "token_..." and per completion for "sequence_..."
    (`lengths` as in `importance_ratio`). "..._truncate" clamps rho to [low, high]; "..._mask" sets rho to 0 outside
    [low, high]. verl and open-instruct also cap rho at 2; TRL's default is "sequence_mask" with a cap of 3. With
    correction "none", all weights are 1.

    Multiplying the loss by the importance weights gives the decoupled objective (arXiv:2505.24298 eq. 5). Do not use
    the weights if the importance ratio in the loss is already relative to the sampled logprobs.
    """
    if correction == "none":
        return torch.ones_like(old_logprobs)
    if correction not in CORRECTIONS:
        raise ValueError(f"correction {correction!r}: choose one of {', '.join(CORRECTIONS)}")
    level, kind = correction.split("_")
    log_rho = old_logprobs - sample_logprobs
    if level == "sequence":
        log_rho = repeat_over_tokens(sequence_sums(log_rho, lengths), lengths)
    rho = log_rho.exp()
    clamped_rho = rho.clamp(low, high)
    return clamped_rho if kind == "truncate" else rho.where(rho == clamped_rho, 0.0)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """Return half the squared error of the values, with PPO's value clipping as in verl and TRL.

    The loss is half the larger of two squared errors: the error of the new value, and the error of the new value
    clipped to within `clip` of the old value. If `clip` is 0, clipping is disabled.
    """
    error = (values - returns).square()
    if clip:
        clipped_values = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (clipped_values - returns).square())
    return error / 2


def minibatch_index(num_rollouts: int, num_minibatches: int) -> Tensor:
    """Return the index of each rollout's minibatch, int64 [R]. Consecutive rollouts form minibatches of similar size.

    Example: 5 rollouts in 2 minibatches give [0, 0, 1, 1, 1].
    """
    return (torch.arange(1, num_rollouts + 1) * num_minibatches - 1) // num_rollouts


def loss_weights(
    num_loss_tokens: Tensor, *, norm: str, constant: int, keep: Tensor, num_minibatches: int = 1
) -> Tensor:
    """Return the loss weight fp64 [P, G] of each rollout's tokens in its minibatch.

    With L_i = num_loss_tokens [P, G] and N rollouts in the minibatch (an optimizer step, across ranks):

        "token_mean"     1 / sum(L)        (DAPO)
        "sequence_mean"  1 / (N L_i)       (GRPO)
        "constant"       1 / (N constant)  (Dr.GRPO); constant: the length limit, not the longest length in the batch

    Rollouts whose `keep` (bool [P, G]) is false get weight 0 and count toward neither N nor sum(L).
    """
    token_counts = num_loss_tokens.double()
    keep_mask = keep.double()
    minibatch_of_rollout = minibatch_index(token_counts.numel(), num_minibatches)

    def minibatch_total(values: Tensor) -> Tensor:
        """Sum values [P, G] over each rollout's minibatch; the sums are clamped to at least 1."""
        minibatch_sums = minibatch_of_rollout.bincount(values.flatten(), minlength=num_minibatches)
        return minibatch_sums.clamp(min=1)[minibatch_of_rollout].view_as(values)

    if norm == "token_mean":
        return keep_mask / minibatch_total(keep_mask * token_counts)
    if norm == "sequence_mean":
        return keep_mask / (minibatch_total(keep_mask) * token_counts.clamp(min=1))
    if norm == "constant":
        return keep_mask / (minibatch_total(keep_mask) * constant)
    raise ValueError(f"loss norm {norm!r}: choose token_mean, sequence_mean or constant")
