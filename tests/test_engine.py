"""Engine: a rollout depends only on request and weights, and its logprobs equal the scoring pass's."""

import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from minirl.generation.kv_cache import KVCache
from minirl.model.config import ModelConfig
from minirl.model.transformer import Transformer, is_batch_invariant
from minirl.rollouts import Rollout
from minirl.training.batch import pack
from support.engines import (
    CPU,
    STOP_IDS,
    VOCAB,
    WINDOWS,
    cached_model,
    has_memory,
    make_engine,
    make_model,
    make_prompt,
    make_request,
    mixed_requests,
    run,
    scores_of,
)
from support.marks import slow

# bf16 covers both kinds of attention; test_delta_net.py covers bf16 states.
VARIANTS = [("mixed", torch.float32), slow("mixed", torch.bfloat16)]
VARIANTS += [slow(attention, torch.float32) for attention in WINDOWS if attention != "mixed"]
for_every_model = pytest.mark.parametrize(
    ("attention", "dtype"), VARIANTS, ids=lambda x: str(x).removeprefix("torch.")
)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill new caches with garbage."""

    def make(cache, make=KVCache.pool.func):
        pool = make(cache)
        pool.keys.fill_(-37.5)
        pool.values.fill_(1e3)
        return pool

    monkeypatch.setattr(KVCache.pool, "func", make)


@functools.cache
def expected_rollouts(attention: str, dtype: torch.dtype) -> list[Rollout]:
    """Return the rollouts of `mixed_requests` from an engine with room for all requests."""
    rollouts = make_engine(cached_model(attention, dtype)).generate(mixed_requests())
    assert len({len(r.completion) for r in rollouts}) > 8, "lengths do not vary"
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}
    return rollouts


@functools.cache
def tolerance_for(config: ModelConfig, dtype: torch.dtype) -> float:
    """Return 0 if all matmuls of this model are batch-invariant, otherwise a tolerance for rounding errors."""
    if is_batch_invariant(config, dtype, CPU):
        return 0.0
    print(f"not bitwise: this machine's {dtype} matmuls depend on the number of rows")
    return 1e-5 if dtype == torch.float32 else 0.1


def tolerance(model: Transformer) -> float:
    return tolerance_for(model.config, model.lm_head.weight.dtype)


def assert_same(got: Sequence[Rollout], expected: Sequence[Rollout], model: Transformer) -> None:
    """Assert that the rollouts are the same in any order, bit for bit, or with logprobs equal up to rounding."""
    allowed = tolerance(model)
    if allowed > 1e-5:
        pytest.skip("bf16 matmuls on this machine depend on the number of rows, so rollouts may too")
    by_id = {rollout.rollout_id: rollout for rollout in got}
    assert len(by_id) == len(got) == len(expected)
    for rollout in expected:
        twin = by_id[rollout.rollout_id]
        assert twin.tokens.tolist() == rollout.tokens.tolist(), rollout.rollout_id
        assert twin.finish_reason == rollout.finish_reason
        assert twin.num_prompt_tokens == rollout.num_prompt_tokens
        assert np.abs(twin.stream["logprob"] - rollout.stream["logprob"]).max() <= allowed


# Sampled logprobs equal scoring logprobs.


@for_every_model
def test_sampled_logprobs_equal_scoring_logprobs(attention, dtype):
    """Scoring gives the engine's logprobs bit for bit at every temperature. Pitfalls 4 and 38.

    Sequences cross block borders and windows, while other rows finish and free their blocks.
    """
    model = cached_model(attention, dtype)
    longer = [
        make_request(make_prompt(n), number=n, max_new_tokens=40, stop_ids=frozenset()) for n in (1, 230)
    ]
    requests = [
        replace(request, temperature=temperature)
        for request, temperature in zip(mixed_requests() + longer, itertools.cycle((0.7, 1.0, 1.3, 0.0)))
    ]
    rollouts = make_engine(model).generate(requests)
    assert [len(r.completion) for r in rollouts[-2:]] == [40, 40], "these requests have no stop ids"
    sampled = pack(rollouts).sample_logprobs
    assert sampled.std() > 0.5, "the model is too certain, or too uncertain, for the comparison to mean much"
    scored = scores_of(model, rollouts)
    assert (scored - sampled).abs().max() <= tolerance(model)
    assert scored.requires_grad
    with torch.no_grad():
        assert torch.equal(scores_of(model, rollouts), scored)


# Rollouts do not depend on scheduling.

SCHEDULES = {
    "late, padded, at any time": {"max_prefill_tokens": 300, "async_decoding": True, "cuda_graphs": True},
    "preempted": {"cache_tokens": 320},
}


@for_every_model
@pytest.mark.parametrize("name", SCHEDULES)
def test_rollouts_do_not_depend_on_the_schedule(attention, dtype, name):
    """No schedule changes a bit or samples a token twice. Pitfalls 11 and 51.

    Covers small prefills, preempted rows, tokens that are read one step late, padded steps as in CUDA graphs (called
    eagerly), and split groups that arrive while others decode.
    """
    options = SCHEDULES[name]
    is_late = "late" in name
    model = cached_model(attention, dtype)
    engine = make_engine(model, **options)
    rng = random.Random(0)
    waiting = mixed_requests()
    if is_late:
        rng.shuffle(waiting)
    else:
        engine.submit(waiting)
        waiting = []
    rollouts, prefills = [], []
    for _ in range(4000):
        if waiting and rng.random() < 0.2:
            engine.submit([waiting.pop() for _ in range(rng.randint(1, len(waiting)))])
        before = engine.stats.prefill_tokens
        rollouts += engine.step()
        prefills.append(engine.stats.prefill_tokens - before)
        if not engine.is_busy and not waiting:
            break
    assert_same(rollouts, expected_rollouts(attention, dtype), model)
    assert not has_memory(engine), "training needs the memory"
    assert max(prefills) <= options.get("max_prefill_tokens", 8192)
    assert sum(count > 0 for count in prefills) > 2
    stats = engine.take_stats()
    assert (stats.preemptions > 0) != is_late
    num_decoded = stats.decode_tokens - stats.discarded_tokens
    num_prefilled_rows = len(rollouts) + stats.preemptions  # each sampled one token
    assert num_decoded + num_prefilled_rows == sum(len(r.completion) for r in rollouts), "sampled twice"
    # Each stop token before the limit costs one discarded row.
    stopped = sum(r.finish_reason == "stop" and len(r.completion) < 32 for r in rollouts)
    assert stats.discarded_tokens == is_late * stopped
    assert stats.wasted_tokens == stats.computed_tokens - num_decoded


@for_every_model
def test_rollouts_in_parts_go_on_as_if_nothing_had_happened(attention, dtype):
    """Rollouts alternate between two engines with equal weights; a token has the version of its phase. Pitfall 40."""
    model = cached_model(attention, dtype)
    engines = [make_engine(model, max_running_requests=n, async_decoding=True) for n in (20, 9)]
    rollouts, unfinished = [], mixed_requests()
    for phase, num_tokens in enumerate(itertools.cycle((1, 5, 9)), start=4):
        engine = engines[phase % 2]
        limits = [min(len(request.sampled) + num_tokens, 32) for request in unfinished]
        parts = [replace(r, max_new_tokens=limit) for r, limit in zip(unfinished, limits, strict=True)]
        by_id = {rollout.rollout_id: rollout for rollout in run(engine, parts, weight_version=phase)}
        assert not has_memory(engine)
        left = []
        for request in unfinished:
            rollout = by_id[request.rollout_id]
            old = request.sampled["weight_version"].tolist()
            new = [phase] * (len(rollout.completion) - len(old))
            assert rollout.stream["weight_version"].tolist() == [0] * rollout.num_prompt_tokens + old + new
            if rollout.finish_reason == "length" and len(rollout.completion) < 32:
                left.append(replace(request, sampled=rollout.tokens_after_prompt))
            else:
                rollouts.append(rollout)
        unfinished = left
        if not unfinished:
            break
    assert phase > 6
    assert_same(rollouts, expected_rollouts(attention, dtype), model)


# Ends.


@functools.cache
def endless_rollouts() -> list[Rollout]:
    requests = [replace(request, stop_ids=frozenset()) for request in mixed_requests()]
    rollouts = make_engine(cached_model("full", torch.float32)).generate(requests)
    assert {len(r.completion) for r in rollouts} == {32}
    assert {r.finish_reason for r in rollouts} == {"length"}
    return rollouts


@pytest.mark.parametrize("limit", [slow(1), slow(2), 32])
@pytest.mark.parametrize("stop_ids", [{3}, STOP_IDS, set(range(0, VOCAB, 2))], ids=["one", "three", "half"])
def test_a_rollout_is_the_endless_one_cut_behind_its_first_stop_token_or_at_its_limit(limit, stop_ids):
    """Each listed id stops a rollout, and the stop token is kept as the last sampled token. Pitfalls 13, 14 and 55.

    The limit counts sampled tokens, whatever the prompt's length.
    """
    requests = [replace(r, stop_ids=frozenset(stop_ids), max_new_tokens=limit) for r in mixed_requests()]
    rollouts = make_engine(cached_model("full", torch.float32)).generate(requests)
    ends = set()
    for rollout, endless in zip(rollouts, endless_rollouts(), strict=True):
        whole = endless.completion
        stop = next((i for i, token in enumerate(whole) if token in stop_ids), len(whole))
        assert rollout.completion == whole[: min(stop + 1, limit)]
        assert rollout.finish_reason == ("stop" if stop < limit else "length")
        assert bool(rollout.loss_mask[-1])
        if rollout.finish_reason == "stop":
            ends.add(rollout.completion[-1])
    if limit == 32:
        assert ends == stop_ids or len(stop_ids) > 3


# Requests that cannot be served.


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request([1] * 500, max_new_tokens=13), "513 tokens .* 512 positions"),
        (make_request([1] * 200, max_new_tokens=57), "257 tokens .* --cache-tokens"),
    ],
    ids=["positions", "cache"],
)
def test_a_request_that_cannot_be_served_is_refused_by_name_and_leaves_nothing_behind(request_, message):
    """The ValueError has the number and the limit; other requests are not queued either, and no cache is kept.

    With one token less, the request is served to its end.
    """
    cache_tokens = 256 if "cache" in message else 8192
    engine = make_engine(cached_model("full", torch.float32), cache_tokens=cache_tokens)
    with pytest.raises(ValueError, match=message):
        engine.submit([make_request([5]), request_])
    assert engine.step() == engine.generate([]) == []
    assert not has_memory(engine)
    limit = request_.max_new_tokens - 1
    (rollout,) = run(engine, [replace(request_, max_new_tokens=limit, stop_ids=frozenset())])
    assert len(rollout.tokens) == int(message.split()[0]) - 1


@pytest.mark.parametrize(("prompt", "max_new_tokens"), [([], 5), ([1], 0)])
def test_a_request_that_leaves_nothing_to_sample_from_or_to_sample_is_refused(prompt, max_new_tokens):
    """The error has the reason and comes before the request takes a row."""
    with pytest.raises(ValueError, match=r"the prompt is empty|max_new_tokens 0 leaves no token"):
        make_engine(cached_model("full", torch.float32)).submit(
            [make_request(prompt, max_new_tokens=max_new_tokens)]
        )


# Weights and cache.


@for_every_model
@pytest.mark.parametrize("how", ["keeps_cache async_decoding cuda_graphs", slow("")])
def test_new_weights_never_meet_an_old_cache(attention, dtype, how):
    """After weights change in place, a used engine gives a fresh engine's rollouts. Pitfalls 10 and 11.

    This holds even if the engine keeps its cache's memory and the graphs that read the cache.
    """
    model = make_model(attention, dtype)
    engine = make_engine(model, cache_tokens=4096, **dict.fromkeys(how.split(), True))
    before = run(engine, mixed_requests())
    assert has_memory(engine) == ("keeps_cache" in how)
    kept = vars(engine._cache).get("pool"), engine._graphs
    assert engine._cache.blocks.ref_counts.sum() == ("cuda_graphs" in how), (
        "a sequence stays, besides the padding"
    )
    model.load_state_dict(make_model(attention, dtype, seed=1).state_dict())
    after = run(engine, mixed_requests())
    assert_same(after, run(make_engine(model), mixed_requests()), model)
    assert (vars(engine._cache).get("pool"), engine._graphs) == kept
    completions = {r.rollout_id: r.completion for r in after}
    assert sum(completions[r.rollout_id] != r.completion for r in before) > len(before) / 2
