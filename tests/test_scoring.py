"""Logprobs, entropies and values: against full logits, against autograd, over any cut of the work."""

import dataclasses
import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minirl.generation.sampling import sample
from minirl.model import batch_invariance
from minirl.model.attention import PackedLayout
from minirl.model.config import ModelConfig
from minirl.model.transformer import Transformer
from minirl.training.assignment import PromptPrefix
from minirl.training.batch import Batch
from minirl.training.frozen_models import FrozenModel, unparked, values_of
from minirl.training.old_logprobs import score_old_logprobs
from minirl.training.scoring import ChunkedLogprobs, scalar_outputs, score
from support.cuda_rules import pad_as_on_cuda

CPU = torch.device("cpu")
VOCAB = 37
LENGTHS = (9, 2, 31, 140, 5)
PROMPTS = (4, 1, 30, 100, 2)
CUTS = [[[0, 1, 2, 3, 4]], [[0], [1], [2], [3], [4]], [[3], [], [4, 0], [2, 1]], [[4, 2, 0, 3, 1]]]


def make_model(
    dtype: torch.dtype = torch.float64, *, tied: bool = False, scalar_head: bool = False
) -> Transformer:
    config = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=45,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        layer_windows=(None, 20),
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
        qk_norm=True,
        tie_word_embeddings=tied,
        scalar_head=scalar_head,
    )
    model = Transformer(config).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.ndim == 2 or "bias" in name:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return model


def make_batch(lengths: tuple[int, ...] = LENGTHS, prompts: tuple[int, ...] = PROMPTS) -> Batch:
    """Sequences whose completions have a gap, as after a tool's answer; the first completion token is selected."""
    generator = torch.Generator().manual_seed(1)
    masks = [torch.arange(length) >= prompt for length, prompt in zip(lengths, prompts, strict=True)]
    for mask, prompt in zip(masks, prompts, strict=True):
        mask[prompt + 2 : prompt + 4] = False
    tokens = torch.randint(0, VOCAB, (sum(lengths),), generator=generator)
    mask = torch.cat([torch.zeros(0, dtype=torch.bool), *masks])
    return Batch(lengths, tokens, mask, torch.zeros(len(tokens)), table_index=torch.arange(len(lengths)))


