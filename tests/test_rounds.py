"""Rounds (`--max-staleness`): no step waits for a slow reply or reward, nothing is lost, and the simulation agrees."""

import argparse
import itertools
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from minirl.episodes.runner import EpisodeRunner
from minirl.errors import InputError, RolloutError
from minirl.ranks import time_account
from minirl.rewards.reward_model import RewardModel
from minirl.rewards.reward_workers import RewardWorkers
from minirl.workers.pool import wait_for_any
from support.collecting import (
    Prompts,
    calculator,
    collected,
    evaluated,
    in_workers,
    make_collector,
    resumed,
    rollout_records,
)

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import rounds

# The replies to the second prompt's episodes, and its rewards, wait until a file exists.
SOURCE = """
import asyncio, pathlib, time

GATE = pathlib.Path(__file__).parent / "open"

async def patient(episode):
    yield episode.generate(max_tokens=3)
    if episode.row.place == "PLACE":
        while not GATE.exists():
            await asyncio.sleep(0.01)
    yield episode.generate(after="ab", max_tokens=3)

def reward(completion_ids, prompts):
    while prompts[0] == "PROMPT" and not GATE.exists():
        time.sleep(0.01)
    return [float(len(ids)) for ids in completion_ids]

def fails(episode):
    yield episode.generate(max_tokens=3)
    raise ValueError("never")

async def ends_late(episode):
    yield episode.generate(max_tokens=3)
    if episode.row.place == "PLACE":
        while not GATE.exists():
            await asyncio.sleep(0.01)

def large(episode):
    yield episode.generate(max_tokens=3)
    yield episode.generate(after="a" * 100_000)
"""
NUM_STEPS = 5
OPTIONS = {"round_tokens": 4, "max_staleness": 3}


