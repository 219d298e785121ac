"""Rounds (`--max-staleness`): no step waits for a slow reply or reward, and nothing is lost."""

import asyncio
import itertools

import pytest

from minirl.episodes.runner import EpisodeRunner
from support.collecting import Prompts, collected, make_collector, resumed

# A prompt's rewards wait while a file named like the prompt exists.
SOURCE = """
import pathlib, time

def reward(completion_ids, prompts):
    while pathlib.Path(__file__).with_name(prompts[0]).exists():
        time.sleep(0.01)
    return [float(len(ids)) for ids in completion_ids]

"""
NUM_STEPS = 5
OPTIONS = {"round_tokens": 4, "max_staleness": 3}


def make_prompts():
    return Prompts(num_rows=50)


@pytest.fixture(autouse=True)
def little_patience(monkeypatch):
    monkeypatch.setattr(EpisodeRunner, "reply_wait_s", 0.02)


def waiting_for(gate):
    """Return a rollout function that waits for an event after the second prompt's first turns."""

    async def patient(episode):
        await episode.generate(max_tokens=3)
        if episode.row.origin == make_prompts().row(1).origin:
            await gate.wait()
        await episode.generate(after="ab", max_tokens=3)

    return patient


def ordinals(steps):
    return [sorted({row[0].prompt_ordinal for row in step}) for step in steps]


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("slow_part", ["reply", "reward"])
def test_a_slow_reply_or_reward_holds_no_step_up_and_its_rollouts_are_trained_when_it_has_come(
    load_reward, tmp_path, slow_part, is_killed
):
    """The rollouts are trained on once, as in one whole step.

    This holds after a resume, which restarts the rollouts, and during an evaluation with the same functions.
    """
    gate = asyncio.Event()
    file = tmp_path / make_prompts().row(1).prompt
    if slow_part == "reward":
        gate.set()
        file.touch()
    functions = {"reward": load_reward("reward", num_workers=2)}

    def make(**options):
        return make_collector(make_prompts(), functions=functions, rollout=waiting_for(gate), **options)

    collector = make(**OPTIONS)
    steps = collected(collector, 2, 2)
    assert all(1 not in step for step in ordinals(steps))
    assert 1 in collector.in_flight.ordinals
    assert (1 in collector._queue.groups) == (slow_part == "reward")
    requests = make_prompts().requests([0], group_size=0, num_greedy=1)
    assert len(collector.evaluator(make_prompts()).run(requests)) == 1
    gate.set()
    file.unlink(missing_ok=True)
    if is_killed:
        collector = resumed(collector, make(**OPTIONS))
    steps += collected(collector, NUM_STEPS - 2, 2, first_step=2)
    rows = list(itertools.chain(*steps))
    found = {row[0]: row for row in rows}
    assert len(found) == len(rows), "a prompt comes twice"
    assert 1 in {rollout_id.prompt_ordinal for rollout_id in found}
    (expected,) = collected(make(), 1, 1 + max(rollout_id.prompt_ordinal for rollout_id in found))
    assert found == {row[0]: row for row in expected if row[0] in found}


def test_a_reply_that_comes_between_two_rounds_ends_its_episode_and_is_not_late(clock):
    """An update may take longer than --call-timeout. If the episode did not end, the step would wait forever."""
    gate = asyncio.Event()
    options = {"rollout": waiting_for(gate), "max_turns": 1, "call_timeout": 60.0}
    collector = make_collector(make_prompts(), **options, **OPTIONS)
    collector._begin_prompts(2)
    collector._runner.run_round(4, weight_version=0)
    gate.set()
    clock.monotonic = lambda: 61.0
    collector._runner.run_round(4, weight_version=0)
    assert collector._queue.groups.keys() == {0, 1}


def test_the_time_between_two_steps_is_not_the_functions(clock):
    options = {"rollout": waiting_for(asyncio.Event()), "call_timeout": 60.0}
    collector = make_collector(make_prompts(), **options, **OPTIONS)
    collector._begin_prompts(2)
    for seconds in (0.0, 61.0):
        clock.monotonic = lambda seconds=seconds: seconds
        with collector._runner.step_scope():
            collector._runner.run_round(4, weight_version=0)
    assert collector._runner._working_since


@pytest.mark.slow
def test_a_cache_that_is_too_small_for_all_in_flight_decodes_them_in_turns():
    """Requests that used up a round's budget make room for others. The cache has room for 7 requests."""
    prompts = Prompts(lambda one: 50 + one.sample, num_rows=50)
    engine_options = {"cache_tokens": 1024, "max_running_requests": 64}
    collector = make_collector(prompts, engine_options=engine_options, **OPTIONS)
    collected(collector, 2, 4)
    stats = collector.engine.take_stats()
    assert stats.decode_tokens / stats.decode_steps > 4
