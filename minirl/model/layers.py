"""Norms, linear layers with and without adapters, and activations."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minirl.model import batch_invariance
from minirl.model.config import Adapters, ModelConfig

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
}


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32 and rounded once.

    Hugging Face also rounds before it multiplies with the weight; in 16 bits the two differ in the last bit.
    adds_one: multiply by 1 + weight, summed in fp32.
    """

    def __init__(self, size: int, config: ModelConfig):
        super().__init__()
        self.adds_one = config.norm_adds_one
        self.weight = nn.Parameter(torch.zeros(size) if self.adds_one else torch.ones(size))
        self.eps = config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        if not self.adds_one:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        upcast_dtype = batch_invariance.at_least_fp32(x.dtype)
        weight = 1 + self.weight.to(upcast_dtype)
        return F.rms_norm(x.to(upcast_dtype), weight.shape, weight, self.eps).to(x.dtype)


class GatedActivation(torch.autograd.Function):
    """activation(gate) * up of two [T, width]. It keeps only these for backward, which computes the activation again.

    So a layer keeps a fifth less, with the bits of autograd.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        """See the class."""
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return activation(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """See the class."""
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            gate = gate.detach().requires_grad_()
            active = ctx.activation(gate)
        (grad_gate,) = torch.autograd.grad(active, gate, grad * up)
        return grad_gate, grad * active.detach(), None


class Linear(nn.Linear):
    """`nn.Linear` with products from `batch_invariance`, and perhaps a LoRA adapter: x W^T + scale (x A^T) B^T.

    The adapter is never merged, so decoding, scoring and training compute the same bits.
    lora_scale: alpha / rank, or 0 for x W^T alone.
    """

    lora_scale = 0.0

    def add_adapter(self, adapters: Adapters) -> None:
        """Make A [rank, in] and B [out, rank]."""
        self.lora_A = nn.Parameter(self.weight.new_zeros(adapters.rank, self.in_features))
        self.lora_B = nn.Parameter(self.weight.new_zeros(self.out_features, adapters.rank))
        self.lora_scale = adapters.alpha / adapters.rank

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs [T, out] of x [T, in]."""
        product = batch_invariance.linear(x, self.weight, self.bias)
        if not self.lora_scale:
            return product
        inner = batch_invariance.linear(x, self.lora_A)
        if x.device.type != "cpu":  # one kernel instead of three, and two large tensors fewer to write
            return product.addmm_(inner, self.lora_B.t(), alpha=self.lora_scale)
        return product + self.lora_scale * batch_invariance.linear(inner, self.lora_B)
