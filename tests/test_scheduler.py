"""The scheduler at real sizes: prompts are computed once, and requests are rarely preempted. Counts are exact."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from minirl.generation.engine import Engine
from support.engines import next_turn
from support.marks import slow
from support.scheduling import Load, requests_of, stub_engine

# Far more requests than slots, in caches that are just large enough and in a tight cache.
LOADS = {
    "one place": Load(1, 4096, 3, 4, 500, 20),
    "long prompts": Load(32, 37_500, 8, 16, 1000, 200),
    "long prompts, tight": Load(256, 65_536, 32, 16, 1000, 300),
}


@pytest.mark.parametrize("name", [name if name == "one place" else slow(name) for name in LOADS])
def test_prompts_are_computed_once_and_requests_are_hardly_ever_thrown_out(name):
    """In tight caches, under 2 % of requests are preempted, and at most half of the prompts are recomputed."""
    load = LOADS[name]
    with stub_engine(load) as engine:
        rollouts = engine.generate(requests_of(load))
    assert len(rollouts) == load.num_requests
    stats = engine.take_stats()
    is_tight = "tight" in name
    assert stats.prefill_tokens <= (1.5 if is_tight else 1.0) * load.unique_prompt_tokens
    assert stats.preemptions <= (0.02 * load.num_requests if is_tight else 0)


def test_a_request_that_fills_the_whole_cache_is_decoded_to_its_end():
    """A group's requests run in turn, because no block is left for a shared prefix."""
    load = Load(4, 1024, 2, 3, 1000, 1000, max_new_tokens=24)
    with stub_engine(load) as engine:
        assert len(engine.generate(requests_of(load))) == load.num_requests


def test_a_request_is_admitted_where_its_own_limit_needs_less_than_the_headroom():
    """All 31 requests run at once in 31 cache blocks, because no request needs a second block."""
    load = Load(64, 31 * 128, 31, 1, 100, 1000, max_new_tokens=24)
    with stub_engine(load) as engine:
        engine.generate(requests_of(load))
    assert engine.take_stats().peak_running == load.num_requests


NUM_TURNS = 5
REPLY = [1] * 20
# Eight times as many episodes as slots. Each episode grows to 5 blocks; a group shares the first block.
EPISODES = Load(4, 32 * 5 * 128, 4, 8, 200, 30, max_new_tokens=60)


def run_episodes(engine: Engine, load: Load, is_due: Callable[[int, int], bool]) -> None:
    """Run episodes of NUM_TURNS turns each.

    is_due: whether a reply arrives, given the steps since its turn ended and the number of waiting episodes.
    """
    num_turns = Counter()
    waiting = {}
    requests = {one.rollout_id: replace(one, parks_after_turn=True) for one in requests_of(load)}
    engine.submit(list(requests.values()))
    for step in range(20_000):
        for rollout in engine.step():
            num_turns[rollout.rollout_id] += 1
            if num_turns[rollout.rollout_id] == NUM_TURNS:
                engine.release(rollout.rollout_id)
            else:
                waiting[rollout.rollout_id] = (rollout, step)
        for rollout_id in [i for i, (_, since) in waiting.items() if is_due(step - since, len(waiting))]:
            rollout, _ = waiting.pop(rollout_id)
            engine.submit([next_turn(requests[rollout_id], rollout, REPLY, 60)])
        if not engine.is_busy:
            return
    raise AssertionError("the episodes do not end")


# The minimum for any schedule: prompts, replies, and each continued turn's newest token.
LEAST = EPISODES.unique_prompt_tokens + EPISODES.num_requests * (NUM_TURNS - 1) * (len(REPLY) + 1)


# The fraction of the episodes' tokens that fit into the cache, and when a reply arrives.
PACES = {
    "all fit": (1.0, lambda steps, _: steps >= 400),
    "a fifth fits": (0.2, lambda steps, _: steps >= 40),
    "replies wait for all": (1 / 3, lambda _, num_waiting: num_waiting == EPISODES.num_requests),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PACES)
def test_episodes_that_wait_for_replies_are_hardly_computed_again(name):
    """However slow the replies, new episodes wait for room in the cache.

    If all replies wait for all episodes, caches are evicted, without a deadlock, and recomputed at most once per turn.
    """
    cache_frac, is_due = PACES[name]
    load = replace(EPISODES, cache_tokens=int(cache_frac * EPISODES.cache_tokens))
    with stub_engine(load) as engine:
        run_episodes(engine, load, is_due)
    stats = engine.take_stats()
    assert stats.preemptions == 0
    assert stats.peak_running == load.max_running_requests
    if name == "replies wait for all":
        assert 0 < stats.evictions <= load.num_requests * (NUM_TURNS - 1)
    else:
        assert stats.evictions == 0
        assert stats.prefill_tokens == LEAST
