"""Rollout functions as tasks of one event loop: the same rollouts however late they reply, and failures that say so."""

import asyncio
import contextlib
import functools
import pickle
import subprocess
import sys
import time

import pytest

from minirl.episodes.episode import one_turn
from minirl.errors import RolloutError
from minirl.files.user_code import find_functions
from minirl.run.config import RunConfig
from minirl.run.load_task import load_rollout
from support.collecting import (
    Prompts,
    assert_pauses_change_nothing,
    branching,
    calculator,
    chat_prompts,
    collected,
    facts,
    make_collector,
    unhurried,
)


def rollouts_of(rollout, num_steps=1, num_groups=5, **options):
    return collected(make_collector(rollout=rollout, **options), num_steps, num_groups)


FUNCTIONS = [(one_turn, 7), (calculator, 3), (branching, 3)]


@pytest.mark.parametrize(("function", "budget"), FUNCTIONS)
def test_rollouts_do_not_depend_on_when_functions_reply(function, budget):
    """With a small cache, in parts, and after a resume. Fault 54, pitfall 40."""
    prompts = chat_prompts(120)
    tight = {"cache_tokens": 512, "max_running_requests": 5}
    make = functools.partial(make_collector, prompts, rollout=unhurried(function), engine_options=tight)
    assert_pauses_change_nothing(make, make_collector(prompts, rollout=function), budget=budget)


def groups_of_rank(rank):
    """The groups of this rank in two steps, by their ordinals, with rewards that judge a group together."""
    functions = {"size": lambda episodes: [len(episodes)] * len(episodes)}
    collector = make_collector(rollout=unhurried(calculator), functions=functions)
    groups = {}
    for rewarded in (collector.collect(3).rewarded for _ in range(2)):
        for rollout, rewards in zip(rewarded.rollouts, rewarded.rewards.tolist(), strict=True):
            groups.setdefault(rollout.rollout_id.prompt_ordinal, []).append((facts(rollout), rewards))
    return groups


def test_a_rank_has_whole_groups_which_are_those_of_one_rank_however_late_functions_reply(
    one_rank, two_ranks
):
    (expected,) = one_rank.run(groups_of_rank)
    first, second = two_ranks.run(groups_of_rank)
    assert len(first) == len(second) == len(expected) / 2
    assert first | second == expected


@pytest.mark.parametrize("fails", [False, True])
def test_functions_clean_up_where_their_episode_ends_and_where_the_run_fails(fails):
    closed = []

    async def mine(episode):
        try:
            await episode.generate(max_tokens=3)
            assert not (fails and episode.row.place == "f:3")
            await episode.generate(after="a", max_tokens=3)
        finally:
            await asyncio.sleep(0.01)
            closed.append(episode.row.place)

    collector = make_collector(Prompts(num_rows=20), rollout=mine, group_size=1, max_turns=1)
    with pytest.raises(RolloutError, match="f:3") if fails else contextlib.nullcontext():
        collector.collect(20)
    collector.close()
    assert sorted(closed) == sorted(f"f:{i}" for i in range(20))


def poll(seconds):
    async def polling():
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await asyncio.sleep(0)

    return polling()


@pytest.mark.parametrize(
    "wait", [asyncio.sleep, functools.partial(asyncio.to_thread, time.sleep), poll], ids=range(3)
)
def test_the_engine_decodes_while_functions_wait_block_or_poll(wait):
    """64 episodes, 3 turns of 10 tokens: were they to wait for one another, most steps would have a few rows.

    Fault 55.
    """

    async def mine(episode):
        for _ in range(3):
            await episode.generate(max_tokens=10)
            await wait(0.02)

    collector = make_collector(rollout=mine, prompts=Prompts(lambda _: 60), group_size=8)
    collector.collect(8)
    stats = collector.engine.take_stats()
    assert stats.decode_tokens > 64 * 25
    assert stats.decode_tokens / stats.decode_steps > 8


HANGING = """
import asyncio, time
from minirl.episodes.event_loop import event_loop
from minirl.ranks import launch

def main():
    event_loop().create_task(asyncio.to_thread(time.sleep, 1000))
    event_loop().run_slice(0.2)

launch.run(main)
"""


def test_a_blocking_call_that_hangs_does_not_delay_the_exit():
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", HANGING], check=True, timeout=60)
    assert time.monotonic() - began < 50


def test_a_notebook_with_its_own_event_loop_can_collect():
    async def cell():
        return rollouts_of(calculator)

    assert asyncio.run(cell()) == rollouts_of(calculator)


ONE_FILE = """
async def rollout(episode):
    print("hello from", episode.row.place)
    await episode.generate()
"""


def test_files_of_one_name_are_two_modules_each_with_the_helpers_beside_it(tmp_path):
    """Though the helpers have one name too, and import others, at once or in a function. pickle finds their classes."""
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
    path.write_text(ONE_FILE)
    rollout = load_rollout(config).function
    assert rollouts_of(rollout) == rollouts_of(one_turn)
    path.write_text("# changed since then")
    assert load_rollout(config).function is rollout
    assert capsys.readouterr().out.count("hello from f:") == 15
