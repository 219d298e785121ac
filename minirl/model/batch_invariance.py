"""Matrix products in which the result for one row does not depend on how many other rows there are.

Sampling and scoring see the same token in batches of different sizes. Their logprobs can only be equal bit
for bit if every product gives a row the same bits whatever the batch. Matrix libraries choose their kernel by
shape. So on the CPU a rank computes on one thread (`ranks.process_group.start`), no product has fewer than MIN_COLUMNS
columns, and bf16 is multiplied in fp32 where the CPU has no bf16 instructions (`matmul_dtype`). The rest is measured
on the machine, once for each shape and dtype: `matmul_form` says to how many rows a product is padded, or whether it
is computed in tiles of a fixed number of rows. `is_batch_invariant` says whether that suffices for linear layers and
the head, `portable_attention.min_queries` for attention. Norms and elementwise functions take any number of rows.

On CUDA none of this is done, and the bits may differ. The gap between the logprobs is measured at every step
instead.
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


class MatmulForm(NamedTuple):
    """How products of one shape are computed: with at least `num_rows` rows, the last ones perhaps padding.

    is_tiled: `num_rows` rows at a time.
    """

    num_rows: int
    is_tiled: bool = False


# The forms that `matmul_form` tries, the fastest first. With few rows MKL and oneDNN use other kernels: seen at 1 to
# 15 rows on Intel; on AMD at 1 to 3, and in bf16 products of few terms and columns up to 15.
FORMS = (MatmulForm(4), MatmulForm(8), MatmulForm(16), MatmulForm(64, is_tiled=True))
# The form of products for which nothing is promised.
INEXACT = MatmulForm(1)
# With fewer columns, kernels of matrix and vector compute a product, or such that give each place its own bits.
MIN_COLUMNS = 64
# Most elements of a bf16 factor for which, at few rows, MKL's fp32 product is the fastest.
MAX_PLAIN_BF16 = 1 << 15
# Numbers of rows that `matmul_form` tries: all up to 64, those around a kernel's blocks, and for small shapes, whose
# kernels change at a number of multiplications, more. No form has fewer than the first.
PROBED_ROWS = (
    *range(FORMS[0].num_rows, 66),
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
# Most multiplications in a product of `matmul_form` with more than 513 rows, and most elements of its weight.
MAX_PROBED_WORK = 1 << 25
MAX_PROBED_WEIGHT = 1 << 22
# Different rows of a product of `matmul_form`; no divisor or multiple of a kernel's. In bf16 another order of fewer
# than 8 terms changes one element in 5,000.
PROBE_PERIOD = 11
PROBE_PERIOD_OF_FEW_TERMS = 523
# A vectorised function and its scalar tail differ in the last bit. Multiples of this width have no tail.
VECTOR_WIDTH = 32


# What the functions of `measured` returned, by function, arguments and settings.
_measurements: dict[Any, Any] = {}


def measured(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Cache what a function measures of products, by its arguments and by what torch chooses kernels by."""

    @functools.wraps(function)
    def cached(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        settings = torch.get_num_threads(), torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
        key = function, args, tuple(kwargs.items()), settings
        if key not in _measurements:
            # transformers' modules run under a mode that replaces `F.linear` with `linear`, whose padding would hide a
            # product's dependence on its rows.
            with torch._C.DisableTorchFunction():
                _measurements[key] = function(*args, **kwargs)
        return _measurements[key]

    return cached


@functools.cache
def has_bf16_instructions() -> bool:
    """Return whether torch's matrix library multiplies bf16 with instructions of this CPU."""
    has_mkldnn = torch.backends.mkldnn.is_available()
    if not has_mkldnn or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    # On a CPU that has AVX-512 without them, oneDNN emulates them.
    return torch.cpu._is_avx512_bf16_supported() or not torch.cpu._is_avx512_supported()


def matmul_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the CPU multiplies factors in `dtype`: fp32 for bf16 without bf16 instructions.

    There a bf16 product takes 2 to 12 times as long as the fp32 product of the same factors, and a row's bits depend on
    the number of rows. The fp32 product is rounded to bf16.
    """
    return torch.float32 if dtype == torch.bfloat16 and not has_bf16_instructions() else dtype


def _is_upcast(x: Tensor) -> bool:
    """Return whether products of x are computed in fp32 although x is not."""
    return x.device.type == "cpu" and matmul_dtype(x.dtype) != x.dtype


def bmm(x: Tensor, y: Tensor) -> Tensor:
    """`torch.bmm` of x [n, R, i] and y [n, i, j]."""
    if not _is_upcast(x):
        return torch.bmm(x, y)
    return torch.bmm(x.float(), y.float()).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of x [T, in]; on the CPU batch-invariant."""
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    num_columns, num_terms = weight.shape
    form = matmul_form(num_terms, num_columns, matmul_dtype(x.dtype))
    if form.is_tiled or num_columns < MIN_COLUMNS or _is_upcast(x):
        return _Matmul.apply(x, weight, bias, form)
    num_rows = len(x)
    if num_rows < form.num_rows:
        return F.linear(pad_rows(x, form.num_rows), weight, bias)[:num_rows]
    return F.linear(x, weight, bias)


class _Matmul(torch.autograd.Function):
    """`F.linear` by `_matmul_in_form`, in the dtype of `matmul_dtype`.

    The gradients are neither tiled nor padded: nothing needs to equal them bit for bit.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, form: MatmulForm) -> Tensor:
        """See the class."""
        ctx.save_for_backward(x, weight)
        upcast_dtype = matmul_dtype(x.dtype)
        # Added by the product, as in one that is not padded: alone it would be rounded twice.
        upcast_bias = None if bias is None else pad_rows(bias.to(upcast_dtype), MIN_COLUMNS)
        product = functools.partial(F.linear, bias=upcast_bias)
        return _matmul_in_form(product, x.to(upcast_dtype), weight.to(upcast_dtype), form).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """See the class."""
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


def _matmul_in_form(
    product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, form: MatmulForm
) -> Tensor:
    """Return the contiguous product [T, out], computed in this form with MIN_COLUMNS columns or more."""
    num_rows, num_columns = len(x), len(weight)
    weight = pad_rows(weight, MIN_COLUMNS)
    if form.is_tiled:
        tiles = (pad_rows(tile, form.num_rows) for tile in x.split(form.num_rows))
        out = torch.cat([product(tile, weight) for tile in tiles])
    else:
        out = product(pad_rows(x, form.num_rows), weight)
    return out[:num_rows, :num_columns].contiguous()


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


def mm_fp32_out(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply a and b, rounded to `dtype`; sums and result are in fp32 (fp64 for fp64)."""
    upcast_dtype = at_least_fp32(dtype)
    if a.device.type != "cpu" and dtype != upcast_dtype:
        return torch.mm(a.to(dtype), b.to(dtype), out_dtype=upcast_dtype)
    if matmul_dtype(dtype) != torch.bfloat16 or b.numel() <= MAX_PLAIN_BF16:
        return torch.mm(a.to(upcast_dtype), b.to(upcast_dtype))
    # mm has no out_dtype on the CPU. An fp32 product that may round its factors to bf16 has the same result,
    # at the speed of bf16.
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    precision_before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        return torch.mm(a.to(upcast_dtype), b.to(upcast_dtype))
    finally:
        matmul.fp32_precision = precision_before


def head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return contiguous logits [T, V] of hidden [T, D] and weight [V, D]; sums and logits are fp32 (fp64 for fp64)."""
    if hidden.device.type != "cpu":
        return _head_matmul(hidden, weight)
    form = matmul_form(weight.shape[1], len(weight), matmul_dtype(hidden.dtype), is_head=True)
    return _matmul_in_form(_head_matmul, hidden, weight, form)


def _head_matmul(hidden: Tensor, weight: Tensor) -> Tensor:
    """The wide product [T, V] of hidden [T, D] and weight [V, D]."""
    return mm_fp32_out(hidden, weight.t(), hidden.dtype)


@measured
def matmul_form(num_in: int, num_out: int, dtype: torch.dtype, *, is_head: bool = False) -> MatmulForm:
    """Return the fastest form in which products x [T, in] @ W [in, out] give each row the same bits at every T.

    INEXACT if there is none, and with several threads, which promise nothing. is_head: of `head_logits`.
    """
    if torch.get_num_threads() > 1:
        return INEXACT
    num_columns = max(MIN_COLUMNS, min(num_out, MAX_PROBED_WEIGHT // num_in))
    period = PROBE_PERIOD if num_in >= 8 else PROBE_PERIOD_OF_FEW_TERMS
    (x,), (weight,) = cancelling_operands(1, period, num_in, num_columns, dtype)
    product = _head_matmul if is_head else F.linear
    numbers = [rows for rows in PROBED_ROWS if rows <= 513 or rows * weight.numel() <= MAX_PROBED_WORK]
    repeats = -(-numbers[-1] // period)
    rows = x.repeat(repeats, 1)
    # All different rows for a small number of rows, too.
    parts = [slice(i, i + n) for n in numbers for i in range(0, max(1, period - n + 1), n)]
    for form in FORMS:
        expected = _matmul_in_form(product, x, weight, form).repeat(repeats, 1)
        if all(
            torch.equal(_matmul_in_form(product, rows[part], weight, form), expected[part]) for part in parts
        ):
            return form
    return INEXACT


def _column_shards_match(num_in: int, num_out: int, dtype: torch.dtype, num_parts: int) -> bool:
    """Return whether columns computed in parts, as `shards` does, have the bits of the whole product."""
    num_columns = min(num_out, MAX_PROBED_WEIGHT // num_in)
    (x,), (weight,) = cancelling_operands(1, 128, num_in, num_columns, dtype)
    x, weight = x.to(dtype), weight.to(dtype)
    parts = weight.split(-(-num_columns // num_parts))
    return all(
        torch.equal(torch.cat([linear(x[:rows], part) for part in parts], 1), linear(x[:rows], weight))
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
    """Return whether products x [T, in] @ W [in, out] of all these (in, out) give each row the same bits at every T.

    Measures `linear`, or `head_logits` if `is_head`: by `matmul_form`, and whether columns that are computed in
    `num_shards` parts, as `shards` does, have the bits of the whole. False on CUDA, without measuring.
    """
    if device.type != "cpu":
        return False
    for num_in, num_out in set(shapes):
        for width in {num_out, -(-num_out // num_shards)}:
            if matmul_form(num_in, width, matmul_dtype(dtype), is_head=is_head) == INEXACT:
                return False
        if num_shards > 1 and not _column_shards_match(num_in, num_out, dtype, num_shards):
            return False
    return True


def cancelling_operands(
    n: int, num_rows: int, num_in: int, num_out: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return random x [n, num_rows, num_in] and y [n, num_out, num_in] for which x @ y.T is 0 up to rounding.

    Another order of the sum changes most elements. Arbitrary factors would hide that: of products rounded to bf16 one
    in 30,000 shows it. The terms differ in size, since few terms of one size have an exact sum in any order. The
    factors have the dtype in which products in `dtype` are computed.
    """
    generator = torch.Generator().manual_seed(0)
    half = num_in // 2
    order = torch.randperm(half, generator=generator)
    sizes = torch.exp2(torch.randint(-9, 10, (half,), generator=generator).float())
    x = torch.randn(n, num_rows, half, generator=generator) * sizes
    y = torch.randn(n, num_out, half, generator=generator)
    # An odd term is lost unless it is added last.
    odd_x = torch.randn(n, num_rows, num_in % 2, generator=generator) / 4096
    odd_y = torch.randn(n, num_out, num_in % 2, generator=generator)
    x = torch.cat([x, -x[..., order], odd_x], -1)
    y = torch.cat([y, y[..., order], odd_y], -1)
    return x.to(matmul_dtype(dtype)), y.to(matmul_dtype(dtype))
