"""Random tensors."""

import torch


def randn(*shape, dtype=torch.float32, seed=0):
    """Return normally distributed numbers, drawn in fp64 and rounded, so that all dtypes share the same values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
