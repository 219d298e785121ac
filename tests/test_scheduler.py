"""The scheduler at real sizes: prompts are computed once, and requests are hardly ever thrown out. Exact counts."""

import itertools
from collections import defaultdict

import pytest

from minirl.generation.running_requests import RunningRequests
from support.scheduling import Load, requests_of, stub_engine

# Far more requests than places, in caches that have room and in tight ones.
LOADS = {
    "room": Load(256, 65_536, 16, 8, 200, 350),
    "tight": Load(64, 16_384, 32, 16, 200, 350),
    "long prompts": Load(64, 75_000, 16, 16, 1000, 200),
    "long prompts, tight": Load(64, 16_384, 16, 16, 1000, 300),
    "one place": Load(1, 4096, 3, 4, 500, 20),
}
LARGE_LOADS = {
    "tight": Load(256, 65_536, 64, 16, 200, 350),
    "long prompts": Load(256, 300_000, 64, 16, 1000, 300),
    "long prompts, tight": Load(256, 65_536, 64, 16, 1000, 300),
    "few places": Load(64, 65_536, 32, 16, 1000, 100),
}


@pytest.mark.parametrize(
    ("name", "load"),
    [
        *LOADS.items(),
        *(pytest.param(name, load, marks=pytest.mark.slow) for name, load in LARGE_LOADS.items()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_prompts_are_computed_once_and_requests_are_hardly_ever_thrown_out(name, load, monkeypatch):
    """One that was thrown out and taken in again decodes at least 64 tokens before that happens again."""
    thrown_out_at = defaultdict(list)

    def unfinished(running, row):
        request = original(running, row)
        thrown_out_at[request.rollout_id].append(len(request.sampled))
        return request

    original = RunningRequests.unfinished
    monkeypatch.setattr(RunningRequests, "unfinished", unfinished)
    with stub_engine(load) as engine:
        rollouts = engine.generate(requests_of(load))
    assert len(rollouts) == load.num_requests
    stats = engine.take_stats()
    is_tight = "tight" in name
    assert stats.prefill_tokens <= (1.5 if is_tight else 1.0) * load.unique_prompt_tokens
    assert stats.preemptions <= (0.02 * load.num_requests if is_tight else 0)
    assert stats.preemptions == sum(map(len, thrown_out_at.values()))
    for lengths in thrown_out_at.values():
        assert all(later - earlier >= 64 for earlier, later in itertools.pairwise(lengths))


def test_completions_do_not_depend_on_the_schedule():
    """The same load in a cache with room, in a tight one and with few places."""
    expected = None
    for places, cache_tokens in ((256, 200_000), (64, 16_384), (5, 3000)):
        load = Load(places, cache_tokens, 8, 16, 200, 100)
        with stub_engine(load) as engine:
            rollouts = engine.generate(requests_of(load))
        completions = [rollout.completion for rollout in rollouts]
        assert completions == (expected or completions)
        expected = completions


def test_a_request_that_fills_the_whole_cache_is_decoded_to_its_end():
    """Each of a group in turn: there is no block for a stem beside it."""
    load = Load(4, 1024, 2, 3, 1000, 1000, max_new_tokens=24)
    with stub_engine(load) as engine:
        rollouts = engine.generate(requests_of(load))
    assert len(rollouts) == load.num_requests
