"""From rewards to advantages and from counts to loss weights: pure functions of what every rank holds."""

import torch
from torch import Tensor

ADVANTAGE_NORMS = ("mean", "mean_std")
LOSS_NORMS = ("token_mean", "sequence_mean", "constant")


def group_advantages(rewards: Tensor, *, norm: str, eps: float = 1e-6) -> Tensor:
    """Advantages [P, G] of rewards [P, G], G >= 2, against the mean of their group.

    "mean": R - mean (Dr.GRPO, arXiv:2503.20783). "mean_std": also divided by the group's std (ddof 1) + eps (GRPO,
    arXiv:2402.03300 eq. 3). A group of equal rewards gets exactly 0.
    """
    if norm not in ADVANTAGE_NORMS:
        raise ValueError(f"advantage norm {norm!r}: choose one of {', '.join(ADVANTAGE_NORMS)}")
    centred = rewards - rewards.mean(1, keepdim=True)
    if norm == "mean_std":
        centred = centred / (rewards.std(1, keepdim=True) + eps)
    equal = (rewards == rewards[:, :1]).all(1, keepdim=True)  # their mean may be off by a rounding
    return centred.masked_fill(equal, 0.0)


def loss_weights(num_loss_tokens: Tensor, *, norm: str, constant: int) -> Tensor:
    """Weight [N] of each loss token of each of the N sequences of one optimizer step, over all ranks.

    With L_i = num_loss_tokens [N]: "token_mean" 1 / sum(L) (DAPO); "sequence_mean" 1 / (N L_i) (GRPO); "constant"
    1 / (N constant), constant = the length limit, never the batch's longest (Dr.GRPO).
    """
    lengths = num_loss_tokens.double()
    if norm == "token_mean":
        weights = torch.full_like(lengths, 1.0) / lengths.sum().clamp(min=1)
    elif norm == "sequence_mean":
        weights = 1 / (len(lengths) * lengths.clamp(min=1))
    elif norm == "constant":
        weights = torch.full_like(lengths, 1 / (len(lengths) * constant))
    else:
        raise ValueError(f"loss norm {norm!r}: choose one of {', '.join(LOSS_NORMS)}")
    return weights
