"""Matrix products whose rows do not depend on how many other rows there are.

Sampling and scoring see the same token in batches of different sizes. Their logprobs can only be equal bit for bit if
every product gives a row the same bits whatever the batch. Matrix libraries choose their kernel by shape, so on the CPU
three rules hold: no product has fewer than `MIN_ROWS` rows, long bf16 reductions run in tiles of `TILE_ROWS` rows, and
a rank computes on one thread (`distributed.start`). `is_batch_invariant` checks the rules on the machine at hand.
On CUDA nothing is rounded and nothing is promised: the gap is measured every step instead.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minirl.model.padding import pad_rows

TILE_ROWS = 64
MAX_UNTILED_BF16 = 512  # oneDNN splits longer bf16 reductions by a rule that depends on the number of rows
MAX_PLAIN_BF16 = (
    1 << 15
)  # elements of a bf16 factor up to which MKL's fp32 product is the fastest at few rows
MAX_PROBED = 4096
SILU_WIDTH = 32  # the vectorised silu and its scalar tail differ in the last bit


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` for x [T, in], T >= MIN_ROWS on the CPU, with batch-invariant results there."""
    if x.device.type == "cpu" and x.dtype == torch.bfloat16 and x.shape[1] > MAX_UNTILED_BF16:
        tiled = _TiledProduct.apply(x, weight)
        return tiled if bias is None else tiled + bias
    return F.linear(x, weight, bias)


class _TiledProduct(torch.autograd.Function):
    """x [T, in] @ weight.T in tiles of TILE_ROWS rows; its gradients, which nothing must match bit for bit, in one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """See the class."""
        ctx.save_for_backward(x, weight)
        tiles = pad_rows(x, TILE_ROWS).split(TILE_ROWS)
        return torch.cat([F.linear(tile, weight) for tile in tiles])[: x.shape[0]]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """See the class."""
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


def silu(x: Tensor) -> Tensor:
    """`F.silu` of x [T, width], with every element computed by the vectorised kernel."""
    width = x.shape[1]
    return F.silu(F.pad(x, (0, -width % SILU_WIDTH)))[:, :width] if width % SILU_WIDTH else F.silu(x)


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype for logits, softmax and reductions of tensors in `dtype`: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def wide_mm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`a` @ `b` with factors rounded to `dtype`, sums and results in fp32 (fp64 for fp64)."""
    wide = at_least_fp32(dtype)
    if a.device.type == "cuda" and dtype != wide:
        return torch.mm(a.to(dtype), b.to(dtype), out_dtype=wide)
    if dtype != torch.bfloat16 or b.numel() <= MAX_PLAIN_BF16:
        return torch.mm(a.to(wide), b.to(wide))
    # The CPU has no out_dtype. An fp32 product that may round its factors to bf16 is the same, at bf16's speed.
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        return torch.mm(a.to(wide), b.to(wide))
    finally:
        matmul.fp32_precision = before


def head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits [T, V] of hidden [T, D] in fp32 (fp64 for fp64 inputs): bf16 inputs, fp32 sums and results."""
    return wide_mm(pad_rows(hidden), weight.t(), hidden.dtype)[: hidden.shape[0]]


def is_batch_invariant(
    shapes: list[tuple[int, int]], dtype: torch.dtype, device: torch.device, *, is_head: bool = False
) -> bool:
    """Whether products x [T, in] @ W [in, out] give each row the same bits at every T tried, for all (in, out).

    A probe, run once, of `linear` or of `head_logits`: it tries the row counts at which known CPU libraries change
    kernels, with at most MAX_PROBED columns. False on CUDA, unmeasured.
    """
    if device.type != "cpu":
        return False
    product = head_logits if is_head else linear
    generator = torch.Generator().manual_seed(0)
    for num_in, num_out in sorted({(num_in, min(num_out, MAX_PROBED)) for num_in, num_out in shapes}):
        weight = torch.randn(num_out, num_in, generator=generator).to(dtype)
        x = torch.randn(600, num_in, generator=generator).to(dtype)
        expected = product(x, weight)
        for rows in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 24, 31, 33, 64, 100, 128, 129, 256, 513):
            for start in (0, 5):
                got = product(pad_rows(x[start : start + rows]), weight)[:rows]
                if not torch.equal(got, expected[start : start + rows]):
                    return False
    return True
