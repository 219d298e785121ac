"""Rollout functions as tasks on one event loop: late replies do not change rollouts, and failures are reported."""

import asyncio
import contextlib
import functools
import json
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy
import pytest
import torch

from minirl.data.task import Row
from minirl.episodes import runner
from minirl.episodes.episode import one_turn
from minirl.errors import InputError, RolloutError
from minirl.files.json_files import json_text
from minirl.files.user_code import find_functions
from minirl.rewards.functions import EpisodeReward
from minirl.run.config import RunConfig
from minirl.run.inputs import load_rollout_function
from support.collecting import (
    Prompts,
    assert_pauses_change_nothing,
    branching,
    calculator,
    chat_prompts,
    collected,
    make_collector,
    unhurried,
)
from support.jobs import LIMIT_S
from support.texts import user


def rollouts_of(rollout):
    return collected(make_collector(rollout=rollout), 1, 5)


def test_an_invalid_request_raises_at_its_await_and_the_function_may_continue():
    """Covers a prompt without room and misplaced messages. Other episodes and turns are unaffected."""
    caught = []

    async def careful(episode):
        for branch, after in ((episode.branch("a" * 200), None), (episode, user("a"))):
            try:
                await branch.generate(after=after)
            except InputError as error:
                caught.append(str(error))
        await episode.generate(max_tokens=4)

    async def plain(episode):
        await episode.generate(max_tokens=4)

    assert rollouts_of(careful) == rollouts_of(plain)
    assert {re.sub(r".*: ", "", text) for text in caught} == {
        "the first turn's prompt and `after` leave no room for sampled tokens",
        "messages cannot precede the first turn; see episode.branch, or write them into the row's prompt",
    }

    async def hopeless(episode):
        with contextlib.suppress(InputError):
            await episode.branch("a" * 200).generate()

    with pytest.raises(
        RolloutError, match=r"ended without a turn; .* was rejected: .* leave no room for sampled tokens"
    ):
        rollouts_of(hopeless)


def test_a_row_belongs_to_its_episode_alone():
    """A function may modify its row: other episodes, rewards, later steps and records still get the original."""

    async def spoiling(episode):
        episode.row.columns["board"].append("x")
        episode.prompt.append(user("b"))
        episode.tools.append({"type": "function", "function": {"name": "f"}})
        episode.row.prompt[0]["content"] += "!"
        turn = await episode.generate(max_tokens=2)
        turn.ids.clear()
        return float(len(episode.row.columns["board"]))

    def here(rollouts, board, prompts):
        sizes = list(map(len, board))
        for rollout, one, prompt in zip(rollouts, board, prompts, strict=True):
            rollout.episode.row.columns["board"].append("y")
            one.append("y")
            prompt.clear()
        return sizes

    prompts = chat_prompts()
    prompts._rows, unchanged = ([Row([user("a")], {"board": []}, "f:1")] for _ in range(2))
    functions = {"reward": EpisodeReward(), "here": here, "later": lambda board: list(map(len, board))}
    collector = make_collector(prompts, rollout=spoiling, functions=functions)
    for _ in range(2):
        groups = collector.collect(2)
        assert groups.rewards.unique(dim=1).tolist() == [[[1.0, 0.0, 0.0]]] * 2
    assert prompts._rows == unchanged


def test_turn_extra_is_stored_as_json_or_rejected_when_the_episode_ends():
    """NumPy numbers, sets and paths are converted; values that JSON cannot represent end the run in their turn."""

    noted = {"a": numpy.float32(0.5), "b": {1}, "c": Path("x"), "d": torch.ones(2)}

    async def noting(episode):
        turn = await episode.generate(max_tokens=2)
        turn.extra["noted"] = noted

    rollout = make_collector(rollout=noting).collect(1).rollouts[0]
    extra = json.loads(json_text(rollout.episode.turns[0].json_fields()))["extra"]
    assert extra == {"noted": {"a": 0.5, "b": [1], "c": "x", "d": [1.0, 1.0]}}
    noted[(1, 2)] = 3
    with pytest.raises(
        RolloutError, match=r"row at f:\d+, after turn 1: turn.extra or .* is not valid JSON: keys must be"
    ):
        make_collector(rollout=noting).collect(1)


