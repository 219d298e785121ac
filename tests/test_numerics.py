"""Row-invariant products: they are the usual products, and a row's bits do not depend on the rows around it."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from minirl.model import batch_invariance, padding

CPU = torch.device("cpu")
EPS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8}
SHAPES = [(8, 24), (64, 131), (131, 64), (172, 64), (515, 48), (768, 96)]
HEAD_SHAPES = [(64, 301), (64, 701), (515, 301), (768, 2048)]
ROWS = (1, 2, 4, 6, 10, 12, 20, 40, 70, 130, 190)  # mostly not those that the probe tries


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_is_product(got, x, weight, bias, eps):
    """Each element is within `eps` of the exact sum, relative to the sum of the terms' magnitudes."""
    terms = x.double().abs() @ weight.double().abs().t() + (0 if bias is None else bias.double().abs())
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert ((got.double() - exact).abs() <= eps * terms).all()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [16, 63, 64, 65, 200])
@pytest.mark.parametrize("num_in", [64, 512, 515, 768])
@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_linear_is_the_exact_product_up_to_rounding(num_in, rows, has_bias, dtype):
    """`linear` has F.linear's meaning, shape and dtype at every row count, tiled or not."""
    x, weight = randn(rows, num_in, dtype=dtype), randn(24, num_in, dtype=dtype, seed=1)
    bias = randn(24, dtype=dtype, seed=2) if has_bias else None
    got = batch_invariance.linear(x, weight, bias)
    assert got.shape == (rows, 24)
    assert got.dtype == dtype
    assert_is_product(got, x, weight, bias, EPS[dtype])


@pytest.mark.parametrize("num_in", [64, 515, 768])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_linear_has_the_gradients_of_torch_linear(num_in, dtype, tolerance):
    """Tiling the rows changes no gradient of the input, the weight or the bias."""
    upstream = randn(130, 24, seed=3)
    grads = []
    for function, kind in ((batch_invariance.linear, dtype), (F.linear, torch.float64)):
        sources = [randn(130, num_in), randn(24, num_in, seed=1), randn(24, seed=2)]
        leaves = [source.to(dtype).to(kind).requires_grad_() for source in sources]
        function(*leaves).backward(upstream.to(dtype).to(kind))
        grads.append([leaf.grad.double() for leaf in leaves])
    for got, expected in zip(*grads, strict=True):
        assert (got - expected).norm() <= tolerance * expected.norm()


def padded_linear(x, weight):
    bias = randn(len(weight), dtype=x.dtype, seed=2)
    return batch_invariance.linear(padding.pad_rows(x), weight, bias)[: len(x)]


