"""Logprobs, entropies and values: against full logits, against autograd, over any cut of the work."""

import dataclasses
import itertools
import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor

from minirl.generation.sampling import sample
from minirl.model import batch_invariance
from minirl.model.attention import PackedLayout
from minirl.model.families import config_from_dict
from minirl.model.logprobs import MAX_LOGITS, chunk_width
from minirl.model.transformer import Transformer, is_batch_invariant
from minirl.training.batch import Batch
from minirl.training.frozen_models import FrozenModel, unparked
from minirl.training.scoring import ChunkedLogprobs, value_batch
from support.cuda_rules import pad_as_on_cuda
from support.engines import score_at
from support.layouts import shuffled_members
from support.marks import slow
from support.memory import allocated_bytes
from support.models import RAW_CONFIG

CPU = torch.device("cpu")
VOCAB = 37
LENGTHS = (9, 2, 31, 140, 5)
PROMPTS = (4, 1, 30, 100, 2)
TEMPERATURE = 0.75


def make_model(dtype=torch.float64, *, tied=False, scalar_head=False):
    sizes = {"vocab_size": VOCAB, "intermediate_size": 45, "rms_norm_eps": 1e-5, "tie_word_embeddings": tied}
    config = config_from_dict(RAW_CONFIG | sizes)
    config = dataclasses.replace(config, layer_windows=(None, 20), qk_norm=True, scalar_head=scalar_head)
    model = Transformer(config).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.ndim == 2 or "bias" in name:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return model


def make_batch(lengths=LENGTHS, prompts=PROMPTS):
    """Sequences whose completions have a gap, as after a tool's answer; the first completion token is selected."""
    mask = torch.zeros(sum(lengths), dtype=torch.bool)
    for part, prompt in zip(mask.split(lengths), prompts, strict=False):
        part[prompt:] = True
        part[prompt + 2 : prompt + 4] = False
    tokens = torch.randint(0, VOCAB, mask.shape, generator=torch.Generator().manual_seed(1))
    return Batch(lengths, tokens, mask, rollout=torch.arange(len(lengths)))


def states_of(model, batch):
    """Each sequence alone: its tokens, where they are selected, and the hidden states."""
    parts = (stream.split(batch.lengths) for stream in (batch.tokens, batch.loss_mask))
    for tokens, mask in zip(*parts, strict=True):
        yield tokens, mask, model(tokens, torch.arange(len(tokens)), PackedLayout((len(tokens),), CPU))


def reference_scores(model, batch):
    """Position by position: log_softmax of full logits in the model's dtype."""
    logprobs, entropies = [], []
    for tokens, mask, states in states_of(model, batch):
        logits = states @ model.lm_head.weight.T
        for t in range(len(tokens)):
            # What t - 1 says of token t.
            all_logprobs = torch.log_softmax(logits[t - 1] / TEMPERATURE, -1) * mask[t]
            logprobs.append(all_logprobs[tokens[t]])
            entropies.append(-(all_logprobs.exp() * all_logprobs).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def reference_values(model, batch):
    """Token by token: the head on the state before it, and on the last state."""
    values, after = [], []
    for tokens, mask, states in states_of(model, batch):
        outputs = states @ model.score.weight[0]
        values += [outputs[t - 1] * mask[t] for t in range(len(tokens))]
        after.append(outputs[-1])
    return torch.stack(values), torch.stack(after)


score_sampled = partial(score_at, temperature=TEMPERATURE)


def predict_batch(model, batch):
    """Values [T], and scores [N] of the sequences."""
    values, end_values = value_batch(model, batch)
    return values, end_values[batch.last_index]


def function_of(model):
    return predict_batch if model.config.scalar_head else score_sampled


def assert_equal_gradients(model, results, *, atol, rtol):
    """Two ways to the same results give every parameter the same gradient, which is not 0."""
    gradients = []
    for parts in results:
        model.zero_grad(set_to_none=True)
        outputs = torch.cat(parts)
        generator = torch.Generator().manual_seed(5)
        (outputs * torch.randn(len(outputs), generator=generator).double()).sum().backward()
        gradients.append({name: param.grad for name, param in model.named_parameters()})
    for name, gradient in gradients[1].items():
        assert gradient.abs().max() > 1e-6, name
        torch.testing.assert_close(gradients[0][name], gradient, atol=atol, rtol=rtol)


# The layers' rounding; the head's own is tested below.
ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 0.2}


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float64, {"tied": True}), *itertools.product(ROUNDING, [{}, {"scalar_head": True}])],
    ids=str,
)
def test_results_and_gradients_equal_the_head_position_by_position(dtype, options, monkeypatch):
    """Token t belongs to the state at t - 1, in several sequences, the first completion token too; scores to the last.

    Logprobs, entropies, values and scores, and the gradients of every parameter. Both heads, the softmax and the
    results are fp32 where weights are narrower. Pitfalls 1 and 13.
    """
    model, batch = make_model(dtype, **options), make_batch()
    monkeypatch.setattr("minirl.training.scoring.TOKEN_CHUNK", 7)
    got = function_of(model)(model, batch)
    expected = (reference_values if model.config.scalar_head else reference_scores)(model.double(), batch)
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == batch_invariance.at_least_fp32(dtype)
        assert not torch.equal(x, x.bfloat16().to(x.dtype))
        torch.testing.assert_close(x.double(), y, atol=ROUNDING[dtype], rtol=0)
    assert torch.equal(got[0] != 0, batch.loss_mask)
    if dtype == torch.float64:
        assert_equal_gradients(model, (got, expected), atol=1e-10, rtol=1e-8)


