"""Rotary position embedding on CUDA: one Triton kernel rotates queries and keys."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirl.model.padding import next_power_of_two


class FusedRotation(torch.autograd.Function):
    """`rotation.rotate` for queries and keys in one kernel. Backward is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """See the class."""
        ctx.save_for_backward(cos, sin)
        return _launch(q, k, cos, sin, direction=1)

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
        """See the class."""
        cos, sin = ctx.saved_tensors
        return *_launch(grad_q, grad_k, cos, sin, direction=-1), None, None


def _launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, direction: int) -> tuple[Tensor, Tensor]:
    """Rotate forwards (direction 1) or backwards (-1)."""
    num_tokens, num_heads, dim = q.shape
    num_kv = k.shape[1]
    q = q.contiguous()
    k = k.contiguous()
    rotated_q = torch.empty_like(q)
    rotated_k = torch.empty_like(k)
    rotation_kernel[(num_tokens, num_heads + num_kv)](
        q,
        k,
        cos,
        sin,
        rotated_q,
        rotated_k,
        DIRECTION=direction,
        NUM_HEADS=num_heads,
        NUM_KV=num_kv,
        HALF=dim // 2,
        PADDED_HALF=next_power_of_two(dim // 2),
        num_warps=1,
    )
    return rotated_q, rotated_k


@triton.jit
def rotation_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    cos,
    sin,
    rotated_q,
    rotated_k,
    DIRECTION: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):
    """The kernel: a program rotates one head of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channel = tl.arange(0, PADDED_HALF)
    is_channel = channel < HALF
    angle = token * 2 * HALF + channel
    # The second half of cos and sin is the first half again; of the signed sin only it has the sign of sin.
    c = tl.load(cos + angle, mask=is_channel, other=0.0)
    s = tl.load(sin + angle + HALF, mask=is_channel, other=0.0) * DIRECTION
    if head < NUM_HEADS:
        source = q + (token * NUM_HEADS + head) * 2 * HALF + channel
        target = rotated_q + (token * NUM_HEADS + head) * 2 * HALF + channel
    else:
        source = k + (token * NUM_KV + head - NUM_HEADS) * 2 * HALF + channel
        target = rotated_k + (token * NUM_KV + head - NUM_HEADS) * 2 * HALF + channel
    wide = tl.float64 if q.dtype.element_ty == tl.float64 else tl.float32
    a = tl.load(source, mask=is_channel, other=0.0).to(wide)
    b = tl.load(source + HALF, mask=is_channel, other=0.0).to(wide)
    tl.store(target, a * c - b * s, mask=is_channel)
    tl.store(target + HALF, b * c + a * s, mask=is_channel)
