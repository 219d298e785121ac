"""Logits of a part of the vocabulary and their log-softmax: the one way for sampling and for scoring."""

import torch
from torch import Tensor

from minirl.model import batch_invariance


def vocab_chunk_size(device: torch.device) -> int:
    """Tokens of the vocabulary per product with the head: what fits the CPU's caches, few launches on CUDA."""
    return 2048 if device.type == "cpu" else 32768


def chunk_logits(hidden: Tensor, head: Tensor, temperature: Tensor) -> Tensor:
    """Logits [T, W] at `temperature` [T, 1] or [1, 1], in fp32, of hidden [T, D] and a tile [W, D] of the head."""
    return batch_invariance.head_logits(hidden, head).div_(temperature)


def log_softmax(logits: Tensor, totals: Tensor | None) -> Tensor:
    """Log-probabilities [T, W] from logits [T, W] and the logsumexp of each tile of the vocabulary [T, tiles].

    No totals where the W tokens are all there are.
    """
    return torch.log_softmax(logits, -1) if totals is None else logits - totals.logsumexp(-1, keepdim=True)
