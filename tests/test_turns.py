"""Requests of several turns: tokens appended between them are computed alone, and nothing sampled depends on it."""

import random
from dataclasses import replace

import pytest
import torch

from minirl.errors import InputError
from minirl.generation.engine import Engine, Request
from minirl.model.attention import PackedLayout
from minirl.rollouts import Rollout
from minirl.training.scoring import score
from support.engines import CPU, cached_model, make_engine, mixed_requests

TURN_TOKENS = 7
NUM_TURNS = 4


def replies_to(request: Request) -> list[list[int]]:
    """What is appended after each turn but the last: none, one or hundreds of tokens."""
    rng = random.Random(str(request.rollout_id))
    lengths = rng.choices((0, 1, 3, 20, 130), k=NUM_TURNS - 1)
    return [[rng.randrange(48) for _ in range(length)] for length in lengths]


def requests_with_turns() -> list[Request]:
    requests = [request for request in mixed_requests() if len(request.prompt_ids) < 120]
    return [replace(request, holds=True, max_new_tokens=TURN_TOKENS) for request in requests[:24]]


def run_turns(engine: Engine, requests: list[Request], *, abort_every: int = 0) -> dict:
    """Run all turns; a reply comes some steps after its turn. Returns the rollouts of the last turns by id."""
    left = {request.rollout_id: replies_to(request) for request in requests}
    rng = random.Random(0)
    waiting, ended = [], {}
    engine.submit(requests)
    for step in range(10_000):
        if abort_every and step % abort_every == abort_every - 1:
            engine.submit(engine.abort())
        waiting += engine.step()
        rng.shuffle(waiting)
        num_answered = rng.randint(0, len(waiting))
        for rollout in waiting[:num_answered]:
            if left[rollout.rollout_id]:
                engine.resume(rollout.rollout_id, left[rollout.rollout_id].pop(0), max_new_tokens=TURN_TOKENS)
            else:
                engine.release(rollout.rollout_id)
                ended[rollout.rollout_id] = rollout
        waiting = waiting[num_answered:]
        if len(ended) == len(requests):
            return ended
    raise AssertionError("the turns do not end")


def turn_by_turn(model, request: Request) -> Rollout:
    """The reference: each turn is a request of its own, whose prompt is all that came before."""
    tokens = list(request.prompt_ids)
    mask, logprobs = [False] * len(tokens), [0.0] * len(tokens)
    for reply in [*replies_to(request), []]:
        alone = replace(request, prompt_ids=tuple(tokens), holds=False)
        (rollout,) = make_engine(model).generate([alone])
        sampled = rollout.completion
        tokens += sampled + reply
        mask += [True] * len(sampled) + [False] * len(reply)
        logprobs += rollout.sample_logprobs[-len(sampled) :].tolist() + [0.0] * len(reply)
    return replace(
        rollout,
        tokens=torch.tensor(tokens),
        loss_mask=torch.tensor(mask),
        sample_logprobs=torch.tensor(logprobs),
    )


@pytest.mark.parametrize("attention", ["full", "windowed", "mixed"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_running_requests": 3},
        {"cache_tokens": 1024},
        {"cache_tokens": 1024, "async_decoding": True},
        {"async_decoding": True, "cuda_graphs": True, "max_running_requests": 5},
        {"keeps_cache": True, "async_decoding": True, "abort_every": 9},
    ],
    ids=["roomy", "few places", "tight", "tight and late", "graphs", "aborted"],
)
def test_turns_sample_what_they_sample_after_a_prefill_of_all_before(attention, options):
    """Tokens, logprobs, mask: in any batch, cache and order of replies, also where the cache had to give rows up."""
    model = cached_model(attention, torch.float32)
    requests = requests_with_turns()
    options = dict(options)
    abort_every = options.pop("abort_every", 0)
    engine = make_engine(model, **options)
    rollouts = run_turns(engine, requests, abort_every=abort_every)
    assert not engine.is_busy
    is_exact = model.config.is_batch_invariant(torch.float32, CPU)
    for request in requests:
        got, expected = rollouts[request.rollout_id], turn_by_turn(model, request)
        assert got.tokens.tolist() == expected.tokens.tolist()
        assert got.loss_mask.tolist() == expected.loss_mask.tolist()
        gap = (got.sample_logprobs - expected.sample_logprobs).abs().max()
        assert gap <= (0 if is_exact else 1e-5)


def test_what_the_cache_holds_is_not_computed_again():
    """Prefilled are prompts and replies, and the newest token of each turn, which no step had put into the cache."""
    model = cached_model("full", torch.float32)
    requests = requests_with_turns()
    engine = make_engine(model)
    run_turns(engine, requests)
    num_replied = sum(len(reply) for request in requests for reply in replies_to(request))
    num_prompt_tokens = sum(len(ids) for ids in {request.prompt_ids for request in requests})
    num_newest = len(requests) * (NUM_TURNS - 1)
    assert engine.stats.preemptions == 0
    assert engine.stats.prefill_tokens <= num_prompt_tokens + num_replied + num_newest


def test_training_scores_the_sampled_tokens_of_all_turns_as_they_were_sampled():
    model = cached_model("mixed", torch.float32)
    requests = [replace(request, temperature=1.0) for request in requests_with_turns()]
    rollouts = list(run_turns(make_engine(model), requests).values())
    layout = PackedLayout(tuple(len(rollout.tokens) for rollout in rollouts), CPU)
    tokens, mask, sampled = (
        torch.cat([getattr(rollout, name) for rollout in rollouts])
        for name in ("tokens", "loss_mask", "sample_logprobs")
    )
    with torch.no_grad():
        logprobs, _ = score(model, tokens, layout, select=mask, temperature=1.0)
    tolerance = 0 if model.config.is_batch_invariant(torch.float32, CPU) else 1e-5
    assert (logprobs - sampled)[mask].abs().max() <= tolerance


def test_a_turn_that_cannot_fit_is_refused_and_the_request_stays():
    engine = make_engine(cached_model("full", torch.float32), cache_tokens=512)
    (request,) = requests_with_turns()[:1]
    engine.submit([request])
    while not (rollouts := engine.step()):
        pass
    rollout_id = rollouts[0].rollout_id
    with pytest.raises(InputError, match="max_new_tokens"):
        engine.resume(rollout_id, [1], max_new_tokens=0)
    with pytest.raises(InputError, match="exceed"):
        engine.resume(rollout_id, [1] * 600, max_new_tokens=1)
    engine.resume(rollout_id, [1], max_new_tokens=2)
    for act in (engine.release, lambda rollout_id: engine.resume(rollout_id, [1], max_new_tokens=1)):
        with pytest.raises(InputError, match="does not wait"):
            act(rollout_id)
    while not (rollouts := engine.step()):
        pass
    engine.release(rollout_id)
    assert not engine.is_busy
    assert engine._cache is None
