"""The engine: a rollout depends on its request and the weights alone, and its logprobs are those of scoring."""

import functools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from minirl.generation.kv_cache import KVCache
from minirl.model import batch_invariance, padding
from minirl.model.attention import PackedLayout
from minirl.model.config import ModelConfig
from minirl.model.transformer import Transformer
from minirl.rollouts import Rollout, RolloutId
from minirl.training.scoring import score
from support.cuda_rules import pad_as_on_cuda
from support.engines import (
    CPU,
    STOP_IDS,
    VOCAB,
    WINDOWS,
    cached_model,
    finish,
    make_engine,
    make_model,
    make_prompt,
    make_request,
    mixed_requests,
    run,
)

ALL_VARIANTS = [(attention, dtype) for attention in WINDOWS for dtype in (torch.float32, torch.bfloat16)]
SOME_VARIANTS = [
    ("mixed", torch.float32),
    ("full", torch.bfloat16),
    ("windowed", torch.float32),
    ("mixed", torch.bfloat16),
]


FAST_VARIANTS = [("full", torch.float32), ("mixed", torch.bfloat16)]


def variants(chosen: list[tuple[str, torch.dtype]]) -> pytest.MarkDecorator:
    """Models of these kinds of attention and dtypes; all but two are slow tests."""
    params = [
        pytest.param(*variant, marks=[] if variant in FAST_VARIANTS else pytest.mark.slow)
        for variant in chosen
    ]
    return pytest.mark.parametrize(
        ("attention", "dtype"), params, ids=lambda x: str(x).removeprefix("torch.")
    )


@functools.cache
def expected_rollouts(attention: str, dtype: torch.dtype) -> dict[RolloutId, tuple]:
    rollouts = make_engine(cached_model(attention, dtype)).generate(mixed_requests())
    assert len({len(r.tokens) - r.num_prompt_tokens for r in rollouts}) > 8, "lengths do not vary"
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}
    return contents(rollouts)


def contents(rollouts: Sequence[Rollout]) -> dict[RolloutId, tuple]:
    """What must not depend on scheduling."""
    assert len({r.rollout_id for r in rollouts}) == len(rollouts)
    return {
        r.rollout_id: (r.tokens.tolist(), r.finish_reason, r.num_prompt_tokens, r.sample_logprobs.tolist())
        for r in rollouts
    }


@functools.cache
def tolerance_for(config: ModelConfig, dtype: torch.dtype) -> float:
    if config.is_batch_invariant(dtype, CPU):
        return 0.0
    print(f"not bitwise: this machine's {dtype} matrix products depend on the number of rows")
    return 1e-5 if dtype == torch.float32 else 0.1


def tolerance(model: Transformer) -> float:
    """0 where every product of this model gives a row the same bits in any batch, else what rounding allows."""
    return tolerance_for(model.config, model.lm_head.weight.dtype)


def assert_same(got: dict[RolloutId, tuple], expected: dict[RolloutId, tuple], model: Transformer) -> None:
    """The same rollouts: bit for bit, or up to rounding in fp32 where products are not batch-invariant."""
    if (allowed := tolerance(model)) > 1e-5:
        pytest.skip("bf16 products of this machine depend on the number of rows, so rollouts may too")
    assert_near(got, expected, allowed)


def assert_near(got: dict[RolloutId, tuple], expected: dict[RolloutId, tuple], allowed: float) -> None:
    """The same rollouts, but for a difference of logprobs."""
    assert got.keys() == expected.keys()
    for rollout_id, (*what, logprobs) in expected.items():
        *got_what, got_logprobs = got[rollout_id]
        assert got_what == what, rollout_id
        assert got_logprobs == pytest.approx(logprobs, rel=0, abs=allowed), rollout_id


def assert_expected(rollouts: Sequence[Rollout], attention: str, dtype: torch.dtype) -> None:
    """They are the rollouts of `mixed_requests` that an engine with room for all of them gives."""
    expected = expected_rollouts(attention, dtype)
    assert_same(contents(rollouts), expected, cached_model(attention, dtype))


def score_rollouts(
    model: Transformer, rollouts: Sequence[Rollout], temperature: float, **kwargs: int
) -> Tensor:
    """The scoring path's logprobs of the rollouts, packed end to end."""
    layout = PackedLayout(tuple(len(r.tokens) for r in rollouts), CPU)
    tokens, select = (torch.cat([getattr(r, name) for r in rollouts]) for name in ("tokens", "loss_mask"))
    return score(model, tokens, layout, select=select, temperature=temperature, **kwargs)[0]


