"""Logprobs, entropies and values equal those of full logits and autograd, however the work is split."""

import dataclasses
import math
from functools import partial

import pytest
import torch
from torch import Tensor

from minirl.model import batch_invariance
from minirl.model.families import config_from_dict
from minirl.model.transformer import Transformer, is_batch_invariant
from minirl.training.batch import Batch
from minirl.training.frozen_models import FrozenModel
from minirl.training.scoring import ChunkedLogprobs, predict_values
from support.engines import CPU, score_at, with_infos
from support.layouts import shuffled_members
from support.marks import slow
from support.memory import peak_bytes
from support.models import RAW_CONFIG
from support.sampling import sampled

# The head.

# Relative errors of logprobs and entropies, and of their gradients.
ERRORS = {torch.float64: (1e-14, 1e-11), torch.float32: (1e-6, 3e-6), torch.bfloat16: (1e-6, 2**-8)}


def full_logits(hidden, head, targets, divisor):
    """Return logprobs and entropies from full logits."""
    logprobs = (hidden @ head.T / divisor).log_softmax(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("sizes", [(7, 64), (30, 7), (40, 400), (89, 1099), (90, 1100), (99, 2048)])
@pytest.mark.parametrize("dtype", ERRORS)
def test_results_and_gradients_of_the_head_are_those_of_full_logits(dtype, sizes):
    """This holds for any chunk and tile sizes, within the dtype's error. Pitfalls 12 and 41.

    With bf16 states and weights, logprobs are exact to fp32: no logit is rounded to bf16, and gradients are rounded
    once, not in each tile. Pitfall 7.
    """
    generator = torch.Generator().manual_seed(6)
    hidden, head = torch.randn(90, 300, generator=generator), torch.randn(1100, 300, generator=generator) / 10
    targets = torch.randint(0, 1100, (90,), generator=generator)
    weights = torch.randn(2, 90, generator=generator)
    divisor = torch.tensor([0.75, 1.0, 1.5]).repeat(30)[:, None]
    for used in ([0], [1], [0, 1]):
        narrow = [leaf.to(dtype).requires_grad_() for leaf in (hidden, head)]
        wide = [leaf.detach().double().requires_grad_() for leaf in narrow]
        chunked = ChunkedLogprobs.apply(*narrow, targets, divisor, *sizes)
        results = []
        for outputs, leaves in ((chunked, narrow), (full_logits(*wide, targets, divisor), wide)):
            objective = sum((outputs[i] * weights[i]).sum() for i in used)
            results.append((outputs, torch.autograd.grad(objective, leaves)))
        for got, expected, error in zip(*results, ERRORS[dtype], strict=True):
            for x, y in zip(got, expected, strict=True):
                assert (x.double() - y).norm() < error * y.norm()


@pytest.mark.parametrize(("vocab", "tile"), [(37, 2048), (700, 512), slow(2049, 2048), slow(4500, 2048)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_sampled_logprobs_equal_scored_ones_over_tiles_of_the_vocabulary(vocab, tile, dtype):
    """Sampling gives training's bits with one tile or several, an uneven last tile, and few or many rows."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(300, 64, generator=generator).to(dtype)
    head = torch.randn(vocab, 64, generator=generator).div(4).to(dtype)
    exact = batch_invariance.is_batch_invariant([(64, vocab)], dtype, CPU, is_head=True)
    for rows, temperature in ((1, 1.0), (3, 0.7), (17, 1.3), (300, 0.7)):
        noise = {"keys": torch.arange(rows), "positions": torch.arange(rows)}
        heat, divisor = torch.full((rows,), temperature), torch.full((300, 1), temperature)
        tokens, logprobs = sampled(hidden[:rows], head, **noise, temperature=heat, vocab_chunk=tile)
        everything = torch.cat([tokens, torch.randint(0, vocab, (300 - rows,), generator=generator)])
        # Some chunk sizes leave 1, 2 or 3 rows for the last chunk.
        for chunk in (1000, 299, 298, 297, 37):
            scored, _ = ChunkedLogprobs.apply(hidden, head, everything, divisor, chunk, tile)
            assert (scored[:rows] - logprobs).abs().max() <= (0 if exact else 1e-5), (rows, chunk)


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)])
def test_logits_and_the_head_in_fp32_never_exist_as_a_whole(dtype):
    """Besides the head's gradient, forward and backward hold one chunk of one tile, or one tile of the head."""
    rows, vocab, width = 300, 8000, 32
    hidden, head = (torch.randn(n, width).to(dtype).requires_grad_() for n in (rows, vocab))

    def train():
        outputs = ChunkedLogprobs.apply(hidden, head, torch.arange(rows), torch.ones(rows, 1), 64, 128)
        torch.stack(outputs).sum().backward()

    train()  # measures the matmuls once
    hidden.grad = head.grad = None
    assert head.nbytes < peak_bytes(train) < head.nbytes + 4 * vocab * width / 2


@pytest.mark.parametrize("tile", [8, 3, 2, 1])
def test_tokens_of_no_probability_leave_results_finite_but_broken_weights_do_not(tile):
    """Logits of -inf, or so far apart that probabilities underflow, give no NaN: 0 log 0 is 0.

    A NaN in the head makes every logprob and gradient NaN. Pitfall 42.
    """

    def results(last):
        head = torch.tensor([[0.0], [0.0], [-2000.0], [last]], requires_grad=True)
        hidden = torch.ones(1, 1, requires_grad=True)
        both = ChunkedLogprobs.apply(hidden, head, torch.tensor([0]), torch.ones(1, 1), 8, tile)
        (both[0].sum() + 3 * both[1].sum()).backward()
        return torch.cat(both), head.grad[:, 0], hidden.grad

    outputs, of_head, _ = results(-torch.inf)
    assert outputs.tolist() == pytest.approx([-math.log(2), math.log(2)])
    assert of_head.tolist() == pytest.approx([0.5, -0.5, 0.0, 0.0], abs=1e-6)
    outputs, _, of_hidden = results(torch.nan)
    assert outputs[0].isnan()
    assert of_hidden.isnan()


# Models.

VOCAB = 37


def make_model(dtype, *, tied=False, scalar_head=False):
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


score_sampled = partial(score_at, temperature=0.75)


GROUPS = [(1, 3, 60), (127, 1, 2, 60), (128, 9, 1, 0), (129, 40, 2, 1, 7, 7), (5, 30)]


def make_groups(seed):
    """Return a batch of shuffled groups with prompts around a block border; two rollouts are equal.

    One rollout consists of its prompt only.
    """
    generator = torch.Generator().manual_seed(seed)
    infos = shuffled_members(GROUPS, seed)
    openings = [torch.randint(0, VOCAB, (prompt,), generator=generator) for prompt, *_ in GROUPS]
    # Tokens depend on the sizes, so the two rollouts with 7 sampled tokens are equal.
    sizes = [one[1:] for one in infos]
    own = {size: torch.randint(0, VOCAB, (size[0] - size[1],), generator=generator) for size in sizes}
    tokens = torch.cat([torch.cat([openings[one.id.prompt_ordinal], own[one[1:]]]) for one in infos])
    mask = torch.cat([torch.arange(one.num_tokens) >= one.num_prompt_tokens for one in infos])
    return Batch(infos, tokens, mask)


def frozen_results(language, scalar, batch, cut):
    """Return logprobs and values [T], and sequences' values after their last tokens [N], added by `FrozenModel`s."""
    for model, of_model, names in (
        (language, score_sampled, ["old_logprobs"]),
        (scalar, predict_values, ["values", "end_values"]),
    ):
        batch = FrozenModel(model, of_model, names=names, device=CPU).add_outputs(batch, cut)
    return batch.old_logprobs, batch.values, batch.end_values[batch.last_token_index]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [0, slow(1)])
@torch.no_grad()
def test_results_depend_neither_on_microbatches_nor_on_sharing_prompts(dtype, seed):
    """Covers whole and split groups, any order, single sequences and empty microbatches. Pitfall 38.

    Logprobs, entropies, values and scores of each completion, first tokens included, have the same bits as without
    sharing. Sequences in no microbatch get NaN.
    """
    language, scalar = make_model(dtype), make_model(dtype, scalar_head=True)
    is_exact = is_batch_invariant(language.config, dtype, CPU)
    tolerance = 0 if is_exact else 1e-6 if dtype == torch.float32 else 0.1
    batch = make_groups(seed)
    unshared = with_infos(batch, num_prompt_tokens=0)
    query_lengths, num_tokens = (len(b.layout().computed_tokens) for b in (batch, unshared))
    assert query_lengths < num_tokens - 700
    every = list(batch.sequences)
    logprobs, entropies = score_sampled(language, unshared)
    values, end_values = predict_values(scalar, unshared)
    expected = logprobs, values, end_values[batch.last_token_index]
    assert (score_sampled(language, batch)[1] - entropies).abs().max() <= tolerance
    for cut in ([every], [every[::2], [], every[1::2]], [every[::-1]], [[one] for one in every]):
        for x, y in zip(frozen_results(language, scalar, batch, cut), expected, strict=True):
            assert x.dtype == torch.float32
            assert y.std() > 0.1
            assert (x - y).abs().max() <= tolerance
    *streams, scores = frozen_results(language, scalar, batch, [[every[3]], [every[1]]])
    is_chosen = torch.zeros(len(batch.tokens), dtype=torch.bool)
    is_chosen[batch.token_index([every[1], every[3]])] = True
    assert all(torch.equal(~stream.isnan(), is_chosen) for stream in streams)
    assert torch.equal(~scores.isnan(), is_chosen[batch.last_token_index])


def test_parking_a_frozen_model_copies_nothing_back(monkeypatch):
    """Each use copies the model to the device; afterwards, the model has its host tensors back, and ties are kept."""
    model = make_model(torch.float32, tied=True)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)  # as for a pinned tensor
    monkeypatch.setattr(Tensor, "to", lambda tensor, *_, **__: tensor.clone())
    on_host = [parameter.data_ptr() for parameter in model.parameters()]

    def check_device(model, batch):
        assert {*on_host}.isdisjoint(parameter.data_ptr() for parameter in model.parameters())
        assert model.lm_head.weight is model.model.embed_tokens.weight
        return [torch.zeros(len(batch.tokens))]

    frozen = FrozenModel(model, check_device, names=["ref_logprobs"], device=torch.device("cuda"))
    for _ in range(2):
        batch = make_groups(0)
        frozen.add_outputs(batch, [batch.sequences[:1]])
        assert on_host == [parameter.data_ptr() for parameter in model.parameters()]
