"""Sizes with padding, for the three kinds of work that need it.

These are products of few rows on the CPU, a rank's forward over no tokens (both `pad_rows`), and decode steps that a
CUDA graph replays (`graph_batch_size`).
"""

import torch.nn.functional as F
from torch import Tensor

# Batch sizes of CUDA graphs above this are its multiples.
GRAPH_STEP = 64


def pad_rows(x: Tensor, num_rows: int) -> Tensor:
    """Append zero rows to x [T, ...] up to `num_rows`, if it has fewer."""
    num_missing = num_rows - len(x)
    if num_missing <= 0:
        return x
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, num_missing))


def graph_batch_size(num_requests: int, max_requests: int) -> int:
    """Return the batch size of the CUDA graph for `num_requests`, up to `max_requests`.

    A power of two up to GRAPH_STEP, else a multiple of it: with powers of two nearly half of the rows could be padding.
    """
    size = next_power_of_two(num_requests)
    if size > GRAPH_STEP:
        size = num_requests + -num_requests % GRAPH_STEP
    return min(size, max_requests)


def next_power_of_two(size: int) -> int:
    """Return the least power of two that is not below `size`; a Triton kernel's ranges have such lengths."""
    return 1 << (size - 1).bit_length()
