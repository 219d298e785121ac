"""Requests of several turns: tokens appended between them are computed alone, and nothing sampled depends on it."""

import functools
import random
from dataclasses import replace

import pytest
import torch

from minirl.data.stop_strings import StopStrings
from minirl.generation.engine import Engine, Request
from minirl.model.transformer import is_batch_invariant
from minirl.rollouts import Rollout
from support.collecting import letter_tokenizer
from support.engines import (
    CPU,
    cached_model,
    finish,
    make_engine,
    mixed_requests,
    next_turn,
)
from support.marks import slow

TURN_TOKENS = 7
NUM_TURNS = 4


def replies_to(request: Request) -> list[list[int]]:
    """The tokens appended after each turn but the last: none, one or hundreds."""
    rng = random.Random(str(request.rollout_id))
    lengths = rng.choices((0, 1, 3, 20, 130), k=NUM_TURNS - 1)
    return [[rng.randrange(48) for _ in range(length)] for length in lengths]


def requests_with_turns() -> list[Request]:
    return [replace(request, holds=True, max_new_tokens=TURN_TOKENS) for request in mixed_requests()[:8]]


def stops_of(request: Request) -> list[tuple[str, ...]]:
    """Other stop strings for each turn, and none for some."""
    rng = random.Random(f"strings of {request.rollout_id}")
    return rng.choices([(), tuple("abcdef"), ("ab", *"ghijkl")], k=NUM_TURNS)


def run_turns(engine: Engine, requests: list[Request]) -> dict:
    """Run all turns; a reply comes some steps after its turn. Returns the rollouts of the last turns by id."""
    stops = {request.rollout_id: stops_of(request) for request in requests}
    requests = [replace(request, stop=stops[request.rollout_id].pop(0)) for request in requests]
    by_id = {request.rollout_id: request for request in requests}
    left = {request.rollout_id: replies_to(request) for request in requests}
    rng = random.Random(0)
    waiting, ended = [], {}
    engine.submit(requests)
    for _ in range(10_000):
        waiting += engine.step()
        rng.shuffle(waiting)
        num_answered = rng.randint(0, len(waiting))
        for rollout in waiting[:num_answered]:
            if left[rollout.rollout_id]:
                reply, stop = (parts[rollout.rollout_id].pop(0) for parts in (left, stops))
                request = by_id[rollout.rollout_id]
                engine.submit([next_turn(request, rollout, reply, TURN_TOKENS, stop=stop)])
            else:
                engine.release(rollout.rollout_id)
                ended[rollout.rollout_id] = rollout
        waiting = waiting[num_answered:]
        if len(ended) == len(requests):
            return ended
    raise AssertionError("the turns do not end")


def turn_by_turn(engine: Engine, request: Request) -> Rollout:
    """The reference: each turn is a separate request, whose prompt is everything before."""
    tokens = list(request.prompt_ids)
    mask, logprobs = [False] * len(tokens), [0.0] * len(tokens)
    for reply, stop in zip([*replies_to(request), []], stops_of(request), strict=True):
        alone = replace(request, prompt_ids=tuple(tokens), holds=False, stop=stop)
        (rollout,) = engine.generate([alone])
        sampled = rollout.completion
        tokens += sampled + reply
        mask += [True] * len(sampled) + [False] * len(reply)
        logprobs += rollout.sample_logprobs[rollout.num_prompt_tokens :].tolist() + [0.0] * len(reply)
    return replace(
        rollout,
        tokens=torch.tensor(tokens),
        loss_mask=torch.tensor(mask),
        sample_logprobs=torch.tensor(logprobs),
    )


def engine_of(attention: str, **options) -> Engine:
    """An engine whose stop strings are those of letters."""
    make_stop_test = functools.partial(StopStrings, letter_tokenizer())
    return make_engine(cached_model(attention, torch.float32), make_stop_test=make_stop_test, **options)


@functools.cache
def expected_turns(attention: str) -> dict:
    """The reference for all requests."""
    return {r.rollout_id: turn_by_turn(engine_of(attention), r) for r in requests_with_turns()}


OPTIONS = {
    "few places": {"max_running_requests": 3, "max_prefill_tokens": 40},
    "tight and late": {"cache_tokens": 1024, "async_decoding": True},
    "graphs": {"async_decoding": True, "cuda_graphs": True, "keeps_cache": True, "max_running_requests": 5},
}
# One layer of "mixed" sees all tokens, the other a window.
CASES = [
    slow("mixed", "few places"),
    ("mixed", "tight and late"),
    ("mixed", "graphs"),
    slow("states", "tight and late"),
]


@pytest.mark.parametrize(("attention", "name"), CASES)
def test_turns_sample_what_they_sample_after_a_prefill_of_all_before(attention, name):
    """Tokens, logprobs, mask: in any batch, cache and order of replies, also where the cache had to give rows up.

    With stop strings: the text of the turn alone is searched. Pitfall 15.
    """
    engine = engine_of(attention, **OPTIONS[name])
    rollouts = run_turns(engine, requests_with_turns())
    assert not engine.is_busy
    expected = expected_turns(attention)
    is_exact = is_batch_invariant(engine.model.config, torch.float32, CPU)
    assert {"stop", "length"} == {rollout.finish_reason for rollout in expected.values()}
    for rollout_id, got in rollouts.items():
        assert got.tokens.tolist() == expected[rollout_id].tokens.tolist()
        assert got.loss_mask.tolist() == expected[rollout_id].loss_mask.tolist()
        assert got.finish_reason == expected[rollout_id].finish_reason
        gap = (got.sample_logprobs - expected[rollout_id].sample_logprobs).abs().max()
        assert gap <= (0 if is_exact else 1e-5)


def test_appended_tokens_of_one_forward_are_at_most_those_of_a_prefill():
    """Of many requests that are resumed at once. The others are computed in the next steps, each token once.

    Nothing that the cache holds is computed again.
    """
    engine = make_engine(cached_model("full", torch.float32), max_prefill_tokens=100)
    requests = requests_with_turns()
    engine.submit(requests)
    ended = {rollout.rollout_id: rollout for rollout in finish(engine, len(requests))}
    engine.submit([next_turn(r, ended[r.rollout_id], [1] * 30, TURN_TOKENS) for r in requests])
    engine.take_stats()
    prefills = []
    while engine.is_decoding:
        engine.step()
        prefills.append(engine.take_stats().prefill_tokens)
    assert max(prefills) <= 100
    assert sum(prefills) == len(requests) * 31
