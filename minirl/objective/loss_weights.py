"""The weight of each token in the loss of its optimizer step."""

import torch
from torch import Tensor

LOSS_NORMS = ("token_mean", "sequence_mean", "constant")


def loss_weights(
    num_loss_tokens: Tensor,
    *,
    norm: str,
    constant: int,
    keep: Tensor | None = None,
    episode: Tensor | None = None,
) -> Tensor:
    """Return fp64 [N]: the weight of a loss token in each of the N sequences of an optimizer step, on all ranks.

    With L_i = num_loss_tokens [N]:

        "token_mean"     1 / sum(L)        (DAPO)
        "sequence_mean"  1 / (N L_i)       (GRPO)
        "constant"       1 / (N constant)  (Dr.GRPO); constant: the length limit, never the batch's longest

    Sequences where `keep` bool [N] is false get 0 and do not count in N and sum(L).
    episode int64 [N]: the rollout that each sequence is a branch of, counted from 0 (None: each is a rollout). Then N
    counts rollouts and L_i sums over a rollout's branches; `keep` keeps all of these or none.
    """
    if keep is None:
        keep = torch.ones_like(num_loss_tokens)
    if episode is None:
        episode = torch.arange(len(num_loss_tokens))
    keep = keep.double()
    lengths = torch.zeros_like(keep).index_add(0, episode, num_loss_tokens * keep)
    num_kept = max(1, len(episode[keep.bool()].unique()))
    if norm == "token_mean":
        return keep / lengths.sum().clamp(min=1)
    if norm == "sequence_mean":
        return keep / (num_kept * lengths[episode].clamp(min=1))
    if norm == "constant":
        return keep / (num_kept * constant)
    raise ValueError(f"loss norm {norm!r}: choose one of {', '.join(LOSS_NORMS)}")
