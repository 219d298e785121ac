"""Batch-invariant matmuls equal ordinary matmuls, and a row's result does not depend on other rows."""

import functools
import random

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from minirl.model import batch_invariance
from minirl.model.batch_invariance import INEXACT, MatmulVariant
from minirl.model.layers import ACTIVATIONS, GatedActivation
from support.tensors import randn

CPU = torch.device("cpu")
EPS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8}


@pytest.mark.parametrize("rows", [1, 16, 63, 64, 65, 200])
@pytest.mark.parametrize(("num_in", "num_out"), [(64, 24), (515, 24), (768, 24), (64, 300), (64, 700)])
@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_products_are_exact_up_to_rounding(num_in, num_out, rows, dtype):
    """`linear` has F.linear's result, shape and dtype at every row count, tiled or not.

    bf16 inputs give fp32 logits with fp32's error, and fp64 stays fp64. Pitfall 7. `mm_fp32_out` rounds only its
    operands, such as fp32 gradients of logits.
    """
    assert 300 * 64 < batch_invariance.MAX_UPCAST_OPERAND < 700 * 64  # both kinds of matmuls
    wide = batch_invariance.at_least_fp32(dtype)
    x, wide_x = randn(rows, num_in, dtype=dtype), randn(rows, num_in, dtype=wide)
    weight, bias = randn(num_out, num_in, dtype=dtype, seed=1), randn(num_out, dtype=dtype, seed=2)
    for got, kind, eps, terms in (
        (batch_invariance.linear(x, weight), dtype, EPS[dtype], (x, weight)),
        (batch_invariance.linear(x, weight, bias), dtype, EPS[dtype], (x, weight, bias)),
        (batch_invariance.head_logits(x, weight), wide, EPS[wide], (x, weight)),
        (batch_invariance.mm_fp32_out(wide_x, weight.t(), dtype), wide, EPS[dtype], (wide_x, weight)),
    ):
        exact = F.linear(*(term.double() for term in terms))
        magnitudes = F.linear(*(term.double().abs() for term in terms))
        assert got.dtype == kind
        assert ((got.double() - exact).abs() <= eps * magnitudes).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("width", [32, 131])
@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_the_gate_has_the_bits_of_autograd(name, width, dtype):
    """This covers values and both gradients, even of strided views, which a fused projection gives."""
    activate = functools.partial(batch_invariance.apply_activation, function=ACTIVATIONS[name])
    results = []
    for gated in (
        lambda gate, up: GatedActivation.apply(gate, up, activate),
        lambda gate, up: activate(gate) * up,
    ):
        x = (4 * randn(9, 2 * width, dtype=dtype)).requires_grad_()
        out = gated(*x.chunk(2, 1))
        results.append((out, *torch.autograd.grad(out, x, randn(9, width, dtype=dtype, seed=1))))
    assert all(map(torch.equal, *results))


@pytest.fixture
def library(monkeypatch):
    """Return a function that replaces the matrix library's matmul and forgets all measurements."""

    def replace(linear):
        monkeypatch.setattr(F, "linear", linear)
        monkeypatch.setattr(batch_invariance, "_measurements", {})

    return replace


def exact_product(x, weight):
    """Multiply with one reduction per element, which gives the same bits for any number of rows."""
    return (x.double()[:, None] * weight.double()).sum(-1)


def rows_that_differ(product, x, weight, rng):
    """Return the row counts, each with a random start, whose matmul differs from the same rows of the full matmul."""
    expected = product(x, weight)
    starts = {
        rows: rng.randint(0, len(x) - rows)
        for rows in (*range(1, 65), 129, *rng.sample(range(65, len(x)), 12))
    }
    return [
        rows
        for rows, start in starts.items()
        if not torch.equal(product(x[start : start + rows], weight), expected[start : start + rows])
    ]


def at(*rows):
    """Return an error function for matmuls with these numbers of rows."""
    return lambda x: torch.full((len(x), 1), 1e-5 * (len(x) in rows))


TILES = MatmulVariant(64, is_tiled=True)


@pytest.mark.parametrize(
    ("error", "variant"),
    [
        (at(), MatmulVariant(4)),
        (at(1, 2, 3), MatmulVariant(4)),
        (at(4), MatmulVariant(8)),
        (at(*range(9)), MatmulVariant(16)),
        (at(*range(17)), TILES),
        (at(129), TILES),
        (at(47), TILES),
        (lambda x: 1e-5 * (torch.arange(len(x))[:, None] % 8), INEXACT),
        (lambda x: 1e-5 * x.mean().expand(len(x), 1), INEXACT),
    ],
    ids="none 1-3 4 0-8 0-16 129 47 place neighbours".split(),
)
def test_the_probe_chooses_the_cheapest_form_that_hides_what_products_depend_on(library, error, variant):
    """A small dependence on the batch requires more rows or tiles, or makes the shape inexact.

    Each shape has its own variant, in which a row has the same bits in any batch.
    """
    library(lambda x, weight, bias=None: exact_product(x, weight).float() + error(x) * (len(weight) < 100))
    for num_out, of_shape in ((6, variant), (70, variant), (130, MatmulVariant(4))):
        assert batch_invariance.matmul_variant(12, num_out, torch.float32) == of_shape
        factors = randn(140, 12), randn(num_out, 12, seed=1)
        differ = rows_that_differ(batch_invariance.linear, *factors, random.Random(0))
        assert bool(differ) == (of_shape == INEXACT)
    assert batch_invariance.is_batch_invariant([(12, 6)], torch.float32, CPU) == (variant != INEXACT)
    assert not batch_invariance.is_batch_invariant([(12, 6)], torch.float32, torch.device("cuda"))


