"""Rotary position embedding of queries and keys."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from minirl.model.batch_invariance import at_least_fp32
from minirl.model.config import ModelConfig


@dataclass(frozen=True)
class Rotation:
    """How the layers with one rope turn the queries and keys of T tokens.

    cos, signed sin: fp32 [T, 1, R] of the first R channels of a head. The others stay as they are.
    """

    cos: Tensor
    sin: Tensor

    def at(self, positions: Tensor) -> "Rotation":
        """Of the rotation at all positions, that of tokens at `positions` int64 [T]."""
        return Rotation(self.cos[positions], self.sin[positions])


@functools.cache
def rope_table(config: ModelConfig, device: torch.device) -> tuple[Rotation, ...]:
    """Return the rotation of each of the config's ropes at all positions: T is max_position_embeddings.

    A table, because the vectorised cosine and its scalar tail differ in the last bit. All models of one
    configuration share it. It is not a buffer of theirs, because it must survive the meta device and never be cast.
    """
    position = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    tables = []
    for rope in config.ropes:
        angle = position[:, None] * torch.tensor(rope.frequencies, dtype=torch.float32)
        cos, sin = angle.cos(), angle.sin()
        full_cos = rope.amplitude * torch.cat([cos, cos], -1)
        signed_sin = rope.amplitude * torch.cat([-sin, sin], -1)
        tables.append(Rotation(full_cos[:, None].to(device), signed_sin[:, None].to(device)))
    return tuple(tables)


def rotate(x: Tensor, rotation: Rotation, scale: float = 1.0) -> Tensor:
    """Rotate x [T, heads, C], multiplied by `scale`, in fp32 (fp64 for fp64); it is rounded once.

    A pair (a, b) of channels, as in Hugging Face, becomes (a cos - b sin, b cos + a sin). The minus is part of the
    signed sin.
    """
    wide = x.to(at_least_fp32(x.dtype))
    if scale != 1:
        wide = wide * scale
    width = rotation.cos.shape[-1]
    turned, rest = wide[..., :width], wide[..., width:]
    turned = turned * rotation.cos + turned.roll(width // 2, -1) * rotation.sin
    if rest.shape[-1]:
        turned = torch.cat([turned, rest], -1)
    return turned.to(x.dtype)
