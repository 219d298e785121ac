"""Rotary position embedding of queries and keys."""

import torch
from torch import Tensor

from minirl.model import device_kernels
from minirl.model.batch_invariance import at_least_fp32


def rotate_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [T, H, C] and k [T, K, C] by the angles of cos and signed sin [T, 1, R]: their first R channels."""
    size = cos.shape[-1]
    if size < q.shape[-1]:
        turned = rotate_pair(q[..., :size].contiguous(), k[..., :size].contiguous(), cos, sin)
        return torch.cat([turned[0], q[..., size:]], -1), torch.cat([turned[1], k[..., size:]], -1)
    if device_kernels.are_used(q.device):
        from minirl.kernels.fused_rotation import FusedRotation

        return FusedRotation.apply(q, k, cos, sin)
    return rotate(q, cos, sin), rotate(k, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, C] by the angles of cos and signed sin [T, 1, C], in fp32 (fp64 for fp64).

    Channels i and i + C / 2 are a pair (a, b), as in Hugging Face, and become (a cos - b sin, b cos + a sin).
    The minus is part of the signed sin.
    """
    wide = x.to(at_least_fp32(x.dtype))
    partner = wide.roll(x.shape[-1] // 2, -1)
    return (wide * cos + partner * sin).to(x.dtype)
