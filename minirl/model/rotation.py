"""Rotary position embedding for queries and keys."""

import functools

import torch
from torch import Tensor

from minirl.model.batch_invariance import at_least_fp32
from minirl.model.config import Rope

# cos and signed sin for T tokens, fp32 [T, 1, R], for the first R channels of a head; the others stay unchanged.
Rotation = tuple[Tensor, Tensor]


@functools.cache
def rope_table(rope: Rope, num_positions: int, device: torch.device) -> Rotation:
    """Return a rope's rotation at each position.

    Rotations are looked up in a table because the vectorized cosine and its scalar tail differ in the last bit. All
    models with this rope share the table. It is not a module buffer, because a buffer would have no values in a model
    built on the meta device, and could be cast.
    """
    position = torch.arange(num_positions, dtype=torch.float32)
    angle = position[:, None] * torch.tensor(rope.frequencies, dtype=torch.float32)
    cos, sin = angle.cos(), angle.sin()
    rotation = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)])
    cos_table, sin_table = (rope.attention_factor * rotation[:, :, None]).to(device)
    return cos_table, sin_table


def rotate(x: Tensor, rotation: Rotation, scale: float = 1.0) -> Tensor:
    """Multiply x [T, heads, C] by `scale` and rotate it, in fp32 (fp64 for fp64), rounding once.

    rotation: the rows of `rope_table` for these tokens. A channel pair (a, b), paired as in Hugging Face, becomes
    (a cos - b sin, b cos + a sin). The table's signed sin includes the minus sign.
    """
    upcast = x.to(at_least_fp32(x.dtype))
    if scale != 1:
        upcast = upcast * scale
    cos, signed_sin = rotation
    width = cos.shape[-1]
    if width == x.shape[-1]:
        rotated = upcast * cos + upcast.roll(width // 2, -1) * signed_sin
    else:
        part, rest = upcast[..., :width], upcast[..., width:]
        rotated = torch.cat([rotate(part, rotation), rest], -1)
    return rotated.to(x.dtype)
