"""Each Triton kernel that replaces operations of torch, under the interpreter: it computes the same."""

import pytest
import torch

from minirl.generation.sampling import inverse_cdf
from minirl.kernels.fused_gate import FusedGate
from minirl.kernels.fused_head import FusedLogprobs
from minirl.kernels.fused_sampling import sample_logits
from minirl.model import device_kernels
from minirl.model.batch_invariance import activate
from minirl.model.logprobs import MAX_LOGITS, chunk_width
from minirl.model.rotation import Rotation, rotate_pair
from minirl.training.scoring import ChunkedLogprobs
from support.engines import cached_model, make_engine, make_prompt, make_request
from support.interpreter import has_no_triton, mend_interpreter, needs_interpreter, run_with_compiler
from support.marks import slow

LARGEST_UNIFORM = 1 - 2.0**-53


@pytest.fixture
def interpreted(monkeypatch):
    """The choice of CUDA, on the CPU."""
    mend_interpreter(monkeypatch)
    monkeypatch.setattr(device_kernels, "are_used", lambda device: True)


def make_logits(kind: str, rows: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=generator)
    if kind in ("flat", "peaked"):
        return (0.1 if kind == "flat" else 8) * logits
    # Extreme: nine tokens in ten are impossible, whole blocks of them too, and one has nearly all probability.
    logits[:, torch.rand(vocab, generator=generator) < 0.9] = -torch.inf
    logits[:, 512:1024] = -torch.inf
    logits[:, vocab - 1] = 1e4
    logits[::2, vocab - 1] = 3.0
    return logits


@needs_interpreter
@pytest.mark.parametrize(
    ("kind", "vocab", "rows"),
    [
        ("extreme", 48, 12),
        ("extreme", 2049, 12),
        ("peaked", 512, 12),
        slow("extreme", 500, 12),
        slow("peaked", 2049, 12),
        slow("flat", 2049, 12),
        slow("peaked", 151936, 2),
    ],
)
def test_the_fused_sampler_takes_the_tokens_of_the_portable_one(kind, vocab, rows, interpreted):
    """From the same logits and noise, at temperature 0 and others, with the smallest and the largest uniform."""
    logits = make_logits(kind, rows, vocab)
    temperature = torch.tensor([1.0, 0.7, 0.0, 1.3, 0.25, 1.0]).repeat(2)[:rows]
    uniform = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    uniform[0], uniform[1] = LARGEST_UNIFORM, 0.0
    divisor = torch.where(temperature == 0, 1.0, temperature)[:, None]
    logprobs = torch.log_softmax(logits / divisor, -1)
    expected = torch.where(temperature == 0, logits.argmax(-1), inverse_cdf(logprobs, uniform))
    tokens, got = sample_logits(logits, temperature, uniform)
    assert (tokens.dtype, got.dtype) == (torch.int64, torch.float32)
    assert tokens.tolist() == expected.tolist()
    exact = torch.log_softmax((logits / divisor).double(), -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(got.double(), exact, rtol=1e-7, atol=1e-6)


@needs_interpreter
def test_a_nan_among_the_logits_shows_in_the_fused_samplers_logprob(interpreted):
    """The token is some token of the vocabulary, and its logprob is NaN, which the metrics refuse."""
    logits = torch.zeros(2, 700)
    logits[0, 600] = torch.nan
    tokens, logprobs = sample_logits(logits, torch.ones(2), torch.full((2,), 0.9, dtype=torch.float64))
    assert logprobs.isnan().tolist() == [True, False]
    assert ((tokens >= 0) & (tokens < 700)).all()


@pytest.mark.slow
@needs_interpreter
def test_the_largest_uniform_takes_the_fused_samplers_last_possible_token(interpreted):
    """Also where the sum of a block rounds above its last cumulative sum, as in some of these rows."""
    logits = torch.randn(50, 1200, generator=torch.Generator().manual_seed(0))
    logits[:, 1000:] = -torch.inf
    tokens, _ = sample_logits(logits, torch.ones(50), torch.full((50,), LARGEST_UNIFORM, dtype=torch.float64))
    assert tokens.tolist() == [999] * 50


@needs_interpreter
@pytest.mark.parametrize("width", [0, 512, 700])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), slow(torch.float32, 1e-5), (torch.bfloat16, 2e-2)],
    ids=str,
)
def test_the_fused_head_equals_the_portable_one(dtype, tolerance, width, interpreted):
    """Logprobs, entropies and the gradients of a loss of both, in one chunk of the vocabulary and in several.

    Also of no tokens. `test_scoring` has losses of one of the two.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 32, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(1500, 32, generator=generator).to(dtype).requires_grad_()
    targets = torch.tensor([0, 511, 512, 699, 700, 1499, 3])
    weights = torch.randn(2, 7, generator=generator)
    divisor = torch.tensor([0.7, 1.0, 0.7, 1.3, 1.0, 0.7, 0.9])[:, None]
    for rows in (slice(0, 7), slice(0, 0)):
        results = []
        for function, chunk in ((ChunkedLogprobs, 4), (FusedLogprobs, width)):
            outputs = torch.stack(function.apply(hidden[rows], head, targets[rows], divisor[rows], chunk))
            loss = (outputs * weights[:, rows]).sum()
            results.append((*outputs, *torch.autograd.grad(loss, (hidden, head))))
        for expected, got in zip(*results, strict=True):
            assert got.dtype == expected.dtype
            assert (got - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("num_tokens", [0, 1, 500, 8192, 30_000, 131_072])
def test_the_logits_of_the_fused_head_are_bounded(num_tokens):
    """However many tokens there are up to 131,072; a chunk's width is one that products are fast at."""
    width = chunk_width(num_tokens, 151_936)
    assert width == 151_936 or width % 512 == 0
    assert num_tokens * width <= MAX_LOGITS
    assert width == 151_936 or num_tokens * (width + 512) > MAX_LOGITS


