"""Batch-invariant matmuls: a row's result does not depend on the number of rows.

Sampling and scoring process the same token in batches of different sizes. Sampling and scoring logprobs are bitwise
equal only if every matmul gives bitwise-identical results for a row in any batch, but matrix libraries choose kernels
by shape. Therefore, on the CPU, each rank runs on one thread (`ranks.process_group.start`), every matmul has at least
MIN_COLUMNS columns, and bf16 operands are multiplied in fp32 if the CPU has no bf16 instructions (`matmul_dtype`).
Everything else is measured on this machine, once per shape and dtype: `matmul_variant` returns the number of rows to
pad to, or the size of the tiles to split into. `is_batch_invariant` and, for attention,
`portable_attention.min_invariant_queries` report whether the results are batch-invariant on this machine. Norms and
elementwise functions are already batch-invariant.

On CUDA, matmuls are not made batch-invariant. Instead, every training step measures the gap between sampling and
scoring logprobs.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from minirl.model.padding import pad_rows

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class MatmulVariant(NamedTuple):
    """How to compute matmuls of one shape: by default, with the operand padded to at least `num_rows` rows.

    is_tiled: whether to compute the product in tiles of `num_rows` rows instead.
    """

    num_rows: int
    is_tiled: bool = False


# The variants that `matmul_variant` tries, fastest first. MKL and oneDNN switch to different kernels when there are
# only a few rows: 1 to 15 rows on Intel CPUs; 1 to 3 rows on AMD CPUs, or up to 15 rows in small bf16 matmuls.
VARIANTS = (MatmulVariant(4), MatmulVariant(8), MatmulVariant(16), MatmulVariant(64, is_tiled=True))
# Fallback for matmuls that no variant in VARIANTS makes batch-invariant.
INEXACT = MatmulVariant(1)
# Minimum number of output columns of a matmul. With fewer columns, libraries use matrix-vector kernels, or kernels
# whose rounding depends on the column index.
MIN_COLUMNS = 64
# Largest bf16 operand, in elements, for which MKL's fp32 product is fastest when the other operand has few rows.
MAX_UPCAST_OPERAND = 1 << 15
# Row counts that `matmul_variant` tries: all small counts, counts around kernel block sizes, and larger counts for
# small shapes, for which libraries choose kernels by the number of multiplications. Every variant pads to at least the
# smallest probed row count.
PROBED_ROWS = (
    *range(VARIANTS[0].num_rows, 66),
    80,
    96,
    100,
    127,
    128,
    129,
    192,
    256,
    300,
    513,
    1025,
    2049,
    4097,
)
# Limits on probing: the maximum number of multiplications in a matmul with more than 513 rows, and the maximum number
# of elements in a weight.
MAX_PROBED_WORK = 1 << 25
MAX_PROBED_WEIGHT = 1 << 22
# Number of distinct rows in a probed matmul. The number is neither a divisor nor a multiple of any kernel's block size.
# In bf16, reordering a sum of fewer than 8 terms changes only one element in 5,000, so short sums need more distinct
# rows.
PROBE_PERIOD = 11
PROBE_PERIOD_SHORT_SUMS = 523
# A vectorized kernel and its scalar tail differ in the last bit. A width that is a multiple of VECTOR_WIDTH has no
# tail.
VECTOR_WIDTH = 32


# Results of `cache_measurement` functions, keyed by function, arguments and settings.
_measurements: dict[Any, Any] = {}


def cache_measurement(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Cache a function's measurements, keyed by its arguments and the settings that affect the choice of kernels."""

    @functools.wraps(function)
    def cached(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        settings = torch.get_num_threads(), torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
        key = function, args, tuple(kwargs.items()), settings
        if key not in _measurements:
            # transformers modules run under a mode that replaces `F.linear` with `linear`. The padding in `linear`
            # would hide how a matmul depends on the number of rows.
            with torch._C.DisableTorchFunction():
                _measurements[key] = function(*args, **kwargs)
        return _measurements[key]

    return cached


@functools.cache
def has_bf16_instructions() -> bool:
    """Return whether torch's matmul backend (oneDNN) uses native bf16 instructions on this CPU."""
    has_mkldnn = torch.backends.mkldnn.is_available()
    if not has_mkldnn or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    # On AVX-512 CPUs without bf16 instructions, oneDNN emulates them.
    return torch.cpu._is_avx512_bf16_supported() or not torch.cpu._is_avx512_supported()


def matmul_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the CPU multiplies `dtype` operands.

    This is fp32 if `dtype` is bf16 and the CPU has no bf16 instructions, else `dtype`.
    Without bf16 instructions, a bf16 matmul takes 2 to 12 times as long as an fp32 matmul of the same operands, and the
    result for a row depends on the number of rows. The result of the fp32 matmul is rounded to bf16.
    """
    return torch.float32 if dtype == torch.bfloat16 and not has_bf16_instructions() else dtype


def _is_upcast(x: Tensor) -> bool:
    """Return whether x is upcast to fp32 for matmuls on the CPU."""
    return x.device.type == "cpu" and matmul_dtype(x.dtype) != x.dtype


def bmm(x: Tensor, y: Tensor) -> Tensor:
    """Multiply x [n, R, i] by y [n, i, j] like `torch.bmm`; on the CPU, multiply in `matmul_dtype`."""
    if not _is_upcast(x):
        return torch.bmm(x, y)
    return torch.bmm(x.float(), y.float()).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply `F.linear` to x [T, in]; on the CPU, the result is batch-invariant."""
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    out_features, in_features = weight.shape
    variant = matmul_variant(in_features, out_features, matmul_dtype(x.dtype))
    if variant.is_tiled or out_features < MIN_COLUMNS or _is_upcast(x):
        return _Matmul.apply(x, weight, bias, variant)
    num_rows = len(x)
    if num_rows < variant.num_rows:
        return F.linear(pad_rows(x, variant.num_rows), weight, bias)[:num_rows]
    return F.linear(x, weight, bias)


class _Matmul(torch.autograd.Function):
    """`F.linear` computed by `_batch_invariant_matmul` in `matmul_dtype`.

    Backward neither tiles nor pads: gradients need not be batch-invariant.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, variant: MatmulVariant) -> Tensor:
        """Return the product [T, out]."""
        ctx.save_for_backward(x, weight)
        upcast_dtype = matmul_dtype(x.dtype)
        # The matmul itself adds the bias, just as it does without padding. A separate addition would round twice.
        upcast_bias = None if bias is None else pad_rows(bias.to(upcast_dtype), MIN_COLUMNS)
        product = functools.partial(F.linear, bias=upcast_bias)
        out = _batch_invariant_matmul(product, x.to(upcast_dtype), weight.to(upcast_dtype), variant)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Return the gradients with respect to x, weight and bias."""
        x, weight = ctx.saved_tensors
        upcast_dtype = matmul_dtype(grad.dtype)
        upcast_grad = grad.to(upcast_dtype)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = (upcast_grad @ weight.to(upcast_dtype)).to(grad.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (upcast_grad.t() @ x.to(upcast_dtype)).to(grad.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias, None


def _batch_invariant_matmul(
    product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, variant: MatmulVariant
) -> Tensor:
    """Return the contiguous product [T, out], computed with this variant and with at least MIN_COLUMNS columns."""
    num_rows, num_columns = len(x), len(weight)
    weight = pad_rows(weight, MIN_COLUMNS)
    if variant.is_tiled:
        tiles = (pad_rows(tile, variant.num_rows) for tile in x.split(variant.num_rows))
        out = torch.cat([product(tile, weight) for tile in tiles])
    else:
        out = product(pad_rows(x, variant.num_rows), weight)
    return out[:num_rows, :num_columns].contiguous()


def apply_activation(x: Tensor, function: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    """Apply an elementwise function to x [T, width]. Padding lets the vectorized kernel compute every element."""
    width = x.shape[1]
    num_padding = -width % VECTOR_WIDTH
    if num_padding == 0:
        return function(x)
    padded = F.pad(x, (0, num_padding))
    return function(padded)[:, :width]


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for logits, softmax and reductions of `dtype` tensors: fp32, or fp64 if `dtype` is fp64."""
    return torch.promote_types(dtype, torch.float32)


def mm_fp32_out(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply a by b, each rounded to `dtype`; accumulate and return the product in fp32 (fp64 if `dtype` is fp64)."""
    upcast_dtype = at_least_fp32(dtype)
    if a.device.type != "cpu" and dtype != upcast_dtype:
        return torch.mm(a.to(dtype), b.to(dtype), out_dtype=upcast_dtype)
    if matmul_dtype(dtype) != torch.bfloat16 or b.numel() <= MAX_UPCAST_OPERAND:
        return torch.mm(a.to(upcast_dtype), b.to(upcast_dtype))
    # torch.mm has no out_dtype on the CPU. An fp32 matmul that may round its operands to bf16 gives the same result at
    # bf16 speed.
    mkldnn_matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    saved_precision = mkldnn_matmul.fp32_precision
    mkldnn_matmul.fp32_precision = "bf16"
    try:
        return torch.mm(a.to(upcast_dtype), b.to(upcast_dtype))
    finally:
        mkldnn_matmul.fp32_precision = saved_precision


def head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return contiguous logits [T, V] for hidden [T, D] and weight [V, D], accumulated in at least fp32."""
    if hidden.device.type != "cpu":
        return _head_matmul(hidden, weight)
    variant = matmul_variant(weight.shape[1], len(weight), matmul_dtype(hidden.dtype), is_head=True)
    return _batch_invariant_matmul(_head_matmul, hidden, weight, variant)


def _head_matmul(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the product [T, V] of hidden [T, D] and weight [V, D], in at least fp32."""
    return mm_fp32_out(hidden, weight.t(), hidden.dtype)


@cache_measurement
def matmul_variant(num_in: int, num_out: int, dtype: torch.dtype, *, is_head: bool = False) -> MatmulVariant:
    """Return the fastest variant of x [T, in] @ W [in, out] whose rows are bitwise identical for every T.

    Return INEXACT if there is no such variant, or if torch uses several threads, because multithreaded matmuls are not
    guaranteed to be batch-invariant. is_head: whether to measure `head_logits` instead of `linear`.
    """
    if torch.get_num_threads() > 1:
        return INEXACT
    num_columns = max(MIN_COLUMNS, min(num_out, MAX_PROBED_WEIGHT // num_in))
    num_distinct_rows = PROBE_PERIOD if num_in >= 8 else PROBE_PERIOD_SHORT_SUMS
    (x,), (weight,) = make_cancelling_operands(1, num_distinct_rows, num_in, num_columns, dtype)
    product = _head_matmul if is_head else F.linear
    row_counts = [
        num_rows
        for num_rows in PROBED_ROWS
        if num_rows <= 513 or num_rows * weight.numel() <= MAX_PROBED_WORK
    ]
    num_repeats = -(-row_counts[-1] // num_distinct_rows)
    repeated_x = x.repeat(num_repeats, 1)
    # For small row counts, test several slices, so that the slices cover every distinct row.
    row_slices = [slice(i, i + n) for n in row_counts for i in range(0, max(1, num_distinct_rows - n + 1), n)]
    for variant in VARIANTS:
        expected = _batch_invariant_matmul(product, x, weight, variant).repeat(num_repeats, 1)
        if all(
            torch.equal(_batch_invariant_matmul(product, repeated_x[part], weight, variant), expected[part])
            for part in row_slices
        ):
            return variant
    return INEXACT


def _column_shards_match(num_in: int, num_out: int, dtype: torch.dtype, num_parts: int) -> bool:
    """Return whether columns computed in parts, as in `shards`, are bitwise identical to the full matmul's columns."""
    num_columns = min(num_out, MAX_PROBED_WEIGHT // num_in)
    (x,), (weight,) = make_cancelling_operands(1, 128, num_in, num_columns, dtype)
    x, weight = x.to(dtype), weight.to(dtype)
    weight_shards = weight.split(-(-num_columns // num_parts))
    return all(
        torch.equal(
            torch.cat([linear(x[:rows], part) for part in weight_shards], 1), linear(x[:rows], weight)
        )
        for rows in (1, 16, 33, 128)
    )


def is_batch_invariant(
    shapes: list[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_head: bool = False,
    num_shards: int = 1,
) -> bool:
    """Return whether each row of x [T, in] @ W [in, out] is bitwise identical for every T, for all `shapes` (in, out).

    Tests `linear`, or `head_logits` if `is_head`. With several shards, also tests whether computing the columns in
    `num_shards` parts, as `shards` does, gives results bitwise identical to the full matmul. Returns False on CUDA,
    without testing.
    """
    if device.type != "cpu":
        return False
    for num_in, num_out in set(shapes):
        for width in {num_out, -(-num_out // num_shards)}:
            if matmul_variant(num_in, width, matmul_dtype(dtype), is_head=is_head) == INEXACT:
                return False
        if num_shards > 1 and not _column_shards_match(num_in, num_out, dtype, num_shards):
            return False
    return True


def make_cancelling_operands(
    n: int, num_rows: int, num_in: int, num_out: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return random x [n, num_rows, num_in] and y [n, num_out, num_in] for which x @ y.T is 0 up to rounding.

    With these operands, reordering the sum changes most elements. With arbitrary operands, only one element in 30,000
    would change after rounding to bf16. The terms deliberately differ in magnitude: a few terms of equal magnitude
    would sum exactly in any order. The operands are in `matmul_dtype(dtype)`.
    """
    generator = torch.Generator().manual_seed(0)
    num_pairs = num_in // 2
    permutation = torch.randperm(num_pairs, generator=generator)
    magnitudes = torch.exp2(torch.randint(-9, 10, (num_pairs,), generator=generator).float())
    x = torch.randn(n, num_rows, num_pairs, generator=generator) * magnitudes
    y = torch.randn(n, num_out, num_pairs, generator=generator)
    # If num_in is odd, the unpaired term is so small that it is lost unless it is added last.
    unpaired_x = torch.randn(n, num_rows, num_in % 2, generator=generator) / 4096
    unpaired_y = torch.randn(n, num_out, num_in % 2, generator=generator)
    x = torch.cat([x, -x[..., permutation], unpaired_x], -1)
    y = torch.cat([y, y[..., permutation], unpaired_y], -1)
    return x.to(matmul_dtype(dtype)), y.to(matmul_dtype(dtype))