def make_prompts():
    return Prompts(num_rows=50)


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Functions of the file above in workers, for rounds that wait for none."""
    monkeypatch.setattr(EpisodeRunner, "patience_s", 0.02)
    second = make_prompts().row(1)
    (tmp_path / "mine.py").write_text(SOURCE.replace("PLACE", second.place).replace("PROMPT", second.prompt))
    with in_workers(tmp_path, timeout_s=60.0) as load_function:
        yield load_function


def ordinals(steps):
    return [sorted({row[0].prompt_ordinal for row in step}) for step in steps]


def here(episode):
    """The same as the function in the file, at once."""
    yield episode.generate(max_tokens=3)
    yield episode.generate(after="ab", max_tokens=3)


def whole_rollouts(num_prompts):
    (step,) = collected(make_collector(make_prompts(), rollout=here), 1, num_prompts)
    return {row[0]: row for row in step}


def assert_same_under_equal_weights(steps):
    """No prompt comes twice, and each rollout is the one that a whole step makes."""
    rows = list(itertools.chain(*steps))
    found = {row[0]: row for row in rows}
    assert len(found) == len(rows)
    expected = whole_rollouts(1 + max(rollout_id.prompt_ordinal for rollout_id in found))
    assert found == {rollout_id: expected[rollout_id] for rollout_id in found}


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_slow_reply_holds_no_step_up_and_its_rollouts_are_trained_when_it_has_come(
    load, tmp_path, is_killed
):
    """Also over a checkpoint, in which its function has not replied, and beside an evaluation in the same workers."""
    collector = make_collector(make_prompts(), rollout=load("patient"), **OPTIONS)
    steps = collected(collector, 2, 2)
    assert all(1 not in step for step in ordinals(steps))
    waiting = [record for record in rollout_records(collector) if record["rollout_id"][0] == 1]
    assert [(len(record["asked"]), len(record["turns"])) for record in waiting] == [(1, 1)] * 3
    requests = make_prompts().requests(0, 1, group_size=0, num_greedy=1)
    assert len(evaluated(collector.evaluator(make_prompts()), requests).rollouts) == 1
    (tmp_path / "open").touch()
    if is_killed:
        collector = resumed(collector, make_collector(make_prompts(), rollout=load("patient"), **OPTIONS))
    steps += collected(collector, NUM_STEPS - 2, 2, first_step=2)
    assert sum(1 in step for step in ordinals(steps)) == 1
    assert_same_under_equal_weights(steps)


def test_the_bound_of_staleness_holds_for_slow_replies_too(load, tmp_path):
    """The step in which their group is due waits for them."""
    collector = make_collector(make_prompts(), rollout=load("patient"), round_tokens=4, max_staleness=1)
    steps = collected(collector, 1, 2)
    assert 1 not in ordinals(steps)[0]
    (tmp_path / "open").touch()
    assert 1 in ordinals(collected(collector, 1, 2, first_step=1))[0]


def test_a_reply_that_comes_between_two_rounds_ends_its_episode(load, tmp_path):
    """Also the last one that runs: the step would wait for it forever."""
    rollout = load("ends_late")
    collector = make_collector(make_prompts(), rollout=rollout, group_size=1, round_tokens=4, max_staleness=1)
    steps = collected(collector, 1, 2)
    begin_round = collector._runner.begin_round
    num_late = []

    def begin_late(*args, **options):
        if len(collector._runner.running) == 1 and not collector._runner._spent:
            num_late.append(1)
            assert len(num_late) < 9, "its rollout was lost"
            (tmp_path / "open").touch()
            wait_for_any([rollout.pool], 60.0)
        begin_round(*args, **options)

    collector._runner.begin_round = begin_late
    steps += collected(collector, 1, 2, first_step=1)
    assert num_late
    assert 1 in ordinals(steps)[1]


@pytest.mark.slow
def test_a_reply_that_fills_the_pipe_during_an_update_is_not_late(load):
    """Its process waits for the trainer to read it, for longer than the time limit of a reply."""
    rollout = load("large", timeout_s=1.0)
    collector = make_collector(make_prompts(), rollout=rollout, **OPTIONS)
    collector._runner.patience_s = 0.0
    collector._serve(1, 1.0)
    collector._run_round(0)
    rollout.pool.flush()
    time.sleep(2)
    collected(collector, 1, 2)


def test_a_worker_that_cannot_be_replaced_during_an_evaluation_is_an_error_that_says_so(load, tmp_path):
    """Also where it held episodes of the training."""
    rollout = load("patient")
    collector = make_collector(make_prompts(), rollout=rollout, **OPTIONS)
    collected(collector, 1, 2)
    (tmp_path / "mine.py").write_text("raise ValueError('it is gone')")
    for worker in rollout.pool.workers:
        worker.kill()
    requests = make_prompts().requests(0, 1, group_size=0, num_greedy=1)
    with pytest.raises(RolloutError, match=r"(?s)^rollout patient: raised.*it is gone"):
        evaluated(collector.evaluator(make_prompts()), requests)


def test_an_evaluation_is_judged_as_a_whole_however_late_a_reward_comes(load, tmp_path):
    """A reward model gets all completions in one call."""
    judged = []

    def judge(prompts, completions):
        judged.append(len(completions))
        return [0.0] * len(completions)

    functions = {"reward": load("reward", make=RewardWorkers), "judge": RewardModel(judge)}
    requests = make_prompts().requests(0, 3, group_size=0, num_greedy=1)
    opening = threading.Timer(1.0, (tmp_path / "open").touch)
    opening.start()
    rewarded = evaluated(make_collector(make_prompts(), rollout=here, functions=functions), requests)
    opening.join()
    assert (len(rewarded.rollouts), judged) == (3, [3])


@pytest.mark.slow
def test_nothing_is_kept_of_prompts_that_were_taken():
    collector = make_collector(make_prompts(), rollout=calculator, **OPTIONS)
    collected(collector, 12, 2)
    runner = collector._runner
    by_prompt = (
        collector._num_running,
        collector._ended,
        collector._begun_in,
        collector._queue.groups,
        runner._unbegun,
    )
    assert max(map(len, by_prompt)) <= 2 * (1 + OPTIONS["max_staleness"])
    assert len(runner._number_of) <= 6 * (1 + OPTIONS["max_staleness"])


def test_what_is_in_flight_and_would_be_taken_too_late_is_refused_before_decoding():
    """As after `--resume force` with a smaller `--max-staleness`."""
    first = make_collector(make_prompts(), rollout=calculator, **OPTIONS)
    collected(first, 3, 4)
    second = make_collector(make_prompts(), rollout=calculator, round_tokens=4, max_staleness=1)
    resumed(first, second)
    with pytest.raises(InputError, match=r"^--max-staleness 1: steps of 1 prompts .* too late; resume with"):
        second.collect(1)
    assert second.take_count("sampled_tokens") == 0


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_slow_reward_holds_no_step_up_and_is_asked_for_once_unless_it_is_lost(load, tmp_path, is_killed):
    function = load("reward", make=RewardWorkers, num_workers=2)
    options = {"functions": {"reward": function}, "rollout": here, **OPTIONS}
    collector = make_collector(make_prompts(), **options)
    steps = collected(collector, 2, 2)
    assert all(1 not in step for step in ordinals(steps))
    (unrewarded,) = [group for group in collector.records() if group["rollouts"][0]["rollout_id"][0] == 1]
    assert [record["rewards"] for record in unrewarded["rollouts"]] == [None] * 3
    (tmp_path / "open").touch()
    if is_killed:
        collector = resumed(collector, make_collector(make_prompts(), **options))
    steps += collected(collector, NUM_STEPS - 2, 2, first_step=2)
    assert sum(1 in step for step in ordinals(steps)) == 1
    for rollout_id, _, tokens, is_sampled, *_, rewards in itertools.chain(*steps):
        assert rewards == [len(tokens) - is_sampled.index(True)], rollout_id


def test_waits_for_rewards_are_counted(load):
    function = load("reward", make=RewardWorkers, num_workers=2)
    collector = make_collector(make_prompts(), functions={"reward": function}, rollout=here, **OPTIONS)
    time_account.this_process.begin()
    collector.collect(2)
    _, seconds = time_account.this_process.take()
    assert seconds["wait_rewards"] > 0.8 * EpisodeRunner.patience_s


def test_a_function_that_fails_in_flight_stops_the_run_naming_row_and_turn(load):
    with pytest.raises(RolloutError, match=r"(?s)rollout fails for the row at f:\d+, after turn 1: .*never"):
        collected(make_collector(make_prompts(), rollout=load("fails"), **OPTIONS), 2, 2)


@pytest.mark.slow
def test_a_cache_that_is_too_small_for_all_in_flight_decodes_them_in_turns():
    """Those that have spent a round's budget make room for others, which would decode one by one: it has room for 7."""
    prompts = Prompts(lambda one: 50 + one.sample, num_rows=50)
    engine_options = {"cache_tokens": 1024, "max_running_requests": 64}
    collector = make_collector(prompts, engine_options=engine_options, **OPTIONS)
    collected(collector, 2, 4)
    stats = collector.engine.take_stats()
    assert stats.decode_tokens / stats.decode_steps > 4


