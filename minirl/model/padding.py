"""Sizes with padding, for the three kinds of work that need it.

These are products of few rows on the CPU, a rank's forward over no tokens (both `pad_rows`), and decode steps that a
CUDA graph replays (`graph_batch_size`).
"""

import torch
from torch import Tensor

# With fewer rows MKL and oneDNN use other kernels (seen at 1 to 3 rows on AMD, 1 to 15 on Intel).
MIN_ROWS = 16
# Batch sizes of CUDA graphs above this are its multiples.
GRAPH_STEP = 64


def pad_rows(x: Tensor, multiple: int = 1) -> Tensor:
    """Append zero rows to x [T, ...] up to `num_padded` and a multiple of `multiple`."""
    num_rows = num_padded(len(x), x.device)
    num_rows += -num_rows % multiple
    num_missing = num_rows - len(x)
    if num_missing == 0:
        return x
    zeros = x.new_zeros(num_missing, *x.shape[1:])
    return torch.cat([x, zeros])


def num_padded(num_rows: int, device: torch.device) -> int:
    """Return how many rows `pad_rows` makes of `num_rows`: at least MIN_ROWS on the CPU, elsewhere at least 1.

    Without rows a layer could not tell its heads: [0, heads x C] has no unique view as [0, heads, C].
    """
    least = MIN_ROWS if device.type == "cpu" else 1
    return max(least, num_rows)


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
