"""Rotary position embedding for queries and keys."""

import functools

import torch
from torch import Tensor

from minirl.model.batch_invariance import at_least_fp32
from minirl.model.config import Rope


@functools.cache
def rope_table(rope: Rope, num_positions: int, device: torch.device) -> Tensor:
    """Return the cos and signed sin at P positions, fp32 [2, P, 1, R], for the first R channels of a head.

    Channels beyond the first R are not rotated. Rotations are looked up in a table because the vectorized cosine and
    its scalar tail differ in the last bit. All models with this RoPE share the table. The table is not a module buffer,
    because a buffer would have no values in a model built on the meta device, and could be cast to another dtype along
    with the model.
    """
    position = torch.arange(num_positions, dtype=torch.float32)
    angle = position[:, None] * torch.tensor(rope.frequencies, dtype=torch.float32)
    cos, sin = angle.cos(), angle.sin()
    cos_sin = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)])
    return (rope.attention_factor * cos_sin[:, :, None]).to(device)


def rotate(x: Tensor, rotation: Tensor, scale: float = 1.0) -> Tensor:
    """Multiply x [T, heads, C] by `scale` and apply the rotation in fp32 (in fp64 if x is fp64), rounding once.

    rotation [2, T, 1, R]: `rope_table` at these tokens' positions. A channel pair (a, b), paired as in Hugging Face,
    becomes (a cos - b sin, b cos + a sin). The sines in the table already include the minus sign.
    """
    upcast_x = x.to(at_least_fp32(x.dtype))
    if scale != 1:
        upcast_x = upcast_x * scale
    cos, signed_sin = rotation
    rotary_dim = cos.shape[-1]
    if rotary_dim == x.shape[-1]:
        rotated = upcast_x * cos + upcast_x.roll(rotary_dim // 2, -1) * signed_sin
    else:
        part, rest = upcast_x[..., :rotary_dim], upcast_x[..., rotary_dim:]
        rotated = torch.cat([rotate(part, rotation), rest], -1)
    return rotated.to(x.dtype)