class Skewed(rounds.Workload):
    """Of the completions of every second prompt one is ten times as long."""

    def _length(self, rng, shared, prompt, sample):
        return 60 if prompt % 2 == 0 and sample == 3 else 6


@pytest.mark.slow
@pytest.mark.parametrize(("max_staleness", "round_tokens"), [(0, None), (1, 5), (2, 5), (8, 16)])
def test_the_simulation_counts_the_decode_steps_and_ages_of_the_collector(max_staleness, round_tokens):
    arguments = argparse.Namespace(
        lengths="equal:60",
        group=4,
        turns=1,
        reply_seconds=0.0,
        ranks=1,
        prompts=4,
        reward_workers=1,
        reward_seconds=0.0,
    )
    workload = Skewed(arguments)
    simulation = rounds.Simulation(arguments, (1.0, 0, 0, 0, 0, 0), max_staleness, workload, round_tokens)
    prompts = Prompts(lambda one: workload._length(None, 0, *one[:2]), num_rows=200, max_new_tokens=60)
    engine_options = {"cache_tokens": 1 << 13, "max_running_requests": 256}
    options = {"group_size": 4, "max_staleness": max_staleness, "round_tokens": round_tokens}
    collector = make_collector(prompts, engine_options=engine_options, **options)
    for step in range(1, 13):
        groups = collector.collect(4, weight_version=step)
        rollouts = groups.rewarded.rollouts
        ages = torch.cat([step - one.weight_version[one.loss_mask] for one in rollouts]).double()
        simulated = simulation.run_step()
        assert simulated["tokens"] == len(ages)
        assert simulated["age"] == pytest.approx(ages.mean().item())
        assert simulated["max_age"] == ages.max()
        assert simulated["decode_steps"] == collector.engine.take_stats().decode_steps