def reference(model: Transformer, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """Sequence by sequence, position by position: log_softmax of full logits in the model's dtype."""
    logprobs, entropies = [], []
    for tokens, mask in zip(
        batch.tokens.split(batch.lengths), batch.loss_mask.split(batch.lengths), strict=True
    ):
        layout = PackedLayout((len(tokens),), CPU)
        logits = model(tokens, torch.arange(len(tokens)), layout) @ model.lm_head.weight.T
        for t in range(len(tokens)):
            if not mask[t]:
                logprobs.append(logits.new_zeros(()))
                entropies.append(logits.new_zeros(()))
                continue
            all_logprobs = torch.log_softmax(logits[t - 1] / temperature, -1)  # what t - 1 says of token t
            logprobs.append(all_logprobs[tokens[t]])
            entropies.append(-(all_logprobs.exp() * all_logprobs).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def score_batch(model: Transformer, batch: Batch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    return score(model, batch.tokens, batch.layout(), select=batch.loss_mask, temperature=temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_equal_a_log_softmax_position_by_position(temperature):
    """Token t is scored by the logits of t - 1, in several sequences, the first completion token too. Pitfall 1."""
    model, batch = make_model(), make_batch()
    logprobs, entropies = score_batch(model, batch, temperature)
    expected_logprobs, expected_entropies = reference(model, batch, temperature)
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-11, rtol=1e-10)
    torch.testing.assert_close(entropies, expected_entropies, atol=1e-11, rtol=1e-10)
    assert (logprobs[~batch.loss_mask] == 0).all()
    assert (entropies[~batch.loss_mask] == 0).all()
    assert (logprobs[batch.loss_mask] < 0).all()
    firsts = torch.tensor([sum(LENGTHS[:i]) + prompt for i, prompt in enumerate(PROMPTS)])
    assert batch.loss_mask[firsts].all()
    assert (logprobs[firsts] != 0).all()


@pytest.mark.parametrize("scalar_head", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_fp32_and_close_to_fp64(dtype, scalar_head):
    """Both heads, the softmax and the results are fp32 whatever the weights' dtype."""
    model, batch = make_model(dtype, scalar_head=scalar_head), make_batch()
    wide = make_model(dtype, scalar_head=scalar_head).double()  # the same rounded weights
    got, expected = (
        (predict_batch(model, batch), reference_values(wide, batch))
        if scalar_head
        else (score_batch(model, batch), reference(wide, batch, 1.0))
    )
    allowed = 1e-5 if dtype == torch.float32 else 0.15  # the layers' rounding; the head's own is tested below
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == torch.float32
        assert not torch.equal(x, x.bfloat16().float())
        torch.testing.assert_close(x.double(), y, atol=allowed, rtol=0)


def test_a_bf16_head_gives_fp32_logprobs():
    """From bf16 hidden states and weights the logprobs are exact to fp32: no logit passes through bf16. Pitfall 7."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 64, generator=generator).bfloat16() for n in (50, 300))
    targets = torch.randint(0, 300, (50,), generator=generator)
    logprobs, entropies = ChunkedLogprobs.apply(hidden, head, targets, 1.0, 16)
    exact = torch.log_softmax(hidden.double() @ head.double().T, -1)
    torch.testing.assert_close(logprobs.double(), exact.gather(1, targets[:, None])[:, 0], atol=5e-5, rtol=0)
    torch.testing.assert_close(entropies.double(), -(exact.exp() * exact).sum(-1), atol=5e-5, rtol=0)


def head_inputs(rows: int = 11, vocab: int = 19) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden, head = (torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (rows, vocab))
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    return hidden.requires_grad_(), head.requires_grad_(), targets


@pytest.mark.parametrize(
    ("chunk", "tile"), [(1, 1), (2, 5), (3, 19), (4, 18), (10, 7), (11, 10), (12, 4), (99, 99)]
)
@pytest.mark.parametrize("of", ["logprobs", "entropies", "both"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_head_gradients_equal_autograd_through_full_logits(chunk, tile, of, temperature):
    """Values and gradients are the full head's, for any chunk and tile, border and last rest.

    Pitfalls 12 and 41.
    """
    hidden, head, targets = head_inputs()
    weights = torch.randn(2, len(hidden), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    weights *= torch.tensor([[of != "entropies"], [of != "logprobs"]])
    got = ChunkedLogprobs.apply(hidden, head, targets, temperature, chunk, tile)
    all_logprobs = torch.log_softmax(hidden @ head.T / temperature, -1)
    expected = all_logprobs.gather(1, targets[:, None])[:, 0], -(all_logprobs.exp() * all_logprobs).sum(-1)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y)
    got_grads, expected_grads = (
        torch.autograd.grad((torch.stack(pair) * weights).sum(), (hidden, head)) for pair in (got, expected)
    )
    for x, y in zip(got_grads, expected_grads, strict=True):
        assert y.abs().max() > 1e-2
        torch.testing.assert_close(x, y, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", [150, 400, 1200])
def test_head_gradients_have_the_error_of_their_dtype(dtype, tile):
    """fp32 loses nothing over tiles; bf16 rounds the gradients of logits and the results, not each tile's part."""
    generator = torch.Generator().manual_seed(6)
    leaves = [
        torch.randn(n, 300, generator=generator).mul(scale).to(dtype) for n, scale in ((90, 1), (1100, 0.1))
    ]
    targets, weights = (
        torch.randint(0, 1100, (90,), generator=generator),
        torch.randn(2, 90, generator=generator),
    )
    results = []
    for kind in (dtype, torch.float64):
        hidden, head = (leaf.to(kind).requires_grad_() for leaf in leaves)
        width = 1100 if kind == torch.float64 else tile
        outputs = torch.stack(ChunkedLogprobs.apply(hidden, head, targets, 0.7, 40, width))
        results.append(torch.autograd.grad((outputs * weights).sum(), (hidden, head)))
    for got, expected in zip(*results, strict=True):
        assert got.dtype == dtype
        error = (got.double() - expected).norm() / expected.norm()
        assert error < (1e-6 if dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize(("vocab", "tile"), [(37, 2048), (37, 16), (700, 512), (2049, 2048), (4500, 2048)])
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
        heat = torch.full((rows,), temperature)
        tokens, sampled = sample(hidden[:rows], head, **noise, temperature=heat, vocab_chunk=tile)
        everything = torch.cat([tokens, torch.randint(0, vocab, (300 - rows,), generator=generator)])
        for chunk in (1000, 37):
            scored, _ = ChunkedLogprobs.apply(hidden, head, everything, temperature, chunk, tile)
            assert (scored[:rows] - sampled).abs().max() <= (0 if exact else 1e-5), (rows, chunk)


class LargestTemporaries(TorchDispatchMode):
    """Bytes of every new storage that an operation returns, in the block."""

    def __init__(self, *known: Tensor):
        super().__init__()
        self.known, self.sizes = {x.untyped_storage().data_ptr() for x in known}, list[int]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.sizes.append(x.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.1])
def test_no_temporary_is_as_large_as_the_logits_or_the_head_but_its_gradient(dtype, entropy_weight):
    """Forward and backward hold one chunk of one tile, or one tile of the head: no [M, V], no fp32 [V, D]."""
    chunk, tile, rows, vocab, width = 64, 128, 300, 5000, 32
    hidden, head = (torch.randn(n, width).to(dtype).requires_grad_() for n in (rows, vocab))
    with LargestTemporaries(hidden, head) as seen:
        outputs = ChunkedLogprobs.apply(hidden, head, torch.arange(rows), 1.0, chunk, tile)
        (outputs[0].sum() + entropy_weight * outputs[1].sum()).backward()
    allowed = 4 * max(chunk * tile, rows * width, tile * width, rows * 40)  # the last: 40 tiles' normalisers
    large = [size for size in seen.sizes if size > allowed]
    assert set(large) == {head.grad.nbytes}
    assert len(seen.sizes) > 100
    with LargestTemporaries(hidden, head) as seen:
        torch.log_softmax(hidden @ head.t(), -1).sum().backward()
    assert max(seen.sizes) > 10 * allowed  # the recorder sees what it should


@pytest.mark.parametrize("tile", [8, 4, 2])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.1])
def test_a_nan_in_the_head_is_a_nan_in_every_logprob_and_gradient(tile, entropy_weight):
    """Broken weights are not hidden by any tile's normaliser."""
    head = torch.zeros(5, 3)
    head[4, 1] = torch.nan
    hidden = torch.ones(2, 3, requires_grad=True)
    logprobs, entropies = ChunkedLogprobs.apply(hidden, head, torch.tensor([0, 4]), 1.0, 8, tile)
    assert logprobs.isnan().all()
    (logprobs.sum() + entropy_weight * entropies.sum()).backward()
    assert hidden.grad.isnan().all()


def test_one_used_output_is_enough():
    """A loss on logprobs alone, or on entropies alone, has the gradient it has when the other's weight is zero."""
    hidden, head, targets = head_inputs()
    for i in (0, 1):
        outputs = ChunkedLogprobs.apply(hidden, head, targets, 1.0, 4)
        alone = torch.autograd.grad(outputs[i].sum(), (hidden, head))
        outputs = ChunkedLogprobs.apply(hidden, head, targets, 1.0, 4)
        both = torch.autograd.grad(outputs[i].sum() + 0 * outputs[1 - i].sum(), (hidden, head))
        assert all(torch.equal(x, y) for x, y in zip(alone, both, strict=True))
        assert alone[0].abs().max() > 0


@pytest.mark.parametrize("tile", [8, 3, 2, 1])
def test_tokens_of_no_probability_leave_entropy_and_gradients_finite(tile):
    """0 log 0 is 0: logits so far apart that probabilities, or a tile's, underflow, or are -inf, make no NaN.

    Pitfall 42.
    """
    head = torch.tensor([[0.0], [0.0], [-2000.0], [-torch.inf]], requires_grad=True)
    hidden = torch.ones(1, 1, requires_grad=True)
    logprobs, entropies = ChunkedLogprobs.apply(hidden, head, torch.tensor([0]), 1.0, 8, tile)
    assert logprobs.item() == pytest.approx(-math.log(2))
    assert entropies.item() == pytest.approx(math.log(2))
    (grad,) = torch.autograd.grad(logprobs.sum() + 3 * entropies.sum(), head)
    assert grad[:, 0].tolist() == pytest.approx([0.5, -0.5, 0.0, 0.0], abs=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_model_gradients_equal_autograd_through_full_logits(tied, monkeypatch):
    """Every parameter, embedding and head (tied or not) included, gets the gradient of the unchunked twin."""
    model, batch, gradients = make_model(tied=tied), make_batch(), []
    monkeypatch.setattr("minirl.training.scoring.TOKEN_CHUNK", 7)
    for logprobs, entropies in (score_batch(model, batch, 0.7), reference(model, batch, 0.7)):
        model.zero_grad(set_to_none=True)
        generator = torch.Generator().manual_seed(5)
        weights = torch.randn(2, len(logprobs), generator=generator, dtype=logprobs.dtype)
        (weights[0] * logprobs + weights[1] * entropies).sum().backward()
        gradients.append({name: param.grad for name, param in model.named_parameters()})
    for name, gradient in gradients[1].items():
        assert gradient.abs().max() > 1e-6, name
        torch.testing.assert_close(gradients[0][name], gradient, atol=1e-10, rtol=1e-8)


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
        first, second = (predict_batch if scalar_head else score_batch)(model, batch)
        assert (first.shape, len(second)) == ((sum(lengths),), len(lengths) if scalar_head else sum(lengths))
        assert (first == 0).all()
        assert ((second != 0) == scalar_head).all()
        (first.sum() if scalar_head else first.sum() + second.sum()).backward()
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        assert param.grad.dtype == dtype
        assert (param.grad == 0).all(), name


def frozen_values(model, batch, cut):
    """Values [T] and, of each sequence, the one after its last token [N], as a `FrozenModel` adds them to a batch."""
    frozen = FrozenModel(model, values_of, names=["values", "end_values"], device=CPU, max_tokens=999)
    batch = frozen.add_to(batch, cut)
    return batch.values, batch.end_values[batch.last_index]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_frozen_scores_do_not_depend_on_the_microbatches(dtype, cut):
    """Any cut of the batch, empty parts and any order included, puts its logprobs back in place. Pitfall 38."""
    model, batch = make_model(dtype), make_batch()
    expected, _ = score_batch(model, batch, 0.7)
    got = score_old_logprobs(model, batch, cut, 0.7)
    assert not got.requires_grad
    assert got.dtype == torch.float32
    exact = model.config.is_batch_invariant(dtype, CPU)
    if not exact:
        print(f"not bitwise: this machine's {dtype} matrix products depend on the number of rows")
    assert (got - expected).abs().max().item() <= (0 if exact else 1e-5 if dtype == torch.float32 else 0.1)
    assert (got[batch.loss_mask] < 0).all()


def test_frozen_scores_of_a_part_leave_the_rest_at_zero():
    """Sequences in no microbatch are not scored; those in one are."""
    model, batch = make_model(torch.float32), make_batch()
    expected, _ = score_batch(model, batch, 1.0)
    got = score_old_logprobs(model, batch, [[3], [1]], 1.0)
    chosen = torch.zeros_like(batch.loss_mask)
    chosen[batch.token_index([1, 3])] = True
    torch.testing.assert_close(got, torch.where(chosen, expected, 0.0), atol=1e-5, rtol=0)
    assert (got[chosen & batch.loss_mask] < 0).all()


# Groups, whose prompt is computed once.


def make_groups(seed: int = 0) -> Batch:
    """A batch of shuffled groups with prompts around a block's border, and a pair of equal rollouts among them."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for ordinal, (prompt, *owns) in enumerate(
        [(1, 3, 60), (127, 1, 2, 60), (128, 9, 1), (129, 40, 2, 1, 7, 7), (5, 30)]
    ):
        opening = torch.randint(0, VOCAB, (prompt,), generator=generator)
        parts += [
            (PromptPrefix(ordinal, prompt), opening, torch.randint(0, VOCAB, (n,), generator=generator))
            for n in owns
        ]
    parts[10] = parts[11]
    parts = [parts[i] for i in torch.randperm(len(parts), generator=generator).tolist()]
    tokens = torch.cat([x for _, *pair in parts for x in pair])
    mask = torch.cat([torch.arange(p.num_tokens + len(own)) >= p.num_tokens for p, _, own in parts])
    lengths = tuple(p.num_tokens + len(own) for p, _, own in parts)
    prompts = tuple(prompt for prompt, _, _ in parts)
    return Batch(
        lengths,
        tokens,
        mask,
        torch.zeros(len(tokens)),
        table_index=torch.arange(len(lengths)),
        prefixes=prompts,
    )


def without_prompts(batch: Batch) -> Batch:
    return dataclasses.replace(batch, prefixes=())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
@torch.no_grad()
def test_logprobs_and_values_do_not_depend_on_sharing_prompts(dtype, seed):
    """Each completion, its first token too, has the logprobs, entropies, values and score that it has by itself."""
    batch = make_groups(seed)
    assert len(batch.layout().computed_tokens) < len(without_prompts(batch).layout().computed_tokens) - 700
    for scalar_head, function in ((False, score_batch), (True, predict_batch)):
        model = make_model(dtype, scalar_head=scalar_head)
        for got, expected in zip(
            function(model, batch), function(model, without_prompts(batch)), strict=True
        ):
            assert expected.std() > 0.1
            assert (got - expected).abs().max().item() <= scalar_tolerance(model, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_frozen_results_of_groups_do_not_depend_on_the_microbatches(dtype):
    """Groups whole, torn apart, or one by one: a microbatch shares what it holds, and the results are the same."""
    batch = make_groups()
    places = list(range(len(batch.lengths)))
    language, scalar = make_model(dtype), make_model(dtype, scalar_head=True)
    expected = [
        score_batch(language, without_prompts(batch))[0],
        *predict_batch(scalar, without_prompts(batch)),
    ]
    for cut in ([places], [places[::2], [], places[1::2]], [places[::-1]], [[i] for i in places]):
        got = [score_old_logprobs(language, batch, cut, 1.0), *frozen_values(scalar, batch, cut)]
        for x, y, model in zip(got, expected, (language, scalar, scalar), strict=True):
            assert (x - y).abs().max().item() <= scalar_tolerance(model, dtype)


@pytest.mark.parametrize("scalar_head", [False, True])
def test_gradients_do_not_depend_on_sharing_prompts(scalar_head):
    """In fp64 every parameter's gradient is that of the stream with all prompts, to its last digits."""
    model, grads = make_model(scalar_head=scalar_head), []
    for batch in (make_groups(), without_prompts(make_groups())):
        model.zero_grad(set_to_none=True)
        outputs = torch.cat((predict_batch if scalar_head else score_batch)(model, batch))
        (
            outputs * torch.randn(len(outputs), generator=torch.Generator().manual_seed(5)).double()
        ).sum().backward()
        grads.append({name: param.grad for name, param in model.named_parameters()})
    for name, grad in grads[1].items():
        assert grad.abs().max() > 1e-6, name
        torch.testing.assert_close(grads[0][name], grad, atol=1e-12, rtol=1e-11)


@pytest.mark.parametrize("own", [4, 0])
@torch.no_grad()
def test_equal_rollouts_of_a_group_have_equal_results(own):
    """Two rollouts equal to their last token, or that are nothing but their prompt, are scored alike."""
    tokens, lengths = torch.arange(30).repeat(2), (30, 30)
    mask = torch.arange(30).repeat(2) >= 30 - own
    batch = Batch(lengths, tokens, mask, torch.zeros(60), prefixes=(PromptPrefix(7, 30 - own),) * 2)
    assert len(batch.layout().computed_tokens) == 30 + own
    logprobs, _ = score_batch(make_model(torch.float32), batch)
    assert torch.equal(logprobs[:30], logprobs[30:])
    assert torch.equal(logprobs != 0, mask)
    model = make_model(torch.float32, scalar_head=True)
    values, after = predict_batch(model, batch)
    assert torch.equal(values[:30], values[30:])
    assert after[0] == after[1] != 0
    expected = predict_batch(model, without_prompts(batch))[1]
    assert (after - expected).abs().max().item() <= scalar_tolerance(model, torch.float32)


def predict_batch(model: Transformer, batch: Batch) -> tuple[Tensor, Tensor]:
    return scalar_outputs(model, batch.tokens, batch.layout(), select=batch.loss_mask)


def reference_values(model: Transformer, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sequence by sequence, token by token: the head on the state before it, and on the last state."""
    values, after = [], []
    for tokens, mask in zip(
        batch.tokens.split(batch.lengths), batch.loss_mask.split(batch.lengths), strict=True
    ):
        layout = PackedLayout((len(tokens),), CPU)
        states = model(tokens, torch.arange(len(tokens)), layout) @ model.score.weight[0]
        values += [states[t - 1] if mask[t] else states.new_zeros(()) for t in range(len(tokens))]
        after.append(states[-1])
    return torch.stack(values), torch.stack(after)


def scalar_tolerance(model: Transformer, dtype: torch.dtype) -> float:
    """0 where this machine's products give a row the same bits in any batch."""
    return 0 if model.config.is_batch_invariant(dtype, CPU) else 1e-6 if dtype == torch.float32 else 0.1


def test_values_and_their_gradients_equal_the_head_position_by_position():
    """Token t's value is of the state at t - 1, the first completion token's of the prompt's last; scores of the last.

    Every parameter gets the gradient of the sequence-by-sequence twin.
    """
    model, batch = make_model(scalar_head=True), make_batch()
    weights = torch.randn(
        len(batch.tokens) + len(LENGTHS), generator=torch.Generator().manual_seed(5)
    ).double()
    results, gradients = [], []
    for function in (predict_batch, reference_values):
        model.zero_grad(set_to_none=True)
        results.append(torch.cat(function(model, batch)))
        (weights * results[-1]).sum().backward()
        gradients.append({name: param.grad for name, param in model.named_parameters()})
    torch.testing.assert_close(results[0], results[1], atol=1e-11, rtol=1e-10)
    values, after = results[0].split([len(batch.tokens), len(LENGTHS)])
    assert torch.equal(values != 0, batch.loss_mask)
    assert (after != 0).all()
    assert "score.weight" in gradients[0]
    for name, gradient in gradients[1].items():
        assert gradient.abs().max() > 1e-6, name
        torch.testing.assert_close(gradients[0][name], gradient, atol=1e-10, rtol=1e-8)


@torch.no_grad()
def test_a_token_changes_the_values_after_it_but_not_its_own():
    """A value is of the state a token was sampled in: the token itself, and other sequences, must not move it."""
    model = make_model(scalar_head=True)
    batch = make_batch((9, 6, 12), (3, 1, 2))
    batch = batch.replace(loss_mask=batch.layout().positions > 0)
    values, after = predict_batch(model, batch)
    for changed in (9, 11, 14):  # the first, a middle and the last token of the second sequence
        tokens = batch.tokens.clone()
        tokens[changed] = (tokens[changed] + 1) % VOCAB
        moved, moved_after = predict_batch(model, batch.replace(tokens=tokens))
        expected = torch.zeros_like(batch.loss_mask)
        expected[changed + 1 : 15] = True
        assert torch.equal((moved - values).abs() > 1e-9, expected)
        assert torch.equal((moved_after - after).abs() > 1e-9, torch.tensor([False, True, False]))
        torch.testing.assert_close(moved[~expected], values[~expected], atol=1e-12, rtol=0)


@torch.no_grad()
def test_a_completion_of_one_token_and_eos_has_two_values():
    """[a, EOS] after a prompt: the value before a and the one before EOS; what follows EOS is the score. Pitfall 13."""
    model, tokens = make_model(scalar_head=True), torch.tensor([5, 6, 7, 8, 1])
    layout = PackedLayout((5,), CPU)
    values, after = scalar_outputs(model, tokens, layout, select=torch.tensor([0, 0, 0, 1, 1]).bool())
    states = model(tokens, layout.positions, layout) @ model.score.weight[0]
    torch.testing.assert_close(values, torch.tensor([0, 0, 0, states[2], states[3]]).double())
    torch.testing.assert_close(after, states[4:])
    assert (values != 0).sum() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_values_and_scores_do_not_depend_on_packing_or_order(dtype, cut):
    """Alone or in a pack, in any order, each sequence has the values and the score it has in the whole batch."""
    model, batch = make_model(dtype, scalar_head=True), make_batch()
    tolerance = scalar_tolerance(model, dtype)
    if tolerance:
        print(f"not bitwise: this machine's {dtype} matrix products depend on the number of rows")
    for got, expected in zip(frozen_values(model, batch, cut), predict_batch(model, batch), strict=True):
        assert not got.requires_grad
        assert got.dtype == torch.float32
        assert (got - expected).abs().max().item() <= tolerance
        assert expected.std() > 0.1
    assert torch.equal(frozen_values(model, batch, cut)[0] != 0, batch.loss_mask)


@pytest.mark.parametrize("count", [17, 18, 31, 33])
@torch.no_grad()
def test_equal_sequences_have_equal_scores(count):
    """A group of equal completions has equal rewards: a difference of 1e-7 would be divided by its own deviation."""
    model, tokens = make_model(torch.float32, scalar_head=True), torch.arange(6).repeat(count)
    if not model.config.is_batch_invariant(torch.float32, CPU):
        pytest.skip("this machine's products are not batch-invariant")
    _, after = scalar_outputs(
        model, tokens, PackedLayout((6,) * count, CPU), select=torch.zeros(6 * count).bool()
    )
    assert len(set(after.tolist())) == 1


def test_frozen_values_of_a_part_leave_the_rest_missing():
    """Sequences in no microbatch have neither values nor a score; those in one have them in their own place."""
    model, batch = make_model(torch.float32, scalar_head=True), make_batch()
    values, after = frozen_values(model, batch, [[3], [1]])
    chosen = torch.zeros_like(batch.loss_mask)
    chosen[batch.token_index([1, 3])] = True
    assert torch.equal(~values.isnan(), chosen)
    assert torch.equal(values[chosen] != 0, batch.loss_mask[chosen])
    assert (~after.isnan()).tolist() == [False, True, False, True, False]


class CudaStub:
    """Copies on the CPU in place of pinned and device memory. `pinned` and `on_device`: their addresses."""

    def __init__(self, monkeypatch):
        self.pinned, self.on_device = {}, {}
        monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: self.pin_memory(tensor))
        monkeypatch.setattr(Tensor, "to", lambda tensor, *args, **kwargs: self.to(tensor, *args, **kwargs))

    def pin_memory(self, tensor):
        return tensor if tensor.data_ptr() in self.pinned else self.copy(tensor, self.pinned)

    def to(self, tensor, device, *, non_blocking):
        assert (device.type, non_blocking) == ("cuda", True)
        return tensor if tensor.data_ptr() in self.on_device else self.copy(tensor, self.on_device)

    def copy(self, tensor, memory):
        copied = tensor.clone()
        memory[copied.data_ptr()] = copied  # kept, so that no other tensor gets the address
        return copied


def addresses(model):
    return [parameter.data_ptr() for parameter in model.parameters()]


def test_a_frozen_model_is_pinned_once_and_parking_copies_nothing(monkeypatch):
    """Each use costs one copy to the device; afterwards the host has its own tensors back, and tied ones still are."""
    model = make_model(tied=True)
    values = [parameter.clone() for parameter in model.parameters()]
    stub, num_uses = CudaStub(monkeypatch), 3
    for _ in range(num_uses):
        with unparked(model, torch.device("cuda"), park=True):
            assert addresses(model) == list(stub.on_device)[-len(values) :]
            assert model.lm_head.weight is model.model.embed_tokens.weight
        assert addresses(model) == list(stub.pinned)
        assert all(map(torch.equal, model.parameters(), values))
    assert len(stub.on_device) == num_uses * len(values)


def test_a_frozen_model_that_is_not_parked_goes_to_the_device_once(monkeypatch):
    """It stays there, and no host memory is pinned for it."""
    model, stub = make_model(), CudaStub(monkeypatch)
    for _ in range(2):
        with unparked(model, torch.device("cuda"), park=False):
            assert addresses(model) == list(stub.on_device)
        assert addresses(model) == list(stub.on_device)
    assert not stub.pinned


@pytest.mark.parametrize("park", [False, True])
def test_a_frozen_model_on_the_cpu_is_never_copied(park):
    """Its tensors are those of the host, within the block and after it."""
    model = make_model()
    before = addresses(model)
    for _ in range(2):
        with unparked(model, CPU, park=park):
            assert addresses(model) == before
        assert addresses(model) == before
