"""Rounds (`--max-staleness`): no step waits for a slow reply or reward, and nothing is lost."""

import asyncio
import itertools

import pytest

from minirl.episodes.runner import EpisodeRunner
from support.collecting import Prompts, collected, make_collector, resumed

# The rewards of a prompt wait while there is a file of its name.
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
    monkeypatch.setattr(EpisodeRunner, "patience_s", 0.02)


def waiting_for(gate):
    """A function whose episodes of the second prompt wait for an event, if any, after their first turn."""

    async def patient(episode):
        await episode.generate(max_tokens=3)
        if gate and episode.row.place == make_prompts().row(1).place:
            await gate.wait()
        await episode.generate(after="ab", max_tokens=3)

    return patient


def ordinals(steps):
    return [sorted({row[0].prompt_ordinal for row in step}) for step in steps]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_slow_reply_holds_no_step_up_and_its_rollouts_are_trained_when_it_has_come(is_killed):
    """Also after a resume, which begins them again, and beside an evaluation with the same function."""
    gate = asyncio.Event()
    collector = make_collector(make_prompts(), rollout=waiting_for(gate), **OPTIONS)
    steps = collected(collector, 2, 2)
    assert all(1 not in step for step in ordinals(steps))
    assert 1 in collector.in_flight
    requests = make_prompts().requests([0], group_size=0, num_greedy=1)
    assert len(collector.evaluator(make_prompts()).run(requests).rollouts) == 1
    gate.set()
    if is_killed:
        collector = resumed(collector, make_collector(make_prompts(), rollout=waiting_for(gate), **OPTIONS))
    steps += collected(collector, NUM_STEPS - 2, 2, first_step=2)
    rows = list(itertools.chain(*steps))
    found = {row[0]: row for row in rows}
    assert len(found) == len(rows), "a prompt comes twice"
    assert 1 in {rollout_id.prompt_ordinal for rollout_id in found}
    whole = make_collector(make_prompts(), rollout=waiting_for(None))
    (expected,) = collected(whole, 1, 1 + max(rollout_id.prompt_ordinal for rollout_id in found))
    assert found == {row[0]: row for row in expected if row[0] in found}


def test_a_reply_that_comes_between_two_rounds_ends_its_episode_and_is_not_late(clock):
    """An update takes longer than a reply may. For the last one that runs the step would wait forever."""
    gate = asyncio.Event()
    options = {"rollout": waiting_for(gate), "max_turns": 1, "call_timeout": 60.0}
    collector = make_collector(make_prompts(), **options, **OPTIONS)
    collector._serve(2)
    collector._run_round(0)
    gate.set()
    clock.monotonic = lambda: 61.0
    collector._run_round(0)
    assert collector._queue.groups.keys() == {0, 1}


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_slow_reward_holds_no_step_up_and_is_asked_for_once_unless_it_is_lost(
    load_reward, tmp_path, is_killed
):
    gate = tmp_path / make_prompts().row(1).prompt
    gate.touch()
    function = load_reward("reward", num_workers=2)
    options = {"functions": {"reward": function}, "rollout": waiting_for(None), **OPTIONS}
    collector = make_collector(make_prompts(), **options)
    steps = collected(collector, 2, 2)
    assert all(1 not in step for step in ordinals(steps))
    assert len(collector._queue.groups[1].rollouts) == 3
    gate.unlink()
    if is_killed:
        collector = resumed(collector, make_collector(make_prompts(), **options))
    steps += collected(collector, NUM_STEPS - 2, 2, first_step=2)
    assert sum(1 in step for step in ordinals(steps)) == 1
    for rollout_id, _, tokens, is_sampled, *_, rewards in itertools.chain(*steps):
        assert rewards == [len(tokens) - is_sampled.index(True)], rollout_id


@pytest.mark.slow
def test_a_cache_that_is_too_small_for_all_in_flight_decodes_them_in_turns():
    """Those that have spent a round's budget make room for others, which would decode one by one: it has room for 7."""
    prompts = Prompts(lambda one: 50 + one.sample, num_rows=50)
    engine_options = {"cache_tokens": 1024, "max_running_requests": 64}
    collector = make_collector(prompts, engine_options=engine_options, **OPTIONS)
    collected(collector, 2, 4)
    stats = collector.engine.take_stats()
    assert stats.decode_tokens / stats.decode_steps > 4