# Sampled logprobs equal scoring logprobs.


@variants(ALL_VARIANTS)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_logprobs_equal_scoring_logprobs(attention, dtype, temperature):
    """What the engine recorded, training recomputes bit for bit, at any temperature and prompt. Pitfalls 4 and 38."""
    model = cached_model(attention, dtype)
    requests = [replace(request, temperature=temperature) for request in mixed_requests()]
    rollouts = make_engine(model).generate(requests)
    scored = score_rollouts(model, rollouts, temperature)
    sampled = torch.cat([r.sample_logprobs for r in rollouts])
    assert scored.requires_grad
    assert sampled.std() > 0.5, "the model is too certain, or too uncertain, for the comparison to mean much"
    assert (scored - sampled).abs().max().item() <= tolerance(model)
    with torch.no_grad():
        assert torch.equal(score_rollouts(model, rollouts, temperature), scored)


@pytest.mark.parametrize("mlp_width", [1, 31, 131, 192, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampled_logprobs_equal_scoring_logprobs_at_any_mlp_width(dtype, mlp_width):
    """Widths that leave a tail for the vectorised activation, or none, are all exact."""
    model = make_model("full", dtype, mlp_width=mlp_width)
    rollouts = make_engine(model).generate(mixed_requests()[1:12:2])
    for rollout, request in zip(rollouts, mixed_requests()[1:12:2], strict=True):
        scored = score_rollouts(model, [rollout], request.temperature)
        assert (scored - rollout.sample_logprobs).abs().max().item() <= tolerance(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampled_logprobs_equal_scoring_logprobs_at_any_chunk(dtype):
    """The rows of the head's last chunk, 1, 2 or 3 of them, or one row at a time, do not matter."""
    model = cached_model("full", dtype)
    rollouts = make_engine(model).generate([r for r in mixed_requests() if r.temperature == 1.0])
    sampled = torch.cat([r.sample_logprobs for r in rollouts])
    count = int(sum(r.loss_mask.sum() for r in rollouts))
    leaving = [next(chunk for chunk in range(20, count) if count % chunk == rest) for rest in (1, 2, 3)]
    for chunk in (1, 2, 3, *leaving, count - 3, count - 1, count, count + 9):
        scored = score_rollouts(model, rollouts, 1.0, token_chunk=chunk)
        assert (scored - sampled).abs().max().item() <= tolerance(model), f"chunk {chunk} of {count}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scoring_does_not_depend_on_how_rollouts_are_packed(dtype):
    """Alone, in reverse order or among others, a rollout is scored as it was sampled."""
    model = cached_model("mixed", dtype)
    rollouts = make_engine(model).generate([r for r in mixed_requests() if r.temperature == 1.0])
    for packed in ([r] for r in rollouts):
        gap = score_rollouts(model, packed, 1.0) - packed[0].sample_logprobs
        assert gap.abs().max().item() <= tolerance(model)
    gap = score_rollouts(model, rollouts[::-1], 1.0) - torch.cat([r.sample_logprobs for r in rollouts[::-1]])
    assert gap.abs().max().item() <= tolerance(model)


# Cached decode equals the full forward.


@torch.no_grad()
def greedy_uncached(model: Transformer, prompt: list[int], num_new: int) -> tuple[list[int], list[float]]:
    """The slow twin: the whole sequence through the model again for every token."""
    tokens, logprobs = list(prompt), []
    for _ in range(num_new):
        layout = PackedLayout((len(tokens),), CPU)
        hidden = model(torch.tensor(tokens), layout.positions, layout)[-1:]
        logits = batch_invariance.head_logits(hidden, model.lm_head.weight)[0]
        tokens.append(int(logits.argmax()))
        logprobs.append(torch.log_softmax(logits, -1)[tokens[-1]].item())
    return tokens, logprobs


@variants(ALL_VARIANTS)
@pytest.mark.parametrize("prompt_length", [3, 120, 128])
def test_greedy_cached_decode_equals_the_full_forward(attention, dtype, prompt_length):
    """Token by token, over the borders of cache blocks and past the window, the cache changes nothing."""
    model = cached_model(attention, dtype)
    num_new = (
        140 if prompt_length == 120 else 24
    )  # 120 + 140 tokens: two borders, and beyond the window of 150
    prompt = make_prompt(prompt_length)
    request = make_request(prompt, temperature=0.0, max_new_tokens=num_new, stop_ids=frozenset())
    beside = [make_request(make_prompt(n), number=n, stop_ids=frozenset()) for n in (2, 40, 127)]
    (rollout,) = (
        r for r in run(make_engine(model), [*beside, request]) if r.rollout_id == request.rollout_id
    )
    tokens, logprobs = greedy_uncached(model, prompt, num_new)
    assert rollout.tokens.tolist() == tokens
    assert len(set(tokens[prompt_length:])) > 5
    got = rollout.sample_logprobs[prompt_length:].tolist()
    assert got == pytest.approx(logprobs, rel=0, abs=tolerance(model))


# Rollouts do not depend on scheduling.


@variants(SOME_VARIANTS)
@pytest.mark.parametrize("max_running_requests", [1, 3])
def test_rollouts_do_not_depend_on_the_number_of_running_requests(attention, dtype, max_running_requests):
    """One row at a time, three, or (the expected ones) all at once: the same rollouts. Pitfall 51."""
    model = cached_model(attention, dtype)
    rollouts = run(make_engine(model, max_running_requests=max_running_requests), mixed_requests())
    assert_expected(rollouts, attention, dtype)


@variants(SOME_VARIANTS)
@pytest.mark.parametrize("num_blocks", [2, 5])
def test_rollouts_do_not_depend_on_preemption(attention, dtype, num_blocks):
    """With a cache so small that rows are thrown out and recomputed, the rollouts are the same."""
    model = cached_model(attention, dtype)
    engine = make_engine(model, cache_tokens=128 * num_blocks)
    rollouts = run(engine, mixed_requests())
    assert engine.stats.preemptions > 0
    num_prefilled_rows = len(rollouts) + engine.stats.preemptions  # each sampled one token
    num_sampled = sum(len(r.completion) for r in rollouts)
    assert engine.stats.decode_tokens + num_prefilled_rows == num_sampled, "a token was sampled twice"
    assert_expected(rollouts, attention, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rollouts_do_not_depend_on_the_order_of_submission(dtype):
    """Shuffled requests, groups torn apart: the same rollouts, in the order of the requests. Pitfalls 51 and 53."""
    model = cached_model("mixed", dtype)
    for seed in range(3):
        requests = mixed_requests()
        random.Random(seed).shuffle(requests)
        rollouts = make_engine(model, max_running_requests=7).generate(requests)
        assert [r.rollout_id for r in rollouts] == [r.rollout_id for r in requests]
        assert_expected(rollouts, "mixed", dtype)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("cache_tokens", [384, 8192])
def test_rollouts_do_not_depend_on_the_moment_of_submission(cache_tokens, late):
    """Requests that arrive while others decode, also under preemption and read late, give the same rollouts."""
    model = cached_model("mixed", torch.float32)
    rng = random.Random(0)
    engine = make_engine(model, max_running_requests=10, cache_tokens=cache_tokens, async_decoding=late)
    waiting, rollouts = mixed_requests(), []
    while waiting:
        count = rng.randint(1, 6)
        engine.submit(waiting[:count])
        waiting = waiting[count:]
        for _ in range(rng.randint(0, 9)):
            rollouts += engine.step()
    rollouts += finish(engine, len(mixed_requests()) - len(rollouts))
    assert (engine.stats.preemptions > 0) == (cache_tokens == 384)
    assert_expected(rollouts, "mixed", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_prefill_tokens", [1, 130, 300])
def test_rollouts_do_not_depend_on_the_prefill_budget(dtype, max_prefill_tokens):
    """Prompts alone, by twos or threes in a prefill: the same rollouts, and never more tokens than the budget."""
    model = cached_model("windowed", dtype)
    engine = make_engine(model, max_prefill_tokens=max_prefill_tokens)
    prefills = []
    engine.submit(mixed_requests())
    rollouts = []
    while len(rollouts) < len(mixed_requests()):
        before = engine.stats.prefill_tokens
        rollouts += engine.step()
        prefills.append(engine.stats.prefill_tokens - before)
        assert len(prefills) < 1000
    assert max(prefills) <= max(max_prefill_tokens, 150)
    assert sum(count > 0 for count in prefills) > 2
    assert_expected(rollouts, "windowed", dtype)


@variants(SOME_VARIANTS)
@pytest.mark.parametrize("num_steps", [0, 1, 23])
def test_an_aborted_rollout_goes_on_as_if_nothing_had_happened(attention, dtype, num_steps):
    """Unfinished requests, submitted again to another engine at equal weights, give the same rollouts; each token
    carries the version of the phase that sampled it. Pitfall 40."""
    model = cached_model(attention, dtype)
    first, second = make_engine(model, max_running_requests=20), make_engine(model, max_running_requests=9)
    first.submit(mixed_requests(), weight_version=4)
    rollouts = [rollout for _ in range(num_steps) for rollout in first.step()]
    unfinished = first.abort()
    assert first._cache is None
    assert {r.rollout_id for r in rollouts}.isdisjoint(r.rollout_id for r in unfinished)
    assert len(rollouts) + len(unfinished) == len(mixed_requests())
    num_sampled = {r.rollout_id: len(r.sampled) for r in unfinished}
    assert any(num_sampled.values()) == (num_steps > 0)
    rollouts += run(second, unfinished, weight_version=5)
    assert_expected(rollouts, attention, dtype)
    for rollout in rollouts:
        completion = len(rollout.tokens) - rollout.num_prompt_tokens
        old = num_sampled.get(rollout.rollout_id, completion)
        expected = [0] * rollout.num_prompt_tokens + [4] * old + [5] * (completion - old)
        assert rollout.weight_version.tolist() == expected


@variants(ALL_VARIANTS)
def test_rollouts_do_not_depend_on_compaction(attention, dtype, monkeypatch):
    """Rows that finish while nothing waits make the others' blocks move: the same rollouts as when none ever does."""
    model, moved = cached_model(attention, dtype), []

    def compact(cache):
        before = [tables.blocks.clone() for tables in cache.tables]
        original(cache)
        moved.append(
            any(not torch.equal(*pair) for pair in zip(before, (t.blocks for t in cache.tables), strict=True))
        )

    original = KVCache.compact
    monkeypatch.setattr(KVCache, "compact", compact)
    requests = [
        make_request(make_prompt(length), number=number, member=member, max_new_tokens=20 * (1 + number % 4))
        for number, length in enumerate((1, 5, 120, 127, 128, 129, 260, 300))
        for member in range(3)
    ]
    rollouts = run(make_engine(model), requests)
    assert sum(moved) > 3, "nothing was compacted"
    monkeypatch.setattr(KVCache, "compact", lambda *_: None)
    assert_same(contents(rollouts), contents(run(make_engine(model), requests)), model)


# Tokens that are read one step late.


@variants(SOME_VARIANTS)
@pytest.mark.parametrize(
    ("max_running_requests", "cache_tokens", "max_prefill_tokens"),
    [
        (64, 8192, 8192),
        pytest.param(3, 8192, 130, marks=pytest.mark.slow),
        (64, 256, 8192),
        pytest.param(64, 640, 300, marks=pytest.mark.slow),
        pytest.param(1, 256, 1, marks=pytest.mark.slow),
    ],
)
def test_an_asynchronous_engine_gives_the_same_rollouts(
    attention, dtype, max_running_requests, cache_tokens, max_prefill_tokens
):
    """A step that is launched before the tokens of the last are read changes no bit, also under preemption; each
    stop token that is not the last one allowed costs one row, and no token is sampled twice."""
    model = cached_model(attention, dtype)
    limits = dict(
        max_running_requests=max_running_requests,
        cache_tokens=cache_tokens,
        max_prefill_tokens=max_prefill_tokens,
    )
    engine = make_engine(model, async_decoding=True, **limits)
    rollouts = run(engine, mixed_requests())
    assert_expected(rollouts, attention, dtype)
    stats = engine.take_stats()
    stopped = sum(r.finish_reason == "stop" and len(r.completion) < 32 for r in rollouts)
    assert 0 < stats.discarded_tokens <= stopped
    assert stats.discarded_tokens == stopped or cache_tokens < 8192, "a full cache has tokens read at once"
    num_sampled = sum(len(r.completion) for r in rollouts)
    assert stats.decode_tokens + len(rollouts) + stats.preemptions == num_sampled
    assert (stats.preemptions > 0) == (cache_tokens < 8192 and max_running_requests > 1)
    assert (
        stats.wasted_tokens
        == stats.discarded_tokens + stats.padding_tokens
        == stats.computed_tokens - stats.decode_tokens
    )


def test_an_asynchronous_engine_computes_no_row_past_its_limit():
    """Limits are known before the tokens are: without stop ids nothing is computed for nothing."""
    requests = [
        replace(r, stop_ids=frozenset(), max_new_tokens=1 + i % 5) for i, r in enumerate(mixed_requests())
    ]
    engine = make_engine(cached_model("mixed", torch.float32), async_decoding=True, max_running_requests=7)
    rollouts = run(engine, requests)
    assert engine.stats.discarded_tokens == 0
    assert engine.stats.decode_tokens == sum(len(r.completion) - 1 for r in rollouts)


@pytest.mark.parametrize("attention", [pytest.param("full", marks=pytest.mark.slow), "mixed"])
@pytest.mark.parametrize(
    ("late", "cache_tokens", "steps"),
    [
        (False, 384, 4),
        (True, 384, 5),
        (True, 8192, 5),
        *(
            pytest.param(True, cache_tokens, steps, marks=pytest.mark.slow)
            for cache_tokens in (384, 8192)
            for steps in (1, 2)
        ),
    ],
)
def test_an_engine_can_be_aborted_again_and_again(attention, late, cache_tokens, steps):
    """What was launched and not read is sampled again by the next phase, with its version; nothing is lost."""
    engine = make_engine(
        cached_model(attention, torch.float32), cache_tokens=cache_tokens, async_decoding=late
    )
    rollouts, unfinished, phase = [], mixed_requests(), 0
    while unfinished:
        engine.submit(unfinished, weight_version=phase)
        for _ in range(steps):
            rollouts += engine.step()
        unfinished, phase = engine.abort(), phase + 1
        assert engine._cache is None
        assert phase < 1500
    assert phase > 3
    assert_expected(rollouts, attention, torch.float32)
    for rollout in rollouts:
        versions = rollout.weight_version[rollout.loss_mask].tolist()
        assert versions == sorted(versions)
    stats = engine.take_stats()
    assert stats.preemptions > 0 or late
    assert (stats.decode_tokens > 0) == (steps > 1), (
        "a phase of one step reads the tokens of its prefill only"
    )
    assert (stats.discarded_tokens > 0) == late


# Decode steps of padded sizes in buffers that stay.


@variants(ALL_VARIANTS)
@pytest.mark.parametrize("late", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(("max_running_requests", "cache_tokens"), [(64, 8192), (7, 8192), (64, 512)])
def test_padded_steps_in_buffers_that_stay_give_the_same_rollouts(
    attention, dtype, late, max_running_requests, cache_tokens
):
    """What a graph would replay, called instead: padding rows and what an earlier step left behind change no bit."""
    model = cached_model(attention, dtype)
    engine = make_engine(
        model,
        async_decoding=late,
        cuda_graphs=True,
        max_running_requests=max_running_requests,
        cache_tokens=cache_tokens,
    )
    rollouts = run(engine, mixed_requests())
    assert_expected(rollouts, attention, dtype)
    assert (engine.stats.preemptions > 0) == (cache_tokens == 512)
    assert engine._cache is engine._graphs is None, "graphs outlive the cache that they read"


@pytest.mark.parametrize("is_aborted", [False, True])
@pytest.mark.parametrize(("late", "cuda_graphs"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("attention", [pytest.param("full", marks=pytest.mark.slow), "mixed"])
def test_an_engine_that_keeps_its_cache_keeps_no_sequence(attention, late, cuda_graphs, is_aborted):
    """New weights in the old place: the rollouts of a new engine, in the memory and with the graphs of the old one."""
    model = make_model(attention, torch.float32)
    how = {"async_decoding": late, "cuda_graphs": cuda_graphs}
    engine = make_engine(model, keeps_cache=True, cache_tokens=4096, **how)
    engine.submit(mixed_requests())
    for _ in range(5):
        engine.step()
    unfinished = engine.abort()
    if not is_aborted:
        engine.generate(unfinished)
    cache, graphs = engine._cache, engine._graphs
    assert cache is not None
    for free_list in cache.free_lists:
        assert sum(free_list.references) == cuda_graphs, "a sequence stays, besides the padding"
    with torch.no_grad():
        for parameter, other in zip(
            model.parameters(), make_model(attention, torch.float32, seed=1).parameters(), strict=True
        ):
            parameter.copy_(other)
    rollouts = run(engine, mixed_requests())
    assert engine._cache is cache
    assert engine._graphs is graphs
    assert_same(contents(rollouts), contents(run(make_engine(model, **how), mixed_requests())), model)


@pytest.mark.parametrize("late", [False, True])
def test_rollouts_without_the_cpus_padding_differ_by_rounding_only(late):
    """CUDA pads nothing outside its graphs; in fp64 on the CPU that leaves every token as it is."""
    model = cached_model("mixed", torch.float64)
    expected = contents(run(make_engine(model), mixed_requests()))
    with pad_as_on_cuda():
        engine = make_engine(model, async_decoding=late, cuda_graphs=late)
        rollouts = contents(run(engine, mixed_requests()))
    assert_near(rollouts, expected, 1e-6)


def test_a_step_of_hundreds_of_requests_is_padded_by_fewer_than_64_rows():
    """Below, a graph has at most twice the rows that it needs; all sizes up to 1,024 are 22 graphs."""
    sizes = [padding.graph_batch_size(n, 1000) for n in range(1, 1001)]
    for n, size in enumerate(sizes, start=1):
        assert n <= size < n + min(n, 64)
    assert len(set(sizes)) == 22


@pytest.mark.parametrize("late", [False, True])
def test_padded_steps_survive_aborts_and_count_their_padding(late):
    """Each phase makes its buffers anew; a step of n requests computes the next power of two, up to the limit."""
    model = cached_model("mixed", torch.float32)
    engine = make_engine(model, async_decoding=late, cuda_graphs=True, max_running_requests=12)
    sizes, rollouts, unfinished = set(), [], mixed_requests()
    while unfinished:
        engine.submit(unfinished)
        for _ in range(9):
            rollouts += engine.step()
            sizes |= set(engine._graphs._graphs) if engine._graphs else set()
        unfinished = engine.abort()
    assert sizes <= {1, 2, 4, 8, 12}
    assert len(sizes) > 2
    assert_expected(rollouts, "mixed", torch.float32)
    before, requests = engine.take_stats(), [r for r in mixed_requests() if len(r.prompt_ids) < 128][:9]
    assert before.padding_tokens > 0
    run(engine, [replace(r, stop_ids=frozenset(), max_new_tokens=5) for r in requests])
    stats = engine.take_stats()
    assert (stats.decode_tokens, stats.decode_steps) == (9 * 4, 4)
    assert stats.computed_tokens == 4 * padding.num_padded(12, CPU)


# Groups.


@variants(SOME_VARIANTS)
@pytest.mark.parametrize("length", [5, 128, 300])
def test_a_group_prefills_its_prompt_once_and_its_members_equal_separate_requests(attention, dtype, length):
    """Forks of one prefilled prompt, over several blocks or exactly at a border, equal prefills of their own."""
    model = cached_model(attention, dtype)
    group = [make_request(make_prompt(length), number=1, member=i, max_new_tokens=12) for i in range(5)]
    engine = make_engine(model)
    together = run(engine, group)
    assert engine.stats.prefill_tokens == length
    separate = [rollout for request in group for rollout in run(make_engine(model), [request])]
    assert_same(contents(together), contents(separate), model)
    assert len({tuple(r.completion) for r in together}) == 5, "members of a group drew the same noise"


def test_groups_that_fill_the_cache_at_a_block_border_are_admitted():
    """Prompts of exactly one block share it whole: their forks need no room, so a full cache does not stop them."""
    model = cached_model("full", torch.float32)
    requests = [
        make_request(make_prompt(128)[::order], number=number, member=member, max_new_tokens=6)
        for number, order in enumerate((1, -1))
        for member in range(2)
    ]
    rollouts = run(make_engine(model, cache_tokens=256), requests)
    assert_same(contents(rollouts), contents(run(make_engine(model), requests)), model)


@pytest.mark.parametrize("max_running_requests", [1, 2])
def test_a_long_prompt_is_admitted_whatever_the_window_and_the_number_of_rows(max_running_requests):
    """A windowed pool is small where few rows share it; it never keeps out a prompt whose window it can hold."""
    model = cached_model("mixed", torch.float32)
    requests = [make_request(make_prompt(n), number=n, max_new_tokens=6) for n in (300, 450)]
    rollouts = run(make_engine(model, max_running_requests=max_running_requests), requests)
    assert_same(contents(rollouts), contents(run(make_engine(model), requests)), model)


def test_requests_with_other_keys_draw_other_noise():
    """The same prompt elsewhere in the run, or another sample, is another rollout; the same key is not. Pitfall 50."""
    model = cached_model("full", torch.float32)
    requests = [
        make_request(make_prompt(9), number=number, member=member, max_new_tokens=16, stop_ids=frozenset())
        for number in range(4)
        for member in range(4)
    ]
    rollouts = run(make_engine(model), requests)
    assert len({tuple(r.completion) for r in rollouts}) == 16
    again = [replace(requests[5], rollout_id=RolloutId(99, i)) for i in range(2)]
    assert [r.completion for r in run(make_engine(model), again)] == [
        r.completion for r in rollouts if r.rollout_id == requests[5].rollout_id
    ] * 2


# Ends.


@functools.cache
def endless_rollouts(dtype: torch.dtype) -> dict[RolloutId, Rollout]:
    requests = [replace(request, stop_ids=frozenset()) for request in mixed_requests()]
    return {r.rollout_id: r for r in run(make_engine(cached_model("full", dtype)), requests)}


def test_without_stop_ids_a_rollout_ends_exactly_at_its_limit():
    """`max_new_tokens` counts sampled tokens, whatever the prompt's length, and the reason is "length". Pitfall 55."""
    rollouts = endless_rollouts(torch.float32).values()
    assert {len(r.completion) for r in rollouts} == {32}
    assert {r.finish_reason for r in rollouts} == {"length"}
    assert {token for r in rollouts for token in r.completion} > STOP_IDS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [1, 2, 32])
@pytest.mark.parametrize("stop_ids", [{3}, {11}, {29}, {3, 11, 29}, set(range(0, VOCAB, 2))], ids=str)
def test_a_rollout_is_the_endless_one_cut_behind_its_first_stop_token_or_at_its_limit(dtype, limit, stop_ids):
    """Each listed id stops; the stop token is kept as the last, sampled one; nothing follows. Pitfalls 13 and 14."""
    endless = endless_rollouts(dtype)
    requests = [replace(r, stop_ids=frozenset(stop_ids), max_new_tokens=limit) for r in mixed_requests()]
    rollouts = run(make_engine(cached_model("full", dtype)), requests)
    ends = set()
    for rollout in rollouts:
        whole = endless[rollout.rollout_id].completion
        stop = next((i for i, token in enumerate(whole) if token in stop_ids), len(whole))
        length = min(stop + 1, limit)
        assert rollout.completion == whole[:length]
        assert rollout.finish_reason == ("stop" if stop < limit else "length")
        assert bool(rollout.loss_mask[-1])
        if rollout.finish_reason == "stop":
            ends.add(rollout.completion[-1])
    if limit == 32:
        assert ends == stop_ids or len(stop_ids) > 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_request_keeps_its_own_temperature_limit_stops_and_greediness(dtype):
    """Members of one group that differ in everything but the prompt are each what they are alone."""
    model = cached_model("full", dtype)
    settings = [
        (1.0, 30, STOP_IDS),
        (0.0, 25, frozenset()),
        (0.5, 1, frozenset({7})),
        (1.7, 12, frozenset(range(20))),
    ]
    requests = [
        make_request(make_prompt(n), number=n, member=i, temperature=t, max_new_tokens=limit, stop_ids=stops)
        for n in (6, 128)
        for i, (t, limit, stops) in enumerate(settings)
    ]
    together = contents(run(make_engine(model), requests))
    alone = contents([rollout for request in requests for rollout in run(make_engine(model), [request])])
    assert_same(together, alone, model)
    for n in (6, 128):
        tokens, _ = greedy_uncached(model, make_prompt(n), 25)
        assert together[RolloutId(n, 1)][0] == tokens


# The rollout.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_streams_of_a_rollout_are_aligned(dtype):
    """All streams are as long as the tokens; the mask is true exactly where the policy sampled. Pitfall 15."""
    requests = mixed_requests()
    rollouts = make_engine(cached_model("full", dtype)).generate(requests, weight_version=3)
    for rollout, request in zip(rollouts, requests, strict=True):
        length, prompt = len(rollout.tokens), len(request.prompt_ids)
        assert rollout.num_prompt_tokens == prompt
        assert rollout.tokens[:prompt].tolist() == list(request.prompt_ids)
        assert rollout.rollout_id == request.rollout_id
        is_sampled = [False] * prompt + [True] * (length - prompt)
        assert rollout.loss_mask.tolist() == is_sampled
        assert rollout.weight_version.tolist() == [3 * sampled for sampled in is_sampled]
        assert rollout.sample_logprobs.shape == (length,)
        assert (rollout.sample_logprobs[:prompt] == 0).all()
        assert (rollout.sample_logprobs[prompt:] < 0).all()
        assert rollout.completion == rollout.tokens[rollout.loss_mask].tolist()
        dtypes = [
            x.dtype
            for x in (rollout.tokens, rollout.loss_mask, rollout.sample_logprobs, rollout.weight_version)
        ]
        assert dtypes == [torch.int64, torch.bool, torch.float32, torch.int32]


# Requests that cannot be served.


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request([]), "prompt"),
        (make_request([1, 2], max_new_tokens=0), "max_new_tokens"),
        (replace(make_request([1, 2]), turn_start=1), "turn_start 1 .* 0 tokens"),
        (make_request([1] * 500, max_new_tokens=13), "513 tokens .* 512 positions"),
        (make_request([1] * 200, max_new_tokens=57), "257 tokens .* --cache-tokens"),
    ],
    ids=["empty prompt", "no new tokens", "turn", "positions", "cache"],
)
def test_a_request_that_cannot_be_served_is_refused_by_name_and_leaves_nothing_behind(request_, message):
    """ValueError with the number and the limit; its companions are not queued either, and no cache is kept."""
    engine = make_engine(
        cached_model("full", torch.float32), cache_tokens=256 if "cache" in message else 8192
    )
    with pytest.raises(ValueError, match=message):
        engine.submit([make_request([5]), request_])
    assert engine.abort() == []
    with pytest.raises(ValueError, match=message):
        engine.submit([request_])
    assert engine.step() == []
    assert engine._cache is None


@pytest.mark.parametrize(("limit", "cache_tokens"), [(12, 8192), (56, 256)], ids=["positions", "cache"])
def test_a_request_of_exactly_the_limit_is_served(limit, cache_tokens):
    """The largest request that is not refused runs to its end."""
    length = 512 - 12 if limit == 12 else 256 - 56
    request = make_request(make_prompt(length), max_new_tokens=limit, stop_ids=frozenset())
    engine = make_engine(cached_model("full", torch.float32), cache_tokens=cache_tokens)
    (rollout,) = run(engine, [request])
    assert len(rollout.tokens) == length + limit


# Weights and cache.


def change_weights(model: Transformer) -> None:
    with torch.no_grad():
        for i, param in enumerate(model.parameters()):
            if param.ndim == 2:
                noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(i))
                param.add_((noise * 0.5 * param.float().std()).to(param.dtype))


@variants(SOME_VARIANTS)
def test_new_weights_never_meet_an_old_cache(attention, dtype):
    """After weights change in place, an engine that has served gives what a fresh one does. Pitfalls 10 and 11."""
    model = make_model(attention, dtype)
    requests = mixed_requests()
    engine = make_engine(model)
    before = contents(engine.generate(requests, weight_version=0))
    change_weights(model)
    after = contents(engine.generate(requests, weight_version=1))
    assert_same(after, contents(make_engine(model).generate(requests)), model)
    assert sum(after[i][0] != before[i][0] for i in after) > len(after) / 2


@variants(SOME_VARIANTS)
def test_a_rollout_that_crosses_an_update_keeps_its_old_tokens_and_goes_on_under_the_new_weights(
    attention, dtype
):
    """Tokens and logprobs of the old phase stay; the others are the new weights' over the whole prefix. Pitfall 40."""
    model = make_model(attention, dtype)
    requests = [replace(r, temperature=1.0, stop_ids=frozenset()) for r in mixed_requests()]
    engine = make_engine(model)
    engine.submit(requests, weight_version=0)
    for _ in range(15):
        assert engine.step() == []
    unfinished = engine.abort()
    old = {r.rollout_id: r.sampled for r in unfinished}
    change_weights(model)
    rollouts = run(engine, unfinished, weight_version=1)
    scored = score_rollouts(model, rollouts, 1.0).split([len(r.tokens) for r in rollouts])
    for rollout, logprobs in zip(rollouts, scored, strict=True):
        cut = rollout.num_prompt_tokens + len(old[rollout.rollout_id])
        before = old[rollout.rollout_id]
        assert before.tokens.tolist() == rollout.tokens[rollout.num_prompt_tokens : cut].tolist()
        kept = rollout.sample_logprobs[rollout.num_prompt_tokens : cut]
        assert kept.tolist() == before.logprobs.tolist()
        assert len(rollout.tokens) > cut > rollout.num_prompt_tokens + 10
        assert (rollout.weight_version[rollout.num_prompt_tokens : cut] == 0).all()
        assert (rollout.weight_version[cut:] == 1).all()
        assert (logprobs[cut:] - rollout.sample_logprobs[cut:]).abs().max().item() <= tolerance(model)
        assert (logprobs[rollout.num_prompt_tokens : cut] - kept).abs().max() > 1e-2


def test_the_cache_is_gone_after_the_last_rollout():
    """Training has the memory: a phase ends with its last rollout, its abort, or at once if it has no requests.

    Pitfall 11.
    """
    engine = make_engine(cached_model("full", torch.float32))
    engine.submit(mixed_requests())
    assert engine._cache is not None
    finish(engine, len(mixed_requests()))
    assert engine._cache is None
    engine.submit(mixed_requests())
    engine.step()
    engine.abort()
    assert engine._cache is None
    assert engine.generate([]) == []
    assert engine._cache is None, "no requests, but a cache is kept"
