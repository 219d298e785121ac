"""Per-token losses as pure functions on aligned fp32 streams [T]; all are minimised, none divides by anything.

The caller weighs and sums: objective = sum(loss_weights * loss) (`advantages.loss_weights`). A policy loss takes the
ratio of `importance_ratio`; what it says of a whole sequence stands at each of the sequence's tokens.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

RATIO_LEVELS = ("token", "sequence_mean", "sequence_sum")
MAX_LOG_RATIO = (
    20.0  # as in verl and OpenRLHF: exp of a long completion's sum would overflow, and inf * 0 is NaN
)
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def sequence_sums(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Sums [N] of a stream [T] over its sequences of these lengths."""
    return torch.stack([part.sum() for part in values.split(list(lengths))]) if lengths else values[:0]


def _spread(values: Tensor, lengths: Sequence[int]) -> Tensor:
    return values.repeat_interleave(torch.tensor(lengths, dtype=torch.int64).to(values.device))


def importance_ratio(
    logprobs: Tensor, old_logprobs: Tensor, *, level: str = "token", lengths: Sequence[int], loss_mask: Tensor
) -> Tensor:
    """Ratio of new to old probability at each token [T], differentiable in `logprobs`.

    level "token": exp(new - old). "sequence_mean": exp of the sequence's mean of new - old (GSPO, arXiv:2507.18071
    eq. 7). "sequence_sum": exp of its sum, the ratio of whole completions (RLOO, arXiv:2402.14740). `lengths` are those
    of the sequences in the stream; both streams are 0 outside `loss_mask` bool [T].
    """
    log_ratio = logprobs - old_logprobs
    if level == "token":
        return log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    sums = sequence_sums(log_ratio, lengths)
    if level == "sequence_mean":
        sums = sums / sequence_sums(loss_mask, lengths).clamp(min=1)
    elif level != "sequence_sum":
        raise ValueError(f"ratio level {level!r}: choose one of {', '.join(RATIO_LEVELS)}")
    return _spread(sums.clamp(max=MAX_LOG_RATIO).exp(), lengths)


def clipped_policy_loss(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> Tensor:
    """PPO's clipped surrogate max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)).

    arXiv:1707.06347 eq. 7; clip_high > clip_low is DAPO's clip-higher, arXiv:2503.14476 eq. 10. dual_clip > 1 bounds
    the loss by -A dual_clip where A < 0 (arXiv:1912.09729 eq. 5); 0: no such bound.
    """
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if not dual_clip:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)


def cispo_loss(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """REINFORCE weighted by the clipped ratio, -sg(clip(r, 1 - clip_low, 1 + clip_high)) A new: no token loses its
    gradient (CISPO, arXiv:2506.13585 eq. 4).

    The bounds are relative to 1, as everywhere here: clip_high 4 is the cap 5, and clip_low 1 is no lower bound.
    """
    return -ratio.detach().clamp(1 - clip_low, 1 + clip_high) * advantages * logprobs


def is_clipped(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, is_weight: bool = False
) -> tuple[Tensor, Tensor]:
    """Which tokens the clip acts on, bool [T]: ratio below 1 - clip_low with A < 0, above 1 + clip_high with A > 0.

    Of a ratio that `is_weight` (CISPO) it acts whatever the advantage.
    """
    low, high = ratio < 1 - clip_low, ratio > 1 + clip_high
    return low & ((advantages < 0) | is_weight), high & ((advantages > 0) | is_weight)


@torch.no_grad()
def importance_weights(
    old_logprobs: Tensor,
    sample_logprobs: Tensor,
    *,
    correction: str,
    low: float,
    high: float,
    lengths: Sequence[int],
) -> Tensor:
    """Weights [T], without gradient, that correct for sampling from another policy than the old one.

    rho = exp(old - sampled), per token or, for "sequence_...", of the whole completion (`lengths` as in
    `importance_ratio`). "..._truncate" clamps it to [low, high]; "..._mask" sets it to 0 outside. Multiplying the loss,
    they make the decoupled objective (arXiv:2505.24298 eq. 5): never where the loss's ratio is to the sampled logprobs
    already.
    """
    if correction not in CORRECTIONS:
        raise ValueError(f"correction {correction!r}: choose one of {', '.join(CORRECTIONS)}")
    level, _, kind = correction.partition("_")
    log_rho = old_logprobs - sample_logprobs
    rho = log_rho.exp() if level == "token" else _spread(sequence_sums(log_rho, lengths).exp(), lengths)
    return rho.clamp(low, high) if kind == "truncate" else torch.where((rho >= low) & (rho <= high), rho, 0.0)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """Half the squared error of the values, or of the values kept within `clip` of the old ones where that is greater.

    clip 0: no such bound. PPO's value clipping, as in verl and TRL.
    """
    error = (values - returns).square()
    if clip:
        error = torch.maximum(error, _bounded_error(values, old_values, returns, clip))
    return error / 2


def is_value_clipped(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """Which tokens' value loss is that of the bounded value, bool [T]: their gradient is 0."""
    is_outside = (values - old_values).abs() > clip
    is_worse = _bounded_error(values, old_values, returns, clip) > (values - returns).square()
    return is_outside & is_worse & bool(clip)


def _bounded_error(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    return (old_values + (values - old_values).clamp(-clip, clip) - returns).square()


def sft_loss(logprobs: Tensor) -> Tensor:
    """Cross entropy of each token, given its logprob."""
    return -logprobs


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, *, margin: float = 0.0, center_coef: float = 0.0
) -> Tensor:
    """-log sigmoid(chosen - rejected - margin) of each pair of scores [N] (Bradley-Terry; arXiv:2203.02155 eq. 1).

    center_coef * (chosen + rejected)^2 keeps the scores around 0 (arXiv:2312.09244).
    """
    return -F.logsigmoid(chosen - rejected - margin) + center_coef * (chosen + rejected).square()
