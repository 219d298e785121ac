"""Rewards while others are decoded: calls side by side, in any order, by several workers, and their faults."""

import itertools
import os
import random
import signal
import subprocess
import time

import pytest
import torch

from minirl.data.task import Row
from minirl.errors import InputError, RewardError
from minirl.rewards.reward_queue import RewardQueue
from minirl.rewards.reward_workers import load_reward
from support.collecting import in_workers
from support.jobs import wait_for
from support.processes import is_alive
from support.rollouts import make_prompts, make_rollout, reward_rollouts

SOURCE = """
import os, pathlib, random, time
import numpy

FOLDER = pathlib.Path(__file__).parent
while (FOLDER / "is_slow").exists():
    time.sleep(0.01)

def wait_for(pattern, count):
    deadline = time.monotonic() + 60
    while len(list(FOLDER.glob(pattern))) < count:
        assert time.monotonic() < deadline, f"{count} {pattern}"
        time.sleep(0.005)

def meets_three(prompts, completions):
    (FOLDER / f"begun_{prompts[0]}").touch()
    wait_for("begun_*", 4)
    return [1.0] * len(completions)

def draws(completions):
    return [random.random() + numpy.random.rand() + len(completions) + i / 10 for i in range(len(completions))]

def raises(completions):
    if "bad" in completions:
        raise KeyError("bad")
    return [1.0] * len(completions)

def hangs(prompts, completions):
    while "bad" in completions:
        time.sleep(0.01)
    (FOLDER / f"done_{prompts[0]}").touch()
    return [float(len(c)) for c in completions]

def raises_beside_a_hang(completions):
    if "bad" in completions:
        wait_for("hangs", 1)
        raise KeyError("bad")
    (FOLDER / "hangs").touch()
    time.sleep(100)

def naps(completions):
    time.sleep(0.3)
    return [1.0] * len(completions)

def sizes(completions, text):
    return [float(len(text[0]))] * len(completions)
"""


@pytest.fixture
def load(tmp_path):
    """`load(name, ...)`: the function of that name with its workers, killed at the end."""
    (tmp_path / "mine.py").write_text(SOURCE)
    with in_workers(tmp_path, load_reward, timeout_s=20.0) as load_function:
        yield load_function


@pytest.fixture
def make_groups(tmp_path):
    """`make_groups([texts, ...])`: the prompts of a row for each group, and the groups' rollouts."""

    def make(groups):
        rows = [Row("abcdefghijkl"[i], {"text": "x" * 1_000_000}, f"f.jsonl:{i}") for i in range(len(groups))]
        prompts = make_prompts(tmp_path, rows)
        return prompts, [
            [make_rollout(prompts, ordinal, sample, f"{text}<eos>") for sample, text in enumerate(texts)]
            for ordinal, texts in enumerate(groups)
        ]

    return make


def add_all(functions, prompts, groups):
    """A queue to which all groups are added."""
    queue = RewardQueue(functions, prompts)
    queue.begin_step(sum(map(len, groups)))
    for group in groups:
        queue.add(group)
    return queue


def flat(groups):
    return list(itertools.chain(*groups))


def test_as_many_calls_as_workers_are_under_way_while_groups_are_added(load, make_groups, tmp_path):
    """Eight groups, four workers: none of the first four calls ends before all four have begun, and no fifth begins."""
    prompts, groups = make_groups([("a", "b")] * 8)
    queue = add_all({"meets_three": load("meets_three", num_workers=4)}, prompts, groups)
    wait_for(lambda: len(list(tmp_path.glob("begun_*"))) == 4, "four calls did not begin")
    first = {f"begun_{prompts.row(ordinal).prompt}" for ordinal in range(4)}
    assert {path.name for path in tmp_path.glob("begun_*")} == first
    assert queue.is_busy
    assert queue.finish(range(8)).rewards.tolist() == [[1.0]] * 16
    assert not queue.is_busy


def test_row_27_rewards_depend_neither_on_the_order_of_adding_nor_on_the_workers(load, make_groups):
    """Random ones too, and those of a function that looks at the whole call; they come in order of the samples."""
    prompts, groups = make_groups([("a", "b", "c")] * 6)
    few, many = {"draws": load("draws")}, {"draws": load("draws", num_workers=3)}
    expected = reward_rollouts(few, prompts, flat(groups)).rewards
    assert len(set(expected.flatten().tolist())) == 18
    generator = random.Random(0)
    for functions in (few, many, many):
        mixed = [generator.sample(group, 3) for group in generator.sample(groups, 6)]
        picked = generator.sample(range(6), 6)
        found = add_all(functions, prompts, mixed).finish(picked)
        assert torch.equal(found.rewards.view(6, 3), expected.view(6, 3)[picked])
        assert [row.place for row in found.rows] == [prompts.row(i).place for i in picked for _ in range(3)]