@needs_interpreter
@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float32, 16), (torch.float64, 80), (torch.bfloat16, 64)], ids=str
)
def test_fused_rotation_equals_the_portable_one(dtype, dim, interpreted, monkeypatch):
    """Queries, fewer keys, views with strides, and the gradients: to the last bit, in bf16 to its rounding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 8 * dim, generator=generator).to(dtype).requires_grad_()
    angle = 100 * torch.rand(5, 1, dim // 2, generator=generator)
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([-angle.sin(), angle.sin()], -1)
    weights = torch.randn(5, 8, dim, generator=generator).to(dtype)
    results = []
    for is_fused in (False, True):
        monkeypatch.setattr(device_kernels, "are_used", lambda device, choice=is_fused: choice)
        q, k = x.view(5, 8, dim).split([6, 2], 1)
        out = torch.cat(rotate_pair(q, k, Rotation(cos, sin)), 1)
        results.append((out, *torch.autograd.grad((out * weights).sum(), x)))
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(*results, rtol=tolerance, atol=1e-6)


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [0, 9])
def test_the_fused_gate_equals_the_portable_one(dtype, rows, interpreted):
    """Values and both gradients, of large and small gates; the gradient may come with strides."""
    generator = torch.Generator().manual_seed(0)
    leaves = [(5 * torch.randn(rows, 131, generator=generator)).to(dtype).requires_grad_() for _ in range(2)]
    weights = torch.randn(131, rows, generator=generator).to(dtype).T
    results = []
    for function in (lambda gate, up: activate(gate) * up, FusedGate.apply):
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out, leaves, weights)))
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-13, torch.bfloat16: 2**-6}[dtype]
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


@needs_interpreter
def test_rollouts_of_the_fused_kernels_are_the_portable_ones(interpreted, monkeypatch):
    """The engine with the choices of CUDA: the same tokens from the same keys, the logprobs to rounding."""
    model = cached_model("full", torch.float32)
    requests = [make_request(make_prompt(5), number=n, max_new_tokens=3, temperature=n) for n in range(2)]
    fused = make_engine(model).generate(requests)
    monkeypatch.setattr(device_kernels, "are_used", lambda device: False)
    for rollout, other in zip(fused, make_engine(model).generate(requests), strict=True):
        assert rollout.completion == other.completion
        assert (rollout.sample_logprobs - other.sample_logprobs).abs().max() <= 1e-5


@pytest.mark.slow
@pytest.mark.skipif(has_no_triton, reason="needs triton")
def test_the_fused_kernels_compile_for_every_architecture():
    """Ampere to Blackwell, in the dtypes of real runs; in a process without the interpreter, and without a GPU."""
    done = run_with_compiler("-m", "support.compile_kernels")
    assert done.returncode == 0, done.stderr
