"""Logits over vocabulary chunks, and their log-softmax.

Sampling and scoring share these functions, so their results are bitwise identical.
"""

import torch
from torch import Tensor

from minirl.model import batch_invariance

# Number of tokens per vocabulary chunk on the CPU. One matmul with the head computes a chunk's logits, which fit in the
# CPU's caches.
VOCAB_CHUNK = 2048
# Maximum number of logits per vocabulary chunk on CUDA: 128 MiB in fp32. Backward holds up to four tensors of this
# size.
MAX_LOGITS = 1 << 25
MIN_WIDTH = 512  # minimum chunk width on CUDA, regardless of the number of tokens


def chunk_width(num_tokens: int, vocab_size: int) -> int:
    """Return the width of a vocabulary chunk on CUDA: a multiple of MIN_WIDTH, or the whole vocabulary."""
    max_width = MAX_LOGITS // max(1, num_tokens)
    return min(vocab_size, max(1, max_width // MIN_WIDTH) * MIN_WIDTH)


def chunk_logits(hidden: Tensor, head: Tensor, divisor: Tensor) -> Tensor:
    """Return fp32 logits [T, W] for hidden [T, D] and a vocabulary chunk [W, D] of the head's weight.

    The logits are divided by `divisor` [T, 1]; see `logit_divisor`.
    """
    return batch_invariance.head_logits(hidden, head).div_(divisor)


def logit_divisor(temperature: Tensor) -> Tensor:
    """Return the divisor of each token's logits [T, 1] for temperatures [T]; 1 where the temperature is 0 (greedy)."""
    return torch.where(temperature == 0, 1.0, temperature)[:, None]


def log_softmax(logits: Tensor, chunk_totals: Tensor | None) -> Tensor:
    """Return logprobs [T, W] for logits [T, W].

    chunk_totals [T, chunks]: logsumexp of each vocabulary chunk; None if the logits cover the whole vocabulary.
    """
    if chunk_totals is None:
        return torch.log_softmax(logits, -1)
    return logits - chunk_totals.logsumexp(-1, keepdim=True)


def index_in_chunk(targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return each target's index in a vocabulary chunk of `width` tokens, and whether the target is in the chunk.

    Targets are relative to the start of the chunk. Targets outside the chunk are clamped, so that every index is valid.
    """
    index = targets.clamp(0, width - 1)
    is_in_chunk = index == targets
    return index, is_in_chunk