def test_functions_of_this_process_are_called_once_with_all_in_the_order_asked_for(load, make_groups):
    """A reward model's batches are those of the whole phase; columns go by the order of the functions."""
    prompts, groups = make_groups([("a", "bb"), ("ccc", "dddd")])
    calls = []

    def length(completions):
        calls.append(completions)
        return [len(text) for text in completions]

    queue = add_all({"length": length, "raises": load("raises")}, prompts, groups[::-1])
    assert calls == []
    assert queue.finish(range(2)).rewards.tolist() == [[1, 1], [2, 1], [3, 1], [4, 1]]
    assert calls == [["a", "bb", "ccc", "dddd"]]


@pytest.mark.parametrize("bad", [(2, 0, 0), (1, 1, 0), (1, 1, 1)], ids=["together", "apart", "too_many"])
def test_row_23_forgiven_failures_are_counted_over_the_phase(load, make_groups, bad, capfd):
    """Two of 40 completions are 5 %, wherever they are: also two of a call of four. A third stops the run.

    A forgiven failure is 0; a reward that does not apply is NaN, not a failure. Pitfalls 21 and 59.
    """
    texts = [("bad",) * n + ("ok",) * (4 - n) for n in (*bad, *[0] * 7)]
    prompts, groups = make_groups(texts)
    functions = {
        "raises": load("raises", on_error="zero", num_workers=2),
        "none": lambda completions: [None] * len(completions),
    }
    queue = add_all(functions, prompts, groups)
    if sum(bad) > 2:
        said = r"^3 of this step's 40 .* forgives 2; reward raises for the row at f"
        with pytest.raises(RewardError, match=said):
            queue.finish(range(10))
        return
    rewarded = queue.finish(range(10))
    is_bad = [text == "bad" for text in flat(texts)]
    assert rewarded.failed.tolist() == is_bad
    assert rewarded.rewards[:, 0].tolist() == [float(not failed) for failed in is_bad]
    assert rewarded.rewards[:, 1].isnan().all()
    assert capfd.readouterr().out.count("note: reward raises for the row at f.jsonl") == 1


@pytest.mark.slow
def test_row_25_a_call_that_hangs_delays_no_other_group(load, make_groups, tmp_path):
    """All others are judged while it hangs, by the other worker; then it is killed and its row is named."""
    prompts, groups = make_groups([("bad",)] + [("ok",)] * 7)
    hangs = load("hangs", timeout_s=2.0, num_workers=2)
    queue = add_all({"hangs": hangs}, prompts, groups)
    while len(list(tmp_path.glob("done_*"))) < 7:
        queue.poll(0.1)
    assert queue.is_busy
    before = hangs.pool.workers[0].pid
    with pytest.raises(
        RewardError, match=rf"row at {prompts.row(0).place}, completion 'bad': took more than 2 s"
    ):
        queue.finish(range(8))
    assert not is_alive(before)


def test_row_23_a_failure_is_raised_while_other_calls_are_under_way(load, make_groups):
    """Once it is there, without waiting for the others; it does not become a reward."""
    prompts, groups = make_groups([("ok",), ("bad",)])
    function = load("raises_beside_a_hang", num_workers=2)
    queue = add_all({"f": function}, prompts, groups)
    with pytest.raises(RewardError, match="completion 'bad': raised"):
        wait_for(lambda: queue.poll(0.1), "no call failed")
    assert queue.is_busy
    assert 1 not in queue.ready()


@pytest.mark.slow
def test_row_25_a_calls_time_begins_when_a_worker_has_got_it(load, make_groups):
    """Four calls that wait for one worker take longer than one may; so does a rank that is late to poll."""
    prompts, groups = make_groups([("a",)] * 4)
    functions = {"naps": load("naps", timeout_s=0.9)}
    assert reward_rollouts(functions, prompts, flat(groups)).rewards.tolist() == [[1.0]] * 4
    for name in ("naps", "sizes"):  # the second gets more than its pipe holds
        queue = add_all({name: load(name, timeout_s=0.9)}, prompts, groups[:1])
        time.sleep(1.2)
        assert queue.finish([0]).rewards.item() in (1.0, 1_000_000.0)


def test_row_25_a_worker_that_has_died_is_replaced_without_waiting_for_its_imports(
    load, make_groups, tmp_path
):
    """Decoding goes on while the file is loaded."""
    prompts, groups = make_groups([("a",)])
    function = load("raises")
    (tmp_path / "is_slow").touch()
    os.kill(function.pool.workers[0].pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(function.pool.workers[0].pid), "the worker lives on")
    queue = add_all({"raises": function}, prompts, groups)
    queue.poll()
    assert queue.is_busy
    (tmp_path / "is_slow").unlink()
    assert queue.finish([0]).rewards.tolist() == [[1.0]]


def test_a_system_that_starts_no_more_processes_is_an_input_error(load, monkeypatch):
    """The flag and the system's reason; the workers that did start are gone."""
    started, start = [], subprocess.Popen

    def start_two(*args, **options):
        if len(started) == 2:
            raise OSError(24, "Too many open files")
        started.append(start(*args, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start_two)
    said = "--reward .*mine.py:raises: .*Too many open files; see --workers"
    with pytest.raises(InputError, match=said):
        load("raises", num_workers=3)
    assert not any(is_alive(process.pid) for process in started)
