"""Requests of several turns: tokens appended between them are computed alone, and nothing sampled depends on it."""

import functools
import itertools
import random
from dataclasses import replace

import pytest
import torch

from minirl.data.stop_strings import StopStrings
from minirl.data.tokenizer import Tokenizer
from minirl.generation.engine import Engine, Request
from minirl.model.transformer import is_batch_invariant
from minirl.rollouts import Rollout
from support.engines import (
    CPU,
    VOCAB,
    cached_model,
    finish,
    make_engine,
    mixed_requests,
    next_turn,
)
from support.marks import slow
from support.texts import TOKENS, save_tokenizer

TURN_TOKENS = 7
NUM_TURNS = 4


def replies_to(request: Request) -> list[list[int]]:
    """The tokens appended after each turn but the last: none, one or hundreds."""
    rng = random.Random(str(request.rollout_id))
    lengths = rng.choices((0, 1, 3, 20, 130), k=NUM_TURNS - 1)
    return [[rng.randrange(48) for _ in range(length)] for length in lengths]


def requests_with_turns() -> list[Request]:
    return [replace(request, holds=True, max_new_tokens=TURN_TOKENS) for request in mixed_requests()[:8]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One whose tokens have one to four letters, of three: the ids of random models say the same strings often."""
    pieces = ["".join(letters) for n in (1, 2, 3, 4) for letters in itertools.product("ab ", repeat=n)]
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, None, tokens=(*TOKENS[:4], *pieces[: VOCAB - 4]))
    return Tokenizer(folder)


def stops_of(request: Request) -> list[tuple[str, ...]]:
    """Other stop strings for each turn, and none for some."""
    rng = random.Random(f"strings of {request.rollout_id}")
    texts = [(), ("aa",), ("bab",), (" bba", "  a  "), ("a a b", "ab b", "<turn>")]
    return rng.choices(texts, k=NUM_TURNS)


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


def cut_off(tokenizer: Tokenizer, strings: tuple[str, ...], sampled: list[int]) -> tuple[list[int], bool]:
    """The tokens up to the one that completes a stop string in their text, and whether any does."""
    for count in range(1, len(sampled) + 1):
        text = tokenizer.backend.decode(sampled[:count])
        if any(string in text for string in strings):
            return sampled[:count], True
    return sampled, False


def turn_by_turn(model, request: Request, tokenizer: Tokenizer) -> Rollout:
    """The reference: each turn is a separate request, whose prompt is everything before.

    It ignores stop strings and is cut after the first one.
    """
    tokens = list(request.prompt_ids)
    mask, logprobs = [False] * len(tokens), [0.0] * len(tokens)
    for reply, stop in zip([*replies_to(request), []], stops_of(request), strict=True):
        alone = replace(request, prompt_ids=tuple(tokens), holds=False)
        (rollout,) = make_engine(model).generate([alone])
        sampled, has_stopped = cut_off(tokenizer, stop, rollout.completion)
        tokens += sampled + reply
        mask += [True] * len(sampled) + [False] * len(reply)
        begin = rollout.num_prompt_tokens
        logprobs += rollout.sample_logprobs[begin : begin + len(sampled)].tolist() + [0.0] * len(reply)
    return replace(
        rollout,
        tokens=torch.tensor(tokens),
        loss_mask=torch.tensor(mask),
        sample_logprobs=torch.tensor(logprobs),
        finish_reason="stop" if has_stopped else rollout.finish_reason,
    )


@functools.cache
def expected_turns(attention: str, tokenizer: Tokenizer) -> dict:
    """The reference for all requests."""
    model = cached_model(attention, torch.float32)
    return {r.rollout_id: turn_by_turn(model, r, tokenizer) for r in requests_with_turns()}


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
def test_turns_sample_what_they_sample_after_a_prefill_of_all_before(attention, name, tokenizer):
    """Tokens, logprobs, mask: in any batch, cache and order of replies, also where the cache had to give rows up.

    With stop strings: the same samples, cut where the text of the turn alone has the first one. Pitfall 15.
    """
    model = cached_model(attention, torch.float32)
    requests = requests_with_turns()
    make_stop_test = functools.partial(StopStrings, tokenizer)
    engine = make_engine(model, make_stop_test=make_stop_test, **OPTIONS[name])
    rollouts = run_turns(engine, requests)
    assert not engine.is_busy
    expected = expected_turns(attention, tokenizer)
    is_exact = is_batch_invariant(model.config, torch.float32, CPU)
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
