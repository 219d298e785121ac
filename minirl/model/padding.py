"""The two places where rows are added for nothing: few rows on the CPU, and decode steps of CUDA graphs."""

import torch
from torch import Tensor

MIN_ROWS = 16  # below this MKL and oneDNN take other kernels (seen at 1-3 rows on AMD, 1-15 on Intel)


def pad_rows(x: Tensor, multiple: int = 1) -> Tensor:
    """On the CPU, append zero rows to `x` [T, ...] up to at least MIN_ROWS rows and a multiple of `multiple`."""
    rows = num_padded(x.shape[0], x.device)
    missing = rows + -rows % multiple - x.shape[0]
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def num_padded(rows: int, device: torch.device) -> int:
    """The rows of a stream of `rows` with the padding of `pad_rows`."""
    return max(MIN_ROWS, rows) if device.type == "cpu" else rows


def graph_batch_size(num_requests: int, max_requests: int) -> int:
    """The rows of a decode step of `num_requests` that a CUDA graph replays: a power of two, or `max_requests`."""
    next_power_of_two = 1 << (num_requests - 1).bit_length()
    return min(next_power_of_two, max_requests)
