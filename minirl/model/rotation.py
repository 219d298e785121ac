"""Rotary position embedding of queries and keys."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from minirl.model.batch_invariance import at_least_fp32
from minirl.model.config import ModelConfig, Rope


@dataclass(frozen=True)
class Rotation:
    """How the layers with one rope turn the queries and keys of T tokens.

    cos, signed sin: fp32 [T, 1, R] of the first R channels of a head. The others stay as they are.
    is_interleaved: channels 2 i and 2 i + 1 are a pair, not i and i + R / 2.
    query_scale: fp32 [T, 1, 1], a factor of queries.
    """

    cos: Tensor
    sin: Tensor
    is_interleaved: bool = False
    query_scale: Tensor | None = None

    def at(self, positions: Tensor) -> "Rotation":
        """Of the rotation at all positions, that of tokens at `positions` int64 [T]."""
        scale = None if self.query_scale is None else self.query_scale[positions]
        return Rotation(self.cos[positions], self.sin[positions], self.is_interleaved, scale)


@functools.cache
def rope_table(config: ModelConfig, device: torch.device) -> tuple[Rotation, ...]:
    """Return the rotation of each of the config's ropes at all positions: T is max_position_embeddings.

    A table, because the vectorised cosine and its scalar tail differ in the last bit. All models of one
    configuration share it. It is not a buffer of theirs, because it must survive the meta device and never be cast.
    """
    position = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    query_scale = None
    if config.query_multiplier != 1:
        query_scale = torch.full((len(position), 1, 1), config.query_multiplier, device=device)
    tables = []
    for rope in config.ropes:
        cos, sin = _cos_and_signed_sin(rope, position)
        tables.append(Rotation(cos.to(device), sin.to(device), rope.is_interleaved, query_scale))
    return tuple(tables)


def _cos_and_signed_sin(rope: Rope, position: Tensor) -> tuple[Tensor, Tensor]:
    """The two of each position, [positions, 1, R]."""
    angle = position[:, None] * torch.tensor(rope.frequencies, dtype=torch.float32)
    cos = angle.cos()
    sin = angle.sin()
    if rope.is_interleaved:
        cos, sin = cos[..., None], sin[..., None]
    full_cos = torch.cat([cos, cos], -1).flatten(1)
    signed_sin = torch.cat([-sin, sin], -1).flatten(1)
    return (rope.amplitude * full_cos)[:, None], (rope.amplitude * signed_sin)[:, None]


def rotate_pair(q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Rotate q [T, H, C], multiplied by the query scale, and k [T, K, C]."""
    width = rotation.cos.shape[-1]
    if width == 0 and rotation.query_scale is None:
        return q, k
    return rotate(q, rotation, rotation.query_scale), rotate(k, rotation)


def rotate(x: Tensor, rotation: Rotation, scale: Tensor | None = None) -> Tensor:
    """Rotate x [T, heads, C], multiplied by `scale` [T, 1, 1], in fp32 (fp64 for fp64); it is rounded once.

    A pair (a, b) of channels, as in Hugging Face, becomes (a cos - b sin, b cos + a sin). The minus is part of the
    signed sin.
    """
    wide = x.to(at_least_fp32(x.dtype))
    if scale is not None:
        wide = wide * scale
    width = rotation.cos.shape[-1]
    turned, rest = wide[..., :width], wide[..., width:]
    if rotation.is_interleaved:
        partner = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = turned.roll(width // 2, -1)
    turned = turned * rotation.cos + partner * rotation.sin
    if rest.shape[-1]:
        turned = torch.cat([turned, rest], -1)
    return turned.to(x.dtype)
