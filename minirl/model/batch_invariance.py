"""Matrix products in which the result for one row does not depend on how many other rows there are.

Sampling and scoring see the same token in batches of different sizes. Their logprobs can only be equal bit
for bit if every product gives a row the same bits whatever the batch. Matrix libraries choose their kernel by
shape, so five rules hold on the CPU: no product has fewer than `padding.MIN_ROWS` rows, no linear layer is
computed with fewer than `MIN_COLUMNS` columns, long bf16 reductions run in tiles of `TILE_ROWS` rows, bf16 is
multiplied in fp32 where the CPU has no bf16 instructions (`product_dtype`), and a rank computes on one thread
(`ranks.process_group.start`). `is_batch_invariant` checks whether these rules suffice on this machine for linear
layers and the head, `portable_attention.min_queries` for attention.

On CUDA none of this is done, and the bits may differ. The gap between the logprobs is measured at every step
instead.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minirl.model.padding import pad_rows

TILE_ROWS = 64
# With fewer columns a product may be computed as one of a matrix and vectors; with fewer than twice as many its bits
# may depend on the number of rows, unless the sums have a multiple of 4 terms.
MIN_COLUMNS = 8
# Longest bf16 reduction that is not tiled. oneDNN splits longer ones by a rule that depends on the number of
# rows.
MAX_UNTILED_BF16 = 512
# Most elements of a bf16 factor for which, at few rows, MKL's fp32 product is the fastest.
MAX_PLAIN_BF16 = 1 << 15
# Most columns of a product that `is_batch_invariant` tries.
MAX_PROBED = 4096
# A vectorised function and its scalar tail differ in the last bit. Multiples of this width have no tail.
VECTOR_WIDTH = 32


@functools.cache
def has_bf16_instructions() -> bool:
    """Return whether torch's matrix library multiplies bf16 with instructions of this CPU."""
    has_mkldnn = torch.backends.mkldnn.is_available()
    if not has_mkldnn or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    # On a CPU that has AVX-512 without them, oneDNN emulates them.
    return torch.cpu._is_avx512_bf16_supported() or not torch.cpu._is_avx512_supported()


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the CPU multiplies factors in `dtype`: fp32 for bf16 without bf16 instructions.

    There a bf16 product takes 2 to 12 times as long as the fp32 product of the same factors, and a row's bits depend on
    the number of rows. The fp32 product is rounded to bf16.
    """
    return torch.float32 if dtype == torch.bfloat16 and not has_bf16_instructions() else dtype


def _is_widened(x: Tensor) -> bool:
    """Return whether products of x are computed in fp32 although x is not."""
    return x.device.type == "cpu" and product_dtype(x.dtype) != x.dtype


def bmm(x: Tensor, y: Tensor) -> Tensor:
    """`torch.bmm` of x [n, R, i] and y [n, i, j]."""
    if not _is_widened(x):
        return torch.bmm(x, y)
    return torch.bmm(x.float(), y.float()).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of x [T, in]; on the CPU batch-invariant for T >= MIN_ROWS."""
    num_columns, num_terms = weight.shape
    least = MIN_COLUMNS if num_terms % 4 == 0 else 2 * MIN_COLUMNS
    if num_columns < least and x.device.type == "cpu":
        product = linear(x, F.pad(weight, (0, 0, 0, least - num_columns)))[:, :num_columns]
        return product if bias is None else product + bias
    is_tiled = x.dtype == torch.bfloat16 and x.device.type == "cpu" and x.shape[1] > MAX_UNTILED_BF16
    if not is_tiled and not _is_widened(x):
        return F.linear(x, weight, bias)
    product = _Bf16Product.apply(x, weight)
    return product if bias is None else product + bias


