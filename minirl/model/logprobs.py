"""Logits of vocabulary chunks and their log-softmax.

Sampling and scoring share these functions, so that both get the same bits.
"""

import torch
from torch import Tensor

from minirl.model import batch_invariance

# Tokens of a vocabulary chunk on the CPU, whose logits are one product with the head and fit the caches.
VOCAB_CHUNK = 2048
# Logits of a vocabulary chunk on CUDA: 128 MiB in fp32. In backward there are up to four tensors of this size.
MAX_LOGITS = 1 << 25
MIN_WIDTH = 512  # of a chunk on CUDA, even for very many tokens


def chunk_width(num_tokens: int, vocab_size: int) -> int:
    """Return how many tokens a vocabulary chunk has on CUDA, a multiple of MIN_WIDTH unless it is all of them."""
    widest = MAX_LOGITS // max(1, num_tokens)
    return min(vocab_size, max(1, widest // MIN_WIDTH) * MIN_WIDTH)


def chunk_logits(hidden: Tensor, head: Tensor, divisor: Tensor) -> Tensor:
    """Return fp32 logits [T, W] of hidden [T, D] and a vocabulary chunk of the head's weight [W, D].

    They are divided by `divisor` [T, 1], see `logit_divisor`.
    """
    return batch_invariance.head_logits(hidden, head).div_(divisor)


def logit_divisor(temperature: Tensor) -> Tensor:
    """Return the divisors [T, 1] of logits at temperatures [T]; 1 where the temperature is 0 (the likeliest token)."""
    return torch.where(temperature == 0, 1.0, temperature)[:, None]


def log_softmax(logits: Tensor, chunk_totals: Tensor | None) -> Tensor:
    """Return logprobs [T, W] of logits [T, W].

    chunk_totals [T, chunks]: the logsumexp of each vocabulary chunk; None if the W tokens are the whole
    vocabulary.
    """
    if chunk_totals is None:
        return torch.log_softmax(logits, -1)
    return logits - chunk_totals.logsumexp(-1, keepdim=True)


def index_in_chunk(targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the index of each target in a vocabulary chunk of `width` tokens, and whether the target is in it.

    Targets count from the start of the chunk. A target outside of it gets some index inside, so that tensors
    can be indexed anyway.
    """
    index = targets.clamp(0, width - 1)
    is_in_chunk = index == targets
    return index, is_in_chunk
