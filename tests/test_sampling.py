"""Keyed noise, inverse-CDF sampling, and the logprobs of sampled tokens."""

import itertools

import pytest
import torch

from minirl.generation.sampling import (
    PURPOSES,
    apply_top_k_top_p,
    request_key,
    sample_by_inverse_cdf,
    seeded_uniforms,
)
from minirl.model import batch_invariance
from minirl.rollouts import Truncation
from support.sampling import RULES, columns, keys_of, random_head, sample_rows, sampled, sampling_rows

LARGEST_UNIFORM = 1 - 2.0**-53


def test_request_keys_are_distinct_over_seed_purpose_prompt_sample_and_branch():
    """No two requests of a run or of neighbouring seeds share noise; sums or xors of the parts would collide."""
    grid = list(itertools.product((0, 1, 2, 1 << 40), PURPOSES, range(64), range(32), range(3)))
    keys = {
        request_key(seed, purpose=purpose, prompt_ordinal=prompt, sample=number, branch=branch)
        for seed, purpose, prompt, number, branch in grid
    }
    assert len(keys) == len(grid)


@pytest.mark.parametrize(
    ("request_of", "expected"),
    [
        ((17, "train", 123, 7), (-837509448505106053, 0.26255618659824653)),
        ((17, "eval", 123, 7), (1545067207902306302, 0.4415553482805594)),
    ],
)
def test_keyed_noise_is_the_pinned_one(request_of, expected):
    """The noise must never change, because every past result depends on it."""
    seed, purpose, prompt, number = request_of
    got = request_key(seed, purpose=purpose, prompt_ordinal=prompt, sample=number)
    assert (got, seeded_uniforms(torch.tensor([got]), torch.tensor([9])).item()) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [1, 7, 512, 513, 1024, 1300, 5000])
def test_inverse_cdf_equals_a_search_in_the_flat_fp64_sum(vocab, dtype):
    """The two-level search finds the same token as a search in one fp64 cumulative sum, and does not change its input.

    A token without probability is never sampled, even at the ends of rows and blocks.
    """
    generator = torch.Generator().manual_seed(vocab)
    logits = 4 * torch.randn(400, vocab, generator=generator, dtype=dtype)
    logits[100:][torch.rand(300, vocab, generator=generator) < 0.7] = -torch.inf
    logits[200:300, 0] = -torch.inf  # no probability at the start: a uniform of 0 must skip this token
    logits[
        200:300, -1
    ] = -torch.inf  # no probability at the end: the largest uniform must not reach this token
    logits[300:, : vocab // 2] = -torch.inf  # whole blocks
    logprobs = torch.log_softmax(logits[logits.isfinite().any(-1)], -1)
    before = logprobs.clone()
    cdf = logprobs.double().exp().cumsum(-1)
    # Just next to a token's end, where rounding to fp32 would select the neighbour.
    some = torch.randint(vocab, (len(cdf), 1), generator=generator)
    ends = cdf.gather(1, some)[:, 0] / cdf[:, -1]
    for uniform in (ends - 1e-12, ends + 1e-12, 0 * ends, torch.full_like(ends, LARGEST_UNIFORM)):
        uniform = uniform.clamp(0, LARGEST_UNIFORM)
        got = sample_by_inverse_cdf(logprobs, uniform)
        assert torch.equal(logprobs, before)
        expected = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)
        assert got.tolist() == expected[:, 0].tolist()