class _Bf16Product(torch.autograd.Function):
    """x [T, in] @ weight.T, in fp32 on a CPU without bf16 instructions, else in tiles of TILE_ROWS rows.

    The gradients are not tiled: nothing needs to equal them bit for bit.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """See the class."""
        ctx.save_for_backward(x, weight)
        if _is_widened(x):
            return F.linear(x.float(), weight.float()).to(x.dtype)
        tiles = pad_rows(x, TILE_ROWS).split(TILE_ROWS)
        products = [F.linear(tile, weight) for tile in tiles]
        return torch.cat(products)[: len(x)]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """See the class."""
        x, weight = ctx.saved_tensors
        wide = product_dtype(grad.dtype)
        wide_grad = grad.to(wide)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = (wide_grad @ weight.to(wide)).to(grad.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (wide_grad.t() @ x.to(wide)).to(grad.dtype)
        return grad_x, grad_weight


def activate(x: Tensor, function: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    """An elementwise function of x [T, width], with every element computed by the vectorised kernel."""
    width = x.shape[1]
    missing = -width % VECTOR_WIDTH
    if missing == 0:
        return function(x)
    padded = F.pad(x, (0, missing))
    return function(padded)[:, :width]


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for logits, softmax and reductions of tensors in `dtype`: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def wide_mm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply a and b, rounded to `dtype`; sums and result are in fp32 (fp64 for fp64)."""
    wide = at_least_fp32(dtype)
    if a.device.type != "cpu" and dtype != wide:
        return torch.mm(a.to(dtype), b.to(dtype), out_dtype=wide)
    if product_dtype(dtype) != torch.bfloat16 or b.numel() <= MAX_PLAIN_BF16:
        return torch.mm(a.to(wide), b.to(wide))
    # mm has no out_dtype on the CPU. An fp32 product that may round its factors to bf16 has the same result,
    # at the speed of bf16.
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    precision_before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        return torch.mm(a.to(wide), b.to(wide))
    finally:
        matmul.fp32_precision = precision_before


def head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return contiguous logits [T, V] of hidden [T, D] and weight [V, D]; sums and logits are fp32 (fp64 for fp64)."""
    logits = wide_mm(pad_rows(hidden), pad_rows(weight).t(), hidden.dtype)
    return logits[: len(hidden), : len(weight)].contiguous()


def is_batch_invariant(
    shapes: list[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_head: bool = False,
    num_slices: int = 1,
) -> bool:
    """Return whether products x [T, in] @ W [in, out] give each row the same bits at every T tried.

    shapes: all (in, out) to try, with at most MAX_PROBED columns each. Measures `linear`, or `head_logits` if
    `is_head`, at the numbers of rows at which known CPU libraries change kernels, and with the columns computed in
    `num_slices` parts, as `slices` does. False on CUDA, without measuring.
    """
    if device.type != "cpu":
        return False
    product = head_logits if is_head else linear
    distinct_shapes = {(num_in, min(num_out, MAX_PROBED)) for num_in, num_out in shapes}
    for num_in, num_out in sorted(distinct_shapes):
        (x,), (weight,) = cancelling_factors(1, 600, num_in, num_out, dtype)
        expected = product(x, weight)
        width = -(-num_out // num_slices)
        slices = [weight] if num_slices == 1 else [pad_rows(part) for part in weight.split(width)]
        for num_rows in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 24, 31, 33, 64, 100, 128, 129, 256, 513):
            for start in (0, 5):
                rows = slice(start, start + num_rows)
                padded = pad_rows(x[rows])
                columns = [product(padded, part)[:num_rows, :width] for part in slices]
                if not torch.equal(torch.cat(columns, 1)[:, :num_out], expected[rows]):
                    return False
    return True


def cancelling_factors(
    n: int, num_rows: int, num_in: int, num_out: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return random x [n, num_rows, num_in] and y [n, num_out, num_in] for which x @ y.T is 0 up to rounding.

    Another order of the sum changes most elements. Arbitrary factors would hide that: of products rounded to bf16 one
    in 30,000 shows it. The factors have the dtype in which products in `dtype` are computed.
    """
    generator = torch.Generator().manual_seed(0)
    half = num_in // 2
    order = torch.randperm(half, generator=generator)
    x = torch.randn(n, num_rows, half, generator=generator)
    y = torch.randn(n, num_out, half, generator=generator)
    odd = (0, num_in % 2)
    x = F.pad(torch.cat([x, -x[..., order]], -1), odd)
    y = F.pad(torch.cat([y, y[..., order]], -1), odd)
    return x.to(product_dtype(dtype)), y.to(product_dtype(dtype))
