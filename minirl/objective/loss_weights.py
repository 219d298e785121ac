"""The weight of each token in the loss of its optimizer step."""

import torch
from torch import Tensor

LOSS_NORMS = ("token_mean", "sequence_mean", "constant")


def loss_weights(num_loss_tokens: Tensor, *, norm: str, constant: int, keep: Tensor | None = None) -> Tensor:
    """Weights fp64 [N] of the loss tokens of each of the N sequences of one optimizer step, on all ranks.

    With L_i = num_loss_tokens [N]:

        "token_mean"     1 / sum(L)        (DAPO)
        "sequence_mean"  1 / (N L_i)       (GRPO)
        "constant"       1 / (N constant)  (Dr.GRPO); constant: the length limit, never the batch's longest

    Sequences where `keep` bool [N] is false get 0 and do not count in N and sum(L).
    """
    if keep is None:
        keep = torch.ones_like(num_loss_tokens)
    keep = keep.double()
    lengths = num_loss_tokens * keep
    num_kept = keep.sum().clamp(min=1)
    if norm == "token_mean":
        return keep / lengths.sum().clamp(min=1)
    if norm == "sequence_mean":
        return keep / (num_kept * lengths.clamp(min=1))
    if norm == "constant":
        return keep / (num_kept * constant)
    raise ValueError(f"loss norm {norm!r}: choose one of {', '.join(LOSS_NORMS)}")
