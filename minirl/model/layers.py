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

    transformers also rounds before multiplying by the weight, so in 16-bit dtypes the results differ in the last bit.
    adds_one: whether to multiply by 1 + weight (added in fp32) instead of by weight.
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
    """Computes activation(gate) * up for inputs [T, width]. Only the inputs are saved; backward recomputes the
    activation.

    The recomputation shrinks a layer's saved activations by a fifth, and the gradients match autograd's gradients
    bitwise.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        """Return activation(gate) * up."""
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return activation(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients with respect to gate and up."""
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            gate = gate.detach().requires_grad_()
            activated = ctx.activation(gate)
        (grad_gate,) = torch.autograd.grad(activated, gate, grad * up)
        return grad_gate, grad * activated.detach(), None


class Linear(nn.Linear):
    """`nn.Linear` with batch-invariant matmuls and an optional LoRA adapter: x W^T + scale (x A^T) B^T.

    The adapter is never merged into the weight, so results are bitwise identical in decoding, scoring and training.
    lora_scale: alpha / rank, or 0 without an adapter.
    """

    lora_scale = 0.0

    def add_adapter(self, adapters: Adapters) -> None:
        """Add the adapter's A [rank, in] and B [out, rank], initialized to zero."""
        self.lora_A = nn.Parameter(self.weight.new_zeros(adapters.rank, self.in_features))
        self.lora_B = nn.Parameter(self.weight.new_zeros(self.out_features, adapters.rank))
        self.lora_scale = adapters.alpha / adapters.rank

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs [T, out] for x [T, in]."""
        product = batch_invariance.linear(x, self.weight, self.bias)
        if not self.lora_scale:
            return product
        lora_hidden = batch_invariance.linear(x, self.lora_A)
        if x.device.type != "cpu":  # one kernel instead of three, and two fewer large tensors
            return product.addmm_(lora_hidden, self.lora_B.t(), alpha=self.lora_scale)
        return product + self.lora_scale * batch_invariance.linear(lora_hidden, self.lora_B)
