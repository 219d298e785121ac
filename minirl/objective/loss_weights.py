"""The weight of each token in the loss of its optimizer step."""

import torch
from torch import Tensor

LOSS_NORMS = ("token_mean", "sequence_mean", "constant")


def loss_weights(num_loss_tokens: Tensor, *, norm: str, constant: int, keep: Tensor | None = None) -> Tensor:
    """Weight [N] of each loss token of each of the N sequences of one optimizer step, over all ranks.

    With L_i = num_loss_tokens [N]: "token_mean" 1 / sum(L) (DAPO); "sequence_mean" 1 / (N L_i) (GRPO); "constant"
    1 / (N constant), constant = the length limit, never the batch's longest (Dr.GRPO). Sequences that `keep` bool [N]
    drops weigh 0 and are not counted.
    """
    keep = (torch.ones_like(num_loss_tokens) if keep is None else keep).double()
    lengths, num_kept = num_loss_tokens * keep, keep.sum().clamp(min=1)
    if norm == "token_mean":
        weights = keep / lengths.sum().clamp(min=1)
    elif norm == "sequence_mean":
        weights = keep / (num_kept * lengths.clamp(min=1))
    elif norm == "constant":
        weights = keep / (num_kept * constant)
    else:
        raise ValueError(f"loss norm {norm!r}: choose one of {', '.join(LOSS_NORMS)}")
    return weights
