"""The gate of a SwiGLU feed-forward on CUDA, as one Triton kernel each way.

The kernels keep gate and up for backward but not silu(gate), so the feed-forward keeps a quarter less.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # elements of one program


class FusedGate(torch.autograd.Function):
    """silu(gate) * up of two [T, width], rounded after each of the two operations, in one kernel each way."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """See the class."""
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        gate_kernel[_grid(gate)](gate, up, out, gate.numel(), TILE=TILE)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """See the class."""
        gate, up = ctx.saved_tensors
        grad_gate = torch.empty_like(gate)
        grad_up = torch.empty_like(up)
        gate_gradient_kernel[_grid(gate)](
            gate,
            up,
            grad.contiguous(),
            grad_gate,
            grad_up,
            gate.numel(),
            TILE=TILE,
        )
        return grad_gate, grad_up


def _grid(x: Tensor) -> tuple[int]:
    return (-(-x.numel() // TILE),)


@triton.jit
def gate_kernel(gate, up, out, size, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The kernel of forward."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    wide = tl.float64 if gate.dtype.element_ty == tl.float64 else tl.float32
    g = tl.load(gate + place, mask=place < size, other=0.0).to(wide)
    u = tl.load(up + place, mask=place < size, other=0.0).to(wide)
    silu = (g / (1.0 + tl.exp(-g))).to(gate.dtype.element_ty)
    tl.store(out + place, silu.to(wide) * u, mask=place < size)


@triton.jit
def gate_gradient_kernel(  # type: ignore[no-untyped-def]
    gate, up, grad, grad_gate, grad_up, size, TILE: tl.constexpr
):
    """The kernel of backward."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    wide = tl.float64 if gate.dtype.element_ty == tl.float64 else tl.float32
    g = tl.load(gate + place, mask=place < size, other=0.0).to(wide)
    u = tl.load(up + place, mask=place < size, other=0.0).to(wide)
    d = tl.load(grad + place, mask=place < size, other=0.0).to(wide)
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    # d silu / d gate = sigmoid (1 + gate (1 - sigmoid))
    tl.store(grad_gate + place, d * u * sigmoid * (1.0 + g * (1.0 - sigmoid)), mask=place < size)
    tl.store(grad_up + place, d * (g * sigmoid), mask=place < size)