@pytest.mark.parametrize(
    ("product", "shape"),
    [
        *((padded_linear, shape) for shape in SHAPES),
        *((batch_invariance.head_logits, shape) for shape in HEAD_SHAPES),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_products_do_not_depend_on_their_batch(product, shape, dtype):
    """Where the probe says so, a row has the same bits in any batch: a token's logits sampled alone, or when scored."""
    is_head = product is batch_invariance.head_logits
    if not batch_invariance.is_batch_invariant([shape], dtype, CPU, is_head=is_head):
        pytest.skip("this machine's matrix library gives rows other bits in other batches")
    x, weight = randn(200, shape[0], dtype=dtype), randn(*shape[::-1], dtype=dtype, seed=1)
    expected = product(x, weight)
    for rows in ROWS:
        assert torch.equal(product(x[3 : 3 + rows], weight), expected[3 : 3 + rows]), f"{rows} rows"


@pytest.mark.parametrize("width", [1, 31, 32, 131, 172, 384])
@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_silu_and_its_gradient_equal_torch_and_rows_do_not_depend_on_their_batch(width, dtype):
    """At odd widths too: no element passes the scalar tail of the vectorised kernel, which rounds differently."""
    x = (4 * randn(200, width, dtype=dtype)).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    got, expected = batch_invariance.silu(x), F.silu(twin)
    upstream = randn(200, width, dtype=dtype, seed=1)
    got.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close((got, x.grad), (expected, twin.grad))
    for start, rows in itertools.product(range(9), ROWS):
        part = slice(start, start + rows)
        assert torch.equal(batch_invariance.silu(x[part]), got[part])


@pytest.mark.parametrize("rows", [1, 3, 16, 100])
@pytest.mark.parametrize("vocab", [300, 700])
@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_head_logits_are_wide_sums_of_narrow_inputs(rows, vocab, dtype):
    """bf16 inputs give fp32 logits with fp32's error, not bf16's; fp64 stays fp64. Pitfall 7."""
    assert 300 * 64 < batch_invariance.MAX_PLAIN_BF16 < 700 * 64  # both kinds of products
    hidden, head = randn(rows, 64, dtype=dtype), randn(vocab, 64, dtype=dtype, seed=1)
    got = batch_invariance.head_logits(hidden, head)
    assert got.shape == (rows, vocab)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_is_product(got, hidden, head, None, EPS[got.dtype])


@pytest.mark.parametrize("vocab", [300, 700])
@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_wide_mm_rounds_its_factors_and_nothing_else(vocab, dtype):
    """fp32 gradients of logits times bf16 weights: the factors are bf16's, the sums and results fp32's."""
    a, b = randn(40, 64, dtype=batch_invariance.at_least_fp32(dtype)), randn(64, vocab, dtype=dtype, seed=1)
    got = batch_invariance.wide_mm(a, b, dtype)
    assert got.dtype == batch_invariance.at_least_fp32(dtype)
    assert_is_product(got, a, b.t(), None, EPS[dtype])


@pytest.mark.parametrize("before", ["none", "ieee", "tf32"])
def test_wide_mm_leaves_the_precision_of_other_products_alone(before):
    """The process's switch is back where it was, after an error too: no other fp32 product is rounded."""
    matmul = torch.backends.mkldnn.matmul
    default, matmul.fp32_precision = matmul.fp32_precision, before
    try:
        a, b = randn(40, 64, dtype=torch.bfloat16), randn(64, 700, dtype=torch.bfloat16)
        batch_invariance.wide_mm(a, b, torch.bfloat16)
        assert matmul.fp32_precision == before
        with pytest.raises(RuntimeError):
            batch_invariance.wide_mm(a[:, :5], b, torch.bfloat16)
        assert matmul.fp32_precision == before
    finally:
        matmul.fp32_precision = default


@pytest.mark.parametrize(
    ("rows", "multiple", "padded"),
    [(0, 1, 16), (15, 1, 16), (16, 1, 16), (17, 1, 17), (64, 64, 64), (65, 64, 128), (17, 4, 20)],
)
@pytest.mark.parametrize("trailing", [(), (2, 3)], ids=str)
def test_pad_rows_appends_zero_rows_up_to_the_minimum_and_multiple(rows, multiple, padded, trailing):
    """The given rows stay in front, bit for bit; only zeros follow."""
    x = randn(rows, *trailing, dtype=torch.bfloat16)
    got = padding.pad_rows(x, multiple)
    assert got.shape == (padded, *trailing)
    assert torch.equal(got[:rows], x)
    assert not got[rows:].any()


@pytest.mark.parametrize(("rows", "padded"), [(0, 1), (1, 1), (2, 2), (17, 17)])
def test_off_the_cpu_only_what_has_no_rows_is_padded(rows, padded):
    """A rank without tokens has one row for nothing, which its layers can tell heads of."""
    assert padding.pad_rows(torch.empty(rows, 6, device="meta")).shape == (padded, 6)


@pytest.mark.parametrize(
    "error",
    [
        lambda x: torch.full((len(x), 1), 1e-5 * len(x)),
        lambda x: torch.full((len(x), 1), 1e-5 * (len(x) < 17)),
        lambda x: torch.full((len(x), 1), 1e-5 * (len(x) == 129)),
        lambda x: 1e-5 * (torch.arange(len(x))[:, None] % 8),
        lambda x: 1e-5 * x.mean().expand(len(x), 1),
    ],
    ids=["number_of_rows", "few_rows", "one_number_of_rows", "place", "neighbours"],
)
def test_probe_notices_products_that_depend_on_other_rows(monkeypatch, error):
    """`is_batch_invariant` is not a rubber stamp: a small dependence on the batch makes it False."""

    def linear(x, weight, bias=None):
        exact = (x.double()[:, None] * weight.double()).sum(
            -1
        )  # one reduction per element: any row count, same bits
        return exact.float() + scale * error(x)

    monkeypatch.setattr(batch_invariance, "linear", linear)
    scale = 0.0
    assert batch_invariance.is_batch_invariant([(12, 6)], torch.float32, CPU)
    scale = 1.0
    assert not batch_invariance.is_batch_invariant([(12, 6)], torch.float32, CPU)


def test_probe_notices_sums_in_another_order_that_rounding_hides(monkeypatch):
    """A bf16 product that a number of rows sums in another order differs in few elements of arbitrary factors."""

    def linear(x, weight, bias=None):
        order = torch.arange(x.shape[1]).flip(0) if len(x) == 129 else torch.arange(x.shape[1])
        total = torch.zeros(len(x), len(weight))
        for i in order:
            total += x[:, i : i + 1].float() * weight[:, i].float()
        return total.bfloat16()

    monkeypatch.setattr(batch_invariance, "has_bf16_instructions", lambda: True)
    x, weight = randn(600, 16, dtype=torch.bfloat16), randn(4, 16, dtype=torch.bfloat16, seed=1)
    assert torch.equal(linear(x[:129], weight), linear(x, weight)[:129])
    monkeypatch.setattr(batch_invariance, "linear", linear)
    assert not batch_invariance.is_batch_invariant([(16, 4)], torch.bfloat16, CPU)


@pytest.mark.parametrize("num_in", [64, 515])
def test_without_bf16_instructions_products_are_those_of_fp32_rounded(num_in, monkeypatch):
    """`linear`, its gradients and `bmm`: the bits of fp32, so they vary as little with rows and layouts as fp32's.

    Pitfall 38.
    """
    monkeypatch.setattr(batch_invariance, "has_bf16_instructions", lambda: False)
    x, weight, upstream = randn(40, num_in), randn(24, num_in, seed=1), randn(40, 24, seed=2)
    leaves = [factor.bfloat16().requires_grad_() for factor in (x, weight)]
    wide_leaves = [leaf.detach().float().requires_grad_() for leaf in leaves]
    got, expected = batch_invariance.linear(*leaves), F.linear(*wide_leaves)
    assert torch.equal(got, expected.bfloat16())
    got.backward(upstream.bfloat16())
    expected.backward(upstream.bfloat16().float())
    for leaf, wide in zip(leaves, wide_leaves, strict=True):
        assert torch.equal(leaf.grad, wide.grad.bfloat16())
    a, b = randn(3, 16, num_in, dtype=torch.bfloat16), randn(3, num_in, 24, dtype=torch.bfloat16, seed=1)
    assert torch.equal(batch_invariance.bmm(a, b), torch.bmm(a.float(), b.float()).bfloat16())


def test_probe_tries_every_shape(monkeypatch):
    """One shape that varies is enough for a False, wherever it stands in the list."""

    def linear(x, weight):
        """Only products of 9 inputs depend on the number of rows."""
        return torch.full((len(x), len(weight)), float(len(x) if x.shape[1] == 9 else 0))

    monkeypatch.setattr(batch_invariance, "linear", linear)
    assert batch_invariance.is_batch_invariant([(8, 4), (12, 4)], torch.float32, CPU)
    for shapes in itertools.permutations([(8, 4), (9, 4), (12, 4)]):
        assert not batch_invariance.is_batch_invariant(shapes, torch.float32, CPU)


def test_probe_promises_nothing_off_the_cpu():
    """On CUDA the answer is False, without a device to ask."""
    assert not batch_invariance.is_batch_invariant([(8, 8)], torch.float32, torch.device("cuda"))
