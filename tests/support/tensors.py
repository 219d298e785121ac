"""Random tensors."""

import torch


def randn(*shape, dtype=torch.float32, seed=0):
    """Normal numbers that are drawn in fp64, so that those of other dtypes are the same ones, rounded."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