FUNCTIONS = [(one_turn, 7), (calculator, 3), (branching, 3)]


@pytest.mark.parametrize(("function", "budget"), FUNCTIONS)
def test_rollouts_do_not_depend_on_when_functions_reply(function, budget):
    """Covers a small cache, rounds, and a resume. Fault 54, pitfall 40."""
    prompts = chat_prompts(120)
    tight = {"cache_tokens": 512, "max_running_requests": 5}
    make = functools.partial(make_collector, prompts, rollout=unhurried(function), engine_options=tight)
    assert_pauses_change_nothing(make, make_collector(prompts, rollout=function), budget=budget)


@pytest.mark.parametrize("fails", [False, True])
def test_functions_clean_up_when_their_episode_ends_and_when_the_run_fails(fails, monkeypatch):
    monkeypatch.setattr(runner, "CLEANUP_S", LIMIT_S)
    closed = []

    async def mine(episode):
        try:
            await episode.generate(max_tokens=3)
            assert not (fails and episode.row.origin == "f:3")
            await episode.generate(after="a", max_tokens=3)
        finally:
            await asyncio.sleep(0.01)
            closed.append(episode.row.origin)

    collector = make_collector(Prompts(num_rows=20), rollout=mine, group_size=1, max_turns=1)
    with pytest.raises(RolloutError, match="f:3") if fails else contextlib.nullcontext():
        collector.collect(20)
    collector.close()
    assert sorted(closed) == sorted(f"f:{i}" for i in range(20))


async def wait(event):
    while not event.is_set():
        await asyncio.sleep(0.001)


async def block(event):
    await asyncio.to_thread(event.wait)


async def poll(event):
    while not event.is_set():
        await asyncio.sleep(0)


@pytest.mark.parametrize("wait", [wait, block, poll])
def test_the_engine_decodes_while_functions_wait_block_or_poll(wait):
    """One function waits for all other functions to end, so the round must not wait for that function. Fault 55."""
    others, others_ended = {f"f:{i}" for i in range(1, 6)}, threading.Event()

    async def mine(episode):
        await episode.generate(max_tokens=9)
        if episode.row.origin == "f:0":
            await wait(others_ended)
        await episode.generate(max_tokens=9)
        others.discard(episode.row.origin)
        if not others:
            others_ended.set()

    make_collector(Prompts(num_rows=6), rollout=mine, group_size=1, call_timeout=LIMIT_S).collect(6)


HANGING = """
import asyncio, time
from minirl.episodes.event_loop import event_loop
from minirl.ranks import launch

def main():
    event_loop().create_task(asyncio.to_thread(time.sleep, 10_000))
    event_loop().run_slice(0.2)

launch.run(main)
"""


def test_a_blocking_call_that_hangs_does_not_delay_the_exit():
    subprocess.run([sys.executable, "-c", HANGING], check=True, timeout=LIMIT_S)


def test_a_notebook_with_its_own_event_loop_can_collect():
    async def cell():
        return rollouts_of(calculator)

    assert asyncio.run(cell()) == rollouts_of(calculator)


def test_two_files_of_the_same_name_are_two_modules_with_their_own_helpers(tmp_path):
    """Helpers share names too, and import others at load time or in functions. pickle finds their classes."""
    for folder in "ab":
        path = tmp_path / folder / "mine.py"
        path.parent.mkdir()
        path.with_name("random.py").write_text("from below import Where\nimport mine, random")
        path.with_name("below.py").write_text(f"class Where:\n    folder = {folder!r}")
        path.write_text("import random\ndef f():\n    import below\n    return random.Where(), below.Where()")
        (f,) = find_functions(str(path), "f")
        assert [pickle.loads(pickle.dumps(where)).folder for where in f()] == [folder] * 2


def test_a_file_is_loaded_once_and_prints(tmp_path, capsys):
    path = tmp_path / "mine.py"
    config = RunConfig(rollout=f"{path}:rollout")
    path.write_text("print('hello')\nasync def rollout(episode): ...")
    rollout = load_rollout_function(config).function
    path.write_text("# changed since then")
    assert load_rollout_function(config).function is rollout
    assert capsys.readouterr().out == "hello\n"