@pytest.mark.parametrize(
    ("vocab", "temperature", "rule"), [(12, 0.8, Truncation()), (30, 1.5, Truncation(12, 0.95))]
)
def test_sampled_frequencies_match_the_probabilities(vocab, temperature, rule):
    """Forty thousand draws with distinct keys pass a chi-square test against the (truncated) softmax. Pitfall 5."""
    draws = 40_000
    generator = torch.Generator().manual_seed(3)
    hidden, head = torch.randn(1, 8, generator=generator), torch.randn(vocab, 8, generator=generator)
    tokens, logprobs = sampled(
        hidden.expand(draws, -1),
        head,
        keys=torch.arange(draws),
        positions=torch.full((draws,), 77),
        temperature=torch.full((draws,), temperature),
        truncation=columns([rule] * draws),
    )
    logits = hidden @ head.T / temperature
    apply_top_k_top_p(logits, torch.ones(1), *columns([rule]))
    probs = torch.softmax(logits[0].double(), -1)
    assert ((probs > 0).sum() < vocab) == (rule.top_k > 0)
    expected, counts = probs * draws, torch.bincount(tokens, minlength=vocab)
    assert not counts[probs == 0].any()
    frequent = expected > 10
    assert 6 <= frequent.sum() <= 12
    chi_square = ((counts - expected) ** 2 / expected)[frequent].sum().item()
    assert chi_square < 33  # at most 11 degrees of freedom: one in two thousand is above
    torch.testing.assert_close(logprobs.double(), probs.log()[tokens], rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("tile", [2048, 3])
def test_logprobs_are_natural_logs_at_the_sampling_temperature(temperature, tile):
    """Logits [1, 2, 0, -1] give the reference's logprobs, in one vocabulary tile and in two.

    At temperature 0, any key samples the likeliest token, with its logprob at temperature 1.
    """
    expected, rows = torch.tensor([-1.440190, -0.440190, -2.440190, -3.440190]), 200
    tokens, got = sampled(
        torch.ones(rows, 1),
        torch.tensor([[1.0], [2.0], [0.0], [-1.0]]),
        keys=keys_of(rows),
        positions=torch.arange(rows),
        temperature=torch.full((rows,), temperature),
        vocab_chunk=tile,
    )
    assert set(tokens.tolist()) == ({0, 1, 2, 3} if temperature else {1})
    torch.testing.assert_close(got, expected[tokens], atol=1e-6, rtol=0)


EVERYONE = torch.arange(24)


@pytest.mark.parametrize(("vocab", "tile"), [(100, 2048), (1300, 2048), (1300, 512)])
def test_a_row_of_nan_gives_a_token_with_a_nan_logprob(vocab, tile):
    """Broken weights give a NaN logprob, not an index out of range; other rows are unchanged."""
    rows, head = sampling_rows(torch.float32), random_head(vocab)
    tokens, logprobs = sample_rows(rows, head, RULES, EVERYONE, vocab_chunk=tile)
    rows["hidden"][:2] = torch.nan
    got_tokens, got_logprobs = sample_rows(rows, head, RULES, EVERYONE, vocab_chunk=tile)
    assert got_logprobs[:2].isnan().all()
    assert 0 <= got_tokens.min() <= got_tokens.max() < vocab
    assert torch.equal(got_tokens[2:], tokens[2:])
    assert torch.equal(got_logprobs[2:], logprobs[2:])


@pytest.mark.parametrize("rules", [[], RULES], ids=["whole", "truncated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [48, 1000, 2049])
def test_a_row_is_sampled_alike_alone_and_in_any_batch(dtype, vocab, rules):
    """Tokens and logprobs are bitwise equal in any batch of mixed temperatures and rules. Pitfall 51.

    Greedy rows and rows without a rule are sampled from the whole vocabulary.
    """
    rows, head = sampling_rows(dtype), random_head(vocab, dtype)
    expected = sample_rows(rows, head, rules, EVERYONE)
    if rules:
        is_whole = (rows["temperature"] == 0) | (columns(rules)[0] == 0)
        for got, whole in zip(expected, sampled(head=head, **rows), strict=True):
            assert torch.equal(got[is_whole], whole[is_whole])
        assert not torch.equal(expected[1], whole)
    exact = batch_invariance.is_batch_invariant([(64, vocab)], dtype, torch.device("cpu"), is_head=True)
    if not exact:
        print("1e-5 instead of equal bits: a row's bits depend on the batch in this machine's matrix library")
    for chosen in (EVERYONE.flip(0), *EVERYONE.split(1), *EVERYONE.split(2), *EVERYONE.split(3)):
        tokens, logprobs = sample_rows(rows, head, rules, chosen)
        assert torch.equal(tokens, expected[0][chosen])
        assert (logprobs - expected[1][chosen]).abs().max() <= (0 if exact else 1e-5)
