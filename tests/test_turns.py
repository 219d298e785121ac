"""Requests of several turns: tokens appended between them are computed alone, and nothing sampled depends on it."""

import functools
import random
from dataclasses import replace

import pytest
import torch

from minirl.data.stop_strings import StopStrings
from minirl.generation.engine import Engine, Request
from minirl.model.transformer import is_batch_invariant
from minirl.rollouts import NO_TOKENS, appended
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


def following(request: Request) -> list[tuple[list[int], tuple[str, ...]]]:
    """After each turn but the last: the tokens appended, none to hundreds, and stop strings of the next turn."""
    rng = random.Random(str(request.rollout_id))
    lengths = rng.choices((0, 1, 3, 20, 130), k=NUM_TURNS - 1)
    stops = rng.choices([(), tuple("abcdef"), ("ab", *"ghijkl")], k=NUM_TURNS - 1)
    return [([rng.randrange(48) for _ in range(n)], stop) for n, stop in zip(lengths, stops, strict=True)]


def requests_with_turns() -> list[Request]:
    return [replace(request, holds=True, max_new_tokens=TURN_TOKENS) for request in mixed_requests()[:8]]


def engine_of(attention: str, **options) -> Engine:
    """An engine whose stop strings are those of letters."""
    make_stop_test = functools.partial(StopStrings, letter_tokenizer())
    return make_engine(cached_model(attention, torch.float32), make_stop_test=make_stop_test, **options)


def run_turns(engine: Engine, requests: list[Request]) -> dict:
    """Run all turns; a reply comes some steps after its turn. Returns the rollouts of the last turns by id."""
    by_id = {request.rollout_id: request for request in requests}
    left = {request.rollout_id: following(request) for request in requests}
    rng = random.Random(0)
    waiting, ended = [], {}
    engine.submit(requests)
    for _ in range(10_000):
        waiting += engine.step()
        rng.shuffle(waiting)
        for _ in range(rng.randint(0, len(waiting))):
            rollout = waiting.pop()
            if left[rollout.rollout_id]:
                reply, stop = left[rollout.rollout_id].pop(0)
                request = by_id[rollout.rollout_id]
                engine.submit([next_turn(request, rollout, reply, TURN_TOKENS, stop=stop)])
            else:
                engine.release(rollout.rollout_id)
                ended[rollout.rollout_id] = rollout
        if len(ended) == len(requests):
            return ended
    raise AssertionError("the turns do not end")


@functools.cache
def expected_turns(attention: str) -> dict:
    """The reference: each turn is a separate request, whose prompt is everything before. By id, with the last end."""
    engine, expected = engine_of(attention), {}
    for request in requests_with_turns():
        completion = NO_TOKENS
        for reply, stop in [([], ()), *following(request)]:
            completion += appended(reply)
            before = (*request.prompt_ids, *completion.tokens.tolist())
            (rollout,) = engine.generate([replace(request, prompt_ids=before, holds=False, stop=stop)])
            completion += rollout.after_prompt
        expected[request.rollout_id] = completion, rollout.finish_reason
    return expected


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
    is_exact = is_batch_invariant(engine.model.config, torch.float32, CPU)
    for rollout_id, (expected, finish_reason) in expected_turns(attention).items():
        found = rollouts[rollout_id].after_prompt
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.is_sampled.tolist() == expected.is_sampled.tolist()
        assert rollouts[rollout_id].finish_reason == finish_reason
        assert (found.logprobs - expected.logprobs).abs().max() <= (0 if is_exact else 1e-5)


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
