"""Padding, for the few cases that need it.

`pad_rows` is used for CPU matmuls with few rows, for forward passes on a rank without tokens, and for the engine's
newest tokens. `graph_batch_size` is used for decode steps replayed as CUDA graphs.
"""

import torch.nn.functional as F
from torch import Tensor

# CUDA graphs with more than GRAPH_STEP rows have a multiple of GRAPH_STEP rows.
GRAPH_STEP = 64


def pad_rows(x: Tensor, num_rows: int) -> Tensor:
    """Append rows of zeros to x [T, ...] until x has `num_rows` rows; return a longer x unchanged."""
    num_padding_rows = num_rows - len(x)
    if num_padding_rows <= 0:
        return x
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, num_padding_rows))


def graph_batch_size(num_requests: int, max_requests: int) -> int:
    """Return the batch size of the CUDA graph for `num_requests`, at most `max_requests`.

    Sizes are powers of two up to GRAPH_STEP, and multiples of GRAPH_STEP beyond it. With powers of two alone, nearly
    half of the rows could be padding.
    """
    size = next_power_of_two(num_requests)
    if size > GRAPH_STEP:
        size = num_requests + -num_requests % GRAPH_STEP
    return min(size, max_requests)


def next_power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`, as required for the length of a Triton range."""
    return 1 << (size - 1).bit_length()
