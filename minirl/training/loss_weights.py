"""The weight of each token in the loss of its optimizer step."""

import torch
from torch import Tensor


def minibatch_of(num_rollouts: int, num_minibatches: int) -> Tensor:
    """Return int64 [R]: the minibatch of each rollout of a step, about equally many in each, in their order.

    Example: 5 rollouts in 2 minibatches are [0, 0, 1, 1, 1].
    """
    firsts = torch.arange(num_minibatches) * num_rollouts // num_minibatches
    return torch.searchsorted(firsts, torch.arange(num_rollouts), right=True) - 1


def loss_weights(
    num_loss_tokens: Tensor, *, norm: str, constant: int, keep: Tensor | None = None, num_minibatches: int = 1
) -> Tensor:
    """Return fp64 [P, G]: the weight of a loss token of each rollout of a step in the loss of its minibatch.

    With L_i = num_loss_tokens [P, G], of the N rollouts of a minibatch (an optimizer step, on all ranks):

        "token_mean"     1 / sum(L)        (DAPO)
        "sequence_mean"  1 / (N L_i)       (GRPO)
        "constant"       1 / (N constant)  (Dr.GRPO); constant: the length limit, never the batch's longest

    Rollouts where `keep` bool [P, G] is false get 0 and do not count in N and sum(L).
    """
    lengths = num_loss_tokens.double()
    kept = torch.ones_like(lengths) if keep is None else keep.double()
    minibatch = minibatch_of(lengths.numel(), num_minibatches)

    def total(values: Tensor) -> Tensor:
        """The sum over each rollout's minibatch [P, G], at least 1."""
        sums = values.new_zeros(num_minibatches).index_add(0, minibatch, values.flatten())
        return sums.clamp(min=1)[minibatch].view_as(values)

    if norm == "token_mean":
        return kept / total(kept * lengths)
    if norm == "sequence_mean":
        return kept / (total(kept) * lengths.clamp(min=1))
    if norm == "constant":
        return kept / (total(kept) * constant)
    raise ValueError(f"loss norm {norm!r}: choose token_mean, sequence_mean or constant")
