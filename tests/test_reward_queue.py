"""Rewards while others are decoded: calls side by side, in any order, in several processes, and their faults."""

import itertools
import threading
import time

import pytest
import torch

from minirl.data.task import Row
from minirl.errors import RewardError
from minirl.rewards.reward_model import RewardModel
from minirl.rewards.reward_queue import RewardQueue
from support.collecting import in_workers
from support.jobs import wait_for
from support.rollouts import make_prompts, make_rollout, reward_rollouts

SOURCE = """
import asyncio, pathlib, random, time
import numpy

FOLDER = pathlib.Path(__file__).parent

def wait_for(pattern, count):
    deadline = time.monotonic() + 60
    while len(list(FOLDER.glob(pattern))) < count:
        assert time.monotonic() < deadline, f"{count} {pattern}"
        time.sleep(0.005)

def waits(prompts, completions):
    (FOLDER / f"begun_{prompts[0]}").touch()
    wait_for("open", 1)
    return [1.0] * len(completions)

ALL_HAVE_BEGUN = asyncio.Barrier(8)

async def meets_all(completions):
    await ALL_HAVE_BEGUN.wait()
    return [1.0] * len(completions)

def draws(completions):
    return [random.random() + numpy.random.rand() + len(completions) + i / 10 for i in range(len(completions))]

def raises_beside_a_hang(completions):
    if "bad" in completions:
        wait_for("hangs", 1)
        raise KeyError("bad")
    (FOLDER / "hangs").touch()
    time.sleep(100)

def naps(completions):
    time.sleep(0.3)
    return [None] * len(completions)
"""


@pytest.fixture
def load(tmp_path):
    """`load(name, ...)`: the function of that name in its processes, killed at the end."""
    (tmp_path / "mine.py").write_text(SOURCE)
    with in_workers(tmp_path, timeout_s=20.0) as load_function:
        yield load_function


@pytest.fixture
def make_groups(tmp_path):
    """`make_groups([texts, ...])`: the prompts of a row for each group, and the groups' rollouts."""

    def make(groups):
        rows = [Row("abcdefghijkl"[i], {}, f"f.jsonl:{i}") for i in range(len(groups))]
        prompts = make_prompts(tmp_path, rows)
        return prompts, [
            [make_rollout(prompts, ordinal, sample, f"{text}<eos>") for sample, text in enumerate(texts)]
            for ordinal, texts in enumerate(groups)
        ]

    return make


def add_all(functions, prompts, groups):
    """A queue to which all groups are added."""
    queue = RewardQueue(functions, prompts)
    for group in groups:
        queue.add(group)
    return queue


def flat(groups):
    return list(itertools.chain(*groups))


def test_as_many_calls_as_workers_are_under_way_while_groups_are_added(load, make_groups, tmp_path):
    """Eight groups, four workers: four calls run side by side, and no fifth begins."""
    prompts, groups = make_groups([("a", "b")] * 8)
    queue = add_all({"waits": load("waits", num_workers=4)}, prompts, groups)
    wait_for(lambda: len(list(tmp_path.glob("begun_*"))) == 4, "four calls did not begin")
    time.sleep(0.2)
    first = {f"begun_{prompts.row(ordinal).prompt}" for ordinal in range(4)}
    assert {path.name for path in tmp_path.glob("begun_*")} == first
    assert queue.is_busy
    (tmp_path / "open").touch()
    assert queue.finish(range(8)).rewards.tolist() == [[1.0]] * 16
    assert not queue.is_busy


@pytest.mark.parametrize("where", ["process", "script"])
def test_an_async_function_judges_all_prompts_together(load, make_groups, where):
    """In one process: eight calls, none of which ends before all have begun."""
    begun = threading.Barrier(8)

    async def meets_all(completions):
        begun.wait(20)
        return [1.0] * len(completions)

    prompts, groups = make_groups([("a", "b")] * 8)
    functions = {"f": load("meets_all") if where == "process" else meets_all}
    queue = add_all(functions, prompts, groups)
    assert queue.finish(range(8)).rewards.tolist() == [[1.0]] * 16


def test_row_27_rewards_depend_neither_on_the_order_of_adding_nor_on_the_workers(load, make_groups):
    """Random ones too, and those of a function that looks at the whole call; they come in order of the samples."""
    prompts, groups = make_groups([("a", "b", "c")] * 6)
    expected = reward_rollouts({"draws": load("draws")}, prompts, flat(groups)).rewards.view(6, 3)
    assert expected.unique().numel() == 18
    mixed = [group[::-1] for group in groups[::-1]]
    picked = [3, 0, 5, 1, 4, 2]
    found = add_all({"draws": load("draws", num_workers=3)}, prompts, mixed).finish(picked)
    assert torch.equal(found.rewards.view(6, 3), expected[picked])
    assert [row.place for row in found.rows] == [prompts.row(i).place for i in picked for _ in range(3)]


def test_a_slow_function_of_the_script_holds_nothing_up_and_is_called_for_one_prompt_at_a_time(make_groups):
    """It runs in another thread; `finish` alone waits for it."""
    prompts, groups = make_groups([("a", "bb"), ("ccc", "dddd")])
    is_open, calls = threading.Event(), []

    def length(completions):
        calls.append(completions)
        assert is_open.wait(20)
        return [len(text) for text in completions]

    queue = add_all({"length": length}, prompts, groups)
    wait_for(lambda: calls, "no call began")
    queue.poll()
    assert (len(calls), queue.is_busy, queue.ready()) == (1, True, set())
    is_open.set()
    assert queue.finish(range(2)).rewards.tolist() == [[1], [2], [3], [4]]
    assert calls == [["a", "bb"], ["ccc", "dddd"]]


def test_a_reward_model_is_called_once_with_all_in_the_order_asked_for(make_groups):
    """Its batches are those of the whole phase; columns go by the order of the functions.

    A reward that does not apply is NaN: a 0 would enter its group's mean and std. Pitfall 59.
    """
    prompts, groups = make_groups([("a", "bb"), ("ccc", "dddd")])
    calls = []

    def length(prompts, completions):
        calls.append(completions)
        return [len(text) for text in completions]

    functions = {"length": RewardModel(length), "f": lambda completions: [None, 1.0]}
    queue = add_all(functions, prompts, groups[::-1])
    assert calls == []
    rewards = queue.finish(range(2)).rewards
    assert torch.equal(rewards.nan_to_num(-9), torch.tensor([[1.0, -9], [2, 1], [3, -9], [4, 1]]).double())
    assert calls == [["a", "bb", "ccc", "dddd"]]


def test_row_23_a_failure_is_raised_while_other_calls_are_under_way(load, make_groups):
    """Once it is there, without waiting for the others; it does not become a reward."""
    prompts, groups = make_groups([("ok",), ("bad",)])
    queue = add_all({"f": load("raises_beside_a_hang", num_workers=2)}, prompts, groups)
    for wait in (lambda: wait_for(queue.poll, "no call failed"), lambda: queue.finish(range(2))):
        with pytest.raises(RewardError, match=r"row at f.jsonl:\d: raised(.|\n)*KeyError: 'bad'"):
            wait()
        assert queue.is_busy


@pytest.mark.slow
def test_row_25_a_calls_time_begins_when_a_worker_has_got_it(load, make_groups):
    """Four calls that wait for one worker take longer than one may."""
    prompts, groups = make_groups([("a",)] * 4)
    queue = add_all({"naps": load("naps", timeout_s=0.9)}, prompts, groups)
    assert queue.finish(range(4)).rewards.isnan().all()