def test_products_are_measured_again_under_settings_that_change_them(library, monkeypatch):
    """Settings are the number of threads (several threads are never exact) and the precision of fp32 matmuls."""
    rows_with_error = []
    library(lambda x, weight: exact_product(x, weight).float() + at(*rows_with_error)(x))

    def variant():
        return batch_invariance.matmul_variant(12, 70, torch.float32)

    assert variant() == MatmulVariant(4)
    rows_with_error += range(9)
    assert variant() == MatmulVariant(4), "measured only once"
    with monkeypatch.context() as other:
        other.setattr(torch, "get_num_threads", lambda: 2)
        assert variant() == INEXACT
    assert variant() == MatmulVariant(4)
    settings = torch.backends.mkldnn.matmul
    precision = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        assert variant() == MatmulVariant(16)
    finally:
        settings.fp32_precision = precision


def test_products_are_measured_as_torch_computes_them_whatever_replaces_them_meanwhile():
    """Under the TorchFunctionMode of transformers' modules, the probe would measure padded matmuls."""

    class RaisesAtEveryCall(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise AssertionError(f"the probe called {func} under a mode")

    batch_invariance._measurements.clear()
    with RaisesAtEveryCall():
        assert batch_invariance.matmul_variant(12, 70, torch.float32) != INEXACT


def test_the_probe_notices_sums_in_another_order_that_rounding_hides(library, monkeypatch):
    """If some row count changes the order of a bf16 sum, only a few elements of random matmuls differ."""

    def linear(x, weight):
        order = torch.arange(x.shape[1]).flip(0) if len(x) == 129 else torch.arange(x.shape[1])
        total = torch.zeros(len(x), len(weight))
        for i in order:
            total += x[:, i : i + 1].float() * weight[:, i].float()
        return total.bfloat16()

    monkeypatch.setattr(batch_invariance, "has_bf16_instructions", lambda: True)
    x, weight = randn(600, 4, dtype=torch.bfloat16), randn(4, 4, dtype=torch.bfloat16, seed=1)
    assert torch.equal(linear(x[:129], weight), linear(x, weight)[:129])
    library(linear)
    assert batch_invariance.matmul_variant(4, 4, torch.bfloat16) == TILES


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_shape_is_called_batch_invariant_that_is_not(dtype, seed):
    """Covers random, mostly narrow shapes for layers and head, with cancelling and with ordinary operands.

    Two shapes are from Qwen2.5-0.5B's MLP.
    """
    rng = random.Random(seed)
    limits = rng.choices([(16, 70), (70, 300), (1000, 40)], k=60)
    shapes = [(rng.randint(1, num_in), rng.randint(1, num_out)) for num_in, num_out in limits]
    wrong = []
    for shape in [*shapes, (896, 4864), (4864, 896)]:
        num_in, num_out = shape
        is_head = rng.random() < 0.25
        if batch_invariance.is_batch_invariant([shape], dtype, CPU, is_head=is_head):
            product = batch_invariance.head_logits if is_head else batch_invariance.linear
            num_rows = rng.choice([640, 3000 if num_in * num_out < 20_000 else 640])
            (x,), (weight,) = batch_invariance.make_cancelling_operands(1, num_rows, *shape, dtype)
            usual = randn(num_rows, num_in, seed=seed), randn(num_out, num_in, seed=seed + 1)
            for factors in ((x, weight), usual):
                if rows := rows_that_differ(product, *(factor.to(dtype) for factor in factors), rng):
                    wrong.append((shape, is_head, rows))
    assert not wrong


@pytest.mark.parametrize("num_in", [64, 515])
def test_without_bf16_instructions_products_are_those_of_fp32_rounded(num_in, monkeypatch):
    """`linear`, its gradients and `bmm` have fp32's bits, and depend as little on rows and layouts as fp32.

    Pitfall 38.
    """
    monkeypatch.setattr(batch_invariance, "has_bf16_instructions", lambda: False)
    shapes = ((40, num_in), (24, num_in), (24,), (40, 24))
    *rounded, upstream = [randn(*shape, dtype=torch.bfloat16) for shape in shapes]
    leaves = [factor.clone().requires_grad_() for factor in rounded]
    wide_leaves = [factor.float().requires_grad_() for factor in rounded]
    got, expected = batch_invariance.linear(*leaves), F.linear(*wide_leaves)
    assert torch.equal(got, expected.bfloat16())
    got.backward(upstream)
    expected.backward(upstream.float())
    for leaf, wide in zip(leaves, wide_leaves, strict=True):
        assert torch.equal(leaf.grad, wide.grad.bfloat16())
    a, b = randn(3, 16, num_in, dtype=torch.bfloat16), randn(3, num_in, 24, dtype=torch.bfloat16)
    assert torch.equal(batch_invariance.bmm(a, b), torch.bmm(a.float(), b.float()).bfloat16())