CHUNKS_AND_TILES = [(1, 1), (2, 5), (3, 19), (4, 18), (10, 7), (11, 10), (12, 4), (99, 99)]


@pytest.mark.parametrize("sizes", CHUNKS_AND_TILES)
@pytest.mark.parametrize("temperatures", [[1.0], [0.75, 1.0, 1.5]])
def test_head_gradients_equal_autograd_through_full_logits(sizes, temperatures):
    """Values and gradients are the full head's, for any chunk and tile, border and last rest. Pitfalls 12 and 41."""
    generator = torch.Generator().manual_seed(2)
    hidden, head = (torch.randn(n, 6, generator=generator).double().requires_grad_() for n in (11, 19))
    targets = torch.randint(0, 19, (11,), generator=generator)
    weights = torch.randn(2, 11, generator=generator)
    divisor = torch.tensor([temperatures[i % len(temperatures)] for i in range(11)])[:, None]
    got = ChunkedLogprobs.apply(hidden, head, targets, divisor, *sizes)
    all_logprobs = (hidden @ head.T / divisor).log_softmax(-1)
    entropies = -(all_logprobs.exp() * all_logprobs).sum(-1)
    expected = all_logprobs.gather(1, targets[:, None])[:, 0], entropies
    pairs = list(zip(got, expected, strict=True))
    for used in ([0], [1], [0, 1]):
        objectives = (sum((outputs[i] * weights[i]).sum() for i in used) for outputs in (got, expected))
        gradients = (torch.autograd.grad(x, (hidden, head), retain_graph=True) for x in objectives)
        pairs += zip(*gradients, strict=True)
    for x, y in pairs:
        assert y.abs().max() > 1e-2
        torch.testing.assert_close(x, y, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", [150, 400, 1200])
def test_results_and_gradients_of_the_head_have_the_error_of_their_dtype(dtype, tile):
    """fp32 loses nothing over tiles; bf16 rounds the gradients of logits and the results, not each tile's part.

    From bf16 states and weights the logprobs are exact to fp32: no logit passes through bf16. Pitfall 7.
    """
    generator = torch.Generator().manual_seed(6)
    leaves = [
        torch.randn(n, 300, generator=generator).mul(scale).to(dtype) for n, scale in ((90, 1), (1100, 0.1))
    ]
    targets = torch.randint(0, 1100, (90,), generator=generator)
    weights = torch.randn(2, 90, generator=generator)
    results = []
    for kind in (dtype, torch.float64):
        hidden, head = (leaf.to(kind).requires_grad_() for leaf in leaves)
        width = 1100 if kind == torch.float64 else tile
        outputs = torch.stack(
            ChunkedLogprobs.apply(hidden, head, targets, torch.full((90, 1), 0.75), 40, width)
        )
        results.append((outputs, *torch.autograd.grad((outputs * weights).sum(), (hidden, head))))
    (outputs, *gradients), (exact, *expected) = results
    torch.testing.assert_close(outputs.double(), exact, atol=5e-5, rtol=0)
    for got, wanted in zip(gradients, expected, strict=True):
        assert got.dtype == dtype
        error = (got.double() - wanted).norm() / wanted.norm()
        assert error < (1e-6 if dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize(
    ("vocab", "tile"), [(37, 2048), (37, 16), (700, 512), slow(2049, 2048), slow(4500, 2048)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_sampled_logprobs_equal_scored_ones_over_tiles_of_the_vocabulary(vocab, tile, dtype):
    """One tile or several with an uneven last one, few rows or many: bit for bit what training computes."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(300, 64, generator=generator).to(dtype)
    head = torch.randn(vocab, 64, generator=generator).div(4).to(dtype)
    exact = batch_invariance.is_batch_invariant([(64, vocab)], dtype, CPU, is_head=True)
    for rows, temperature in ((1, 1.0), (3, 0.7), (17, 1.3), (64, 1.0), (300, 0.7)):
        noise = {"keys": torch.arange(rows), "positions": torch.arange(rows)}
        heat, divisor = torch.full((rows,), temperature), torch.full((300, 1), temperature)
        tokens, sampled = sample(hidden[:rows], head, **noise, temperature=heat, vocab_chunk=tile)
        everything = torch.cat([tokens, torch.randint(0, vocab, (300 - rows,), generator=generator)])
        # Also where 1, 2 or 3 rows are left for the last chunk.
        for chunk in (1000, 299, 298, 297, 37, 7, 1) if rows == 300 else (1000, 37):
            scored, _ = ChunkedLogprobs.apply(hidden, head, everything, divisor, chunk, tile)
            assert (scored[:rows] - sampled).abs().max() <= (0 if exact else 1e-5), (rows, chunk)


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)])
@pytest.mark.parametrize("entropy_weight", [slow(0.0), 0.1])
def test_logits_and_the_head_in_fp32_never_exist_as_a_whole(dtype, entropy_weight):
    """Forward and backward hold one chunk of one tile, or one tile of the head, beside the head's gradient."""
    rows, vocab, width = 300, 8000, 32
    hidden, head = (torch.randn(n, width).to(dtype).requires_grad_() for n in (rows, vocab))

    def train():
        outputs = ChunkedLogprobs.apply(hidden, head, torch.arange(rows), torch.ones(rows, 1), 64, 128)
        (outputs[0].sum() + entropy_weight * outputs[1].sum()).backward()

    train()  # measures the products once
    hidden.grad = head.grad = None
    peak, _ = allocated_bytes(train)
    assert head.nbytes < peak < head.nbytes + 4 * vocab * width / 2


@pytest.mark.parametrize("num_tokens", [0, 1, 500, 8192, 30_000, 65_536])
def test_a_chunk_of_the_vocabulary_on_cuda_is_as_wide_as_its_bound_allows(num_tokens):
    """However many tokens there are; it is a width that products are fast at."""
    width = chunk_width(num_tokens, 151_936)
    assert width == 151_936 or width % 512 == 0
    assert num_tokens * width <= MAX_LOGITS
    assert width == 151_936 or num_tokens * (width + 512) > MAX_LOGITS


@pytest.mark.parametrize("tile", [8, 4, 2])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.1])
def test_a_nan_in_the_head_is_a_nan_in_every_logprob_and_gradient(tile, entropy_weight):
    """Broken weights are not hidden by any tile's normaliser."""
    head = torch.zeros(5, 3)
    head[4, 1] = torch.nan
    hidden = torch.ones(2, 3, requires_grad=True)
    logprobs, entropies = ChunkedLogprobs.apply(hidden, head, torch.tensor([0, 4]), torch.ones(2, 1), 8, tile)
    (logprobs.sum() + entropy_weight * entropies.sum()).backward()
    assert torch.cat([logprobs, hidden.grad.flatten()]).isnan().all()


@pytest.mark.parametrize("tile", [8, 3, 2, 1])
def test_tokens_of_no_probability_leave_entropy_and_gradients_finite(tile):
    """0 log 0 is 0: logits so far apart that probabilities, or a tile's, underflow, or are -inf, make no NaN.

    Pitfall 42.
    """
    head = torch.tensor([[0.0], [0.0], [-2000.0], [-torch.inf]], requires_grad=True)
    hidden = torch.ones(1, 1, requires_grad=True)
    logprobs, entropies = ChunkedLogprobs.apply(hidden, head, torch.tensor([0]), torch.ones(1, 1), 8, tile)
    assert logprobs.item() == pytest.approx(-math.log(2))
    assert entropies.item() == pytest.approx(math.log(2))
    (grad,) = torch.autograd.grad(logprobs.sum() + 3 * entropies.sum(), head)
    assert grad[:, 0].tolist() == pytest.approx([0.5, -0.5, 0.0, 0.0], abs=1e-6)


@pytest.mark.parametrize("padding_rule", [nullcontext, pad_as_on_cuda], ids=["cpu", "cuda"])
@pytest.mark.parametrize("lengths", [(), (6, 3)], ids=["no sequence", "nothing selected"])
@pytest.mark.parametrize("scalar_head", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_empty_microbatch_gives_zero_gradients_not_none(lengths, dtype, scalar_head, padding_rule):
    """A rank without tokens still runs the same forward and backward, and adds zeros: else the others would wait.

    Pitfall 12.
    """
    model = make_model(dtype, scalar_head=scalar_head)
    batch = make_batch(lengths, (1,) * len(lengths))
    batch = batch.replace(loss_mask=torch.zeros_like(batch.loss_mask))
    with padding_rule():
        first, second = function_of(model)(model, batch)
        assert (first.shape, len(second)) == ((sum(lengths),), len(lengths) if scalar_head else sum(lengths))
        assert (first == 0).all()
        assert ((second != 0) == scalar_head).all()
        (first.sum() if scalar_head else first.sum() + second.sum()).backward()
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        assert param.grad.dtype == dtype
        assert (param.grad == 0).all(), name


# Groups, whose prompt is computed once.


GROUPS = [(1, 3, 60), (127, 1, 2, 60), (128, 9, 1, 0), (129, 40, 2, 1, 7, 7), (5, 30)]


def make_groups(seed=0):
    """A batch of shuffled groups with prompts around a block's border, and a pair of equal rollouts among them.

    One rollout is nothing but its prompt.
    """
    generator = torch.Generator().manual_seed(seed)
    members = shuffled_members(GROUPS, seed)
    openings = [torch.randint(0, VOCAB, (prompt,), generator=generator) for prompt, *_ in GROUPS]
    # By the member, so that the two of 7 tokens are equal.
    own = {(prefix, n): torch.randint(0, VOCAB, (n,), generator=generator) for prefix, n in members}
    tokens = torch.cat([torch.cat([openings[member[0].ordinal], own[member]]) for member in members])
    mask = torch.cat([torch.arange(prefix.num_tokens + n) >= prefix.num_tokens for prefix, n in members])
    lengths = tuple(prefix.num_tokens + n for prefix, n in members)
    prefixes = tuple(prefix for prefix, _ in members)
    return Batch(lengths, tokens, mask, rollout=torch.arange(len(lengths)), prefixes=prefixes)


def without_prompts(batch):
    return dataclasses.replace(batch, prefixes=())


def frozen_results(language, scalar, batch, cut):
    """Logprobs and values [T], and of each sequence the value after its last token [N], as `FrozenModel`s add them."""
    for model, of_model, names in (
        (language, score_sampled, ["old_logprobs"]),
        (scalar, value_batch, ["values", "end_values"]),
    ):
        batch = FrozenModel(model, of_model, names=names, device=CPU).add_to(batch, cut)
    return batch.old_logprobs, batch.values, batch.end_values[batch.last_index]


def tolerance(model):
    """0 where this machine's products give a row the same bits in any batch."""
    dtype = model.model.norm.weight.dtype
    return 0 if is_batch_invariant(model.config, dtype, CPU) else 1e-6 if dtype == torch.float32 else 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make", [make_batch, partial(make_groups, 0), *(slow(partial(make_groups, seed)) for seed in (1, 2))]
)
@torch.no_grad()
def test_results_depend_neither_on_microbatches_nor_on_sharing_prompts(dtype, make):
    """Groups whole, torn apart, in any order or one by one, with empty parts: each result is back in its place.

    Each completion, its first token too, has the same bits of logprobs, entropies, values and score as alone.
    Pitfall 38.
    """
    language, scalar = make_model(dtype), make_model(dtype, scalar_head=True)
    batch = make()
    places = list(range(len(batch.lengths)))
    logprobs, entropies = score_sampled(language, without_prompts(batch))
    values = predict_batch(scalar, without_prompts(batch))
    assert (score_sampled(language, batch)[1] - entropies).abs().max() <= tolerance(language)
    for cut in ([places], [places[::2], [], places[1::2]], [places[::-1]], [[i] for i in places]):
        got = frozen_results(language, scalar, batch, cut)
        for x, y in zip(got, (logprobs, *values), strict=True):
            assert x.dtype == torch.float32
            assert y.std() > 0.1
            assert (x - y).abs().max() <= tolerance(scalar)


def test_frozen_results_of_a_part_leave_the_rest():
    """Sequences in no microbatch have neither logprobs nor values nor a score."""
    batch, cut = make_batch(), [[3], [1]]
    chosen = torch.zeros_like(batch.loss_mask)
    chosen[batch.token_index([1, 3])] = True
    language, scalar = make_model(torch.float32), make_model(torch.float32, scalar_head=True)
    logprobs, values, after = frozen_results(language, scalar, batch, cut)
    for stream in (logprobs, values):
        assert not stream.requires_grad
        assert torch.equal(~stream.isnan(), chosen)
        assert torch.equal(stream[chosen] != 0, batch.loss_mask[chosen])
    assert (~after.isnan()).tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("scalar_head", [False, True])
def test_gradients_do_not_depend_on_sharing_prompts(scalar_head):
    """In fp64 every parameter's gradient is that of the stream with all prompts, to its last digits."""
    model, batch = make_model(scalar_head=scalar_head), make_groups()
    num_computed = [len(b.layout().computed_tokens) for b in (batch, without_prompts(batch))]
    assert num_computed[0] < num_computed[1] - 700
    results = [function_of(model)(model, b) for b in (batch, without_prompts(batch))]
    assert_equal_gradients(model, results, atol=1e-12, rtol=1e-11)


@pytest.mark.parametrize("count", [17, 18, 31, 33])
@torch.no_grad()
def test_equal_sequences_have_equal_scores(count):
    """A group of equal completions has equal rewards: a difference of 1e-7 would be divided by its own deviation."""
    model, tokens = make_model(torch.float32, scalar_head=True), torch.arange(6).repeat(count)
    if tolerance(model):
        pytest.skip("this machine's products are not batch-invariant")
    _, after = predict_batch(model, Batch((6,) * count, tokens, tokens < 0))
    assert len(set(after.tolist())) == 1


def record_copies(monkeypatch):
    """Copies on the CPU that stand for pinned and device memory, by address, so that no other tensor gets one."""
    made = {"pinned": {}, "device": {}}

    def copy(tensor, place):
        if tensor.data_ptr() in made[place]:
            return tensor
        copied = tensor.clone()
        made[place][copied.data_ptr()] = copied
        return copied

    def to(tensor, device, *, non_blocking):
        assert (device.type, non_blocking) == ("cuda", True)
        return copy(tensor, "device")

    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: copy(tensor, "pinned"))
    monkeypatch.setattr(Tensor, "to", to)
    return made


def addresses(model):
    return [parameter.data_ptr() for parameter in model.parameters()]


def test_a_frozen_model_is_pinned_once_and_parking_copies_nothing(monkeypatch):
    """Each use costs one copy to the device; afterwards the host has its own tensors back, and tied ones still are."""
    model = make_model(tied=True)
    values = [parameter.clone() for parameter in model.parameters()]
    copies, num_uses = record_copies(monkeypatch), 3
    for _ in range(num_uses):
        with unparked(model, torch.device("cuda"), park=True):
            assert addresses(model) == list(copies["device"])[-len(values) :]
            assert model.lm_head.weight is model.model.embed_tokens.weight
        assert addresses(model) == list(copies["pinned"])
        assert all(map(torch.equal, model.parameters(), values))
    assert len(copies["device"]) == num_uses * len(values)


def test_a_frozen_model_that_is_not_parked_goes_to_the_device_once(monkeypatch):
    """It stays there, and no host memory is pinned for it."""
    model, copies = make_model(), record_copies(monkeypatch)
    for _ in range(2):
        with unparked(model, torch.device("cuda"), park=False):
            assert addresses(model) == list(copies["device"])
        assert addresses(model) == list(copies["device"])
    assert not copies["pinned"]


@pytest.mark.parametrize("park", [False, True])
def test_a_frozen_model_on_the_cpu_is_never_copied(park):
    """Its tensors are those of the host, within the block and after it."""
    model = make_model()
    before = addresses(model)
    for _ in range(2):
        with unparked(model, CPU, park=park):
            assert addresses(model) == before
        assert addresses(model) == before
