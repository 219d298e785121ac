"""Rollout functions in worker processes: the same rollouts as in this process, whatever happens there."""

import functools
import inspect
import os
import re
import runpy
import signal

import pytest
import torch

from minirl.errors import InputError, RolloutError
from support.collecting import (
    CHAT,
    Prompts,
    assert_pauses_change_nothing,
    branching,
    chat_prompts,
    chatting,
    collected,
    in_workers,
    letter_tokenizer,
    make_collector,
    truncating,
)
from support.collecting import calculator as calculator_here
from support.engines import VOCAB
from support.marks import slow
from support.processes import is_alive
from support.programs import AT_A_URL, in_turns
from support.texts import HERMES

SOURCE = """
import asyncio, os, pathlib, random, time

FOLDER = pathlib.Path(__file__).parent
LETTERS = "abcdefghijklmnopqrstuvwxyz"

def reply_to(episode, turn):
    return "xyz" if "a" in turn.text else LETTERS[len(turn.ids)] * (episode.seed % 40)

def calculator(episode):
    turn = yield episode.generate(stop="e", max_tokens=15)
    for _ in range(2):
        turn = yield episode.generate(after=reply_to(episode, turn), stop=["ab", "e"], max_tokens=9)

def slow(episode):
    turn = yield episode.generate(stop="e", max_tokens=15)
    for _ in range(2):
        time.sleep(random.SystemRandom().random() / 50)
        turn = yield episode.generate(after=reply_to(episode, turn), stop=["ab", "e"], max_tokens=9)

async def overlapped(episode):
    await asyncio.sleep(random.SystemRandom().random() / 50)
    turn = yield episode.generate(stop="e", max_tokens=15)
    for _ in range(2):
        await asyncio.sleep(random.SystemRandom().random() / 20)
        turn = yield episode.generate(after=reply_to(episode, turn), stop=["ab", "e"], max_tokens=9)

def is_chosen(episode, turn_number=1, place="f:3"):
    return episode.row.place == place and len(episode.turns) == turn_number

def once(name):
    try:
        (FOLDER / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def calculator_turns(episode):
    yield episode.generate(stop="e", max_tokens=15)
    for _ in range(2):
        after = reply_to(episode, episode.turns[-1])
        yield episode.generate(after=after, stop=["ab", "e"], max_tokens=9)

async def dies_once_async(episode):
    for turn in calculator_turns(episode):
        await asyncio.sleep(0.002)
        if is_chosen(episode, place="f:26") and once("async_death"):
            os._exit(3)
        yield turn

if (FOLDER / "needs_numpy").exists():
    import numpy

def drawn():
    return f"{LETTERS[random.randrange(26)]}{LETTERS[numpy.random.randint(26)]}"

def random_replies(episode):
    yield episode.generate(max_tokens=4)
    for _ in range(2):
        yield episode.generate(after=drawn(), max_tokens=3)

async def random_replies_async(episode):
    async def draw():
        await asyncio.sleep(random.SystemRandom().random() / 100)
        first = drawn()
        await asyncio.sleep(0)
        return first + drawn()

    yield episode.generate(max_tokens=4)
    for _ in range(2):
        (text,) = await asyncio.gather(draw())
        yield episode.generate(after=text, max_tokens=3)

def hostile(action):
    def function(episode):
        yield episode.generate(max_tokens=4)
        if is_chosen(episode):
            asked = action(episode)
            yield asked
        yield episode.generate(after="a", max_tokens=3)
    return function

def hostile_async(action):
    async def function(episode):
        yield episode.generate(max_tokens=4)
        if is_chosen(episode):
            asked = action(episode)
            if asyncio.iscoroutine(asked):
                asked = await asked
            yield asked
        yield episode.generate(after="a", max_tokens=3)
    return function

def do_raise(episode):
    raise KeyError("no such tool")

raises = hostile(do_raise)
dies_async = hostile_async(lambda episode: os._exit(3))
hangs_async = hostile_async(lambda episode: asyncio.sleep(1000))
strange_object = hostile(lambda episode: episode.generate(after=[object()]))
foreign_ids = hostile(lambda episode: episode.generate(after=[10_000]))
huge = hostile(lambda episode: episode.generate(after="a" * 10_000_000))

def always_raises(episode):
    yield episode.generate(max_tokens=4)
    raise KeyError("again")

def returns(episode):
    yield episode.generate(max_tokens=4)
    if is_chosen(episode):
        return 1.0

gives_nan = hostile(lambda episode: episode.reward(float("nan")))

def raises_at_its_end(episode):
    try:
        yield episode.generate(max_tokens=8)
        yield episode.generate(after="a" * 1000)
    finally:
        raise KeyError("at its end")

async def naps(episode):
    for _ in range(3):
        yield episode.generate(max_tokens=10)
        await asyncio.sleep(0.02)

async def late(episode):
    yield episode.generate(max_tokens=4)
    await asyncio.sleep(2.0 if is_chosen(episode) else 0)
    yield episode.generate(after="a", max_tokens=3)

def shows_all(episode):
    room = episode.room
    assert (episode.tokens, episode.turns, episode.row.columns["answer"]) == ([], [], episode.row.prompt[:1])
    first = yield episode.generate(max_tokens=4)
    assert episode.room == room - 4
    second = yield episode.generate(after=[1, 2], max_tokens=5)
    assert episode.room == room - 11
    assert episode.tokens == [*first.ids, 1, 2, *second.ids]
    assert episode.loss_mask == [True] * 4 + [False] * 2 + [True] * 5
    assert episode.versions == [7] * 4 + [0] * 2 + [7] * 5
    assert episode.logprobs == [*first.logprobs, 0, 0, *second.logprobs]
    assert episode.turns == [first, second]
    assert (first.finish_reason, second.finish_reason) == ("length", "length")
    yield episode.generate(after=first.text, max_tokens=1)

def moody(episode):
    yield episode.generate(max_tokens=3)
    yield episode.generate(after=random.SystemRandom().choices(range(3, 20), k=9), max_tokens=3)
    if is_chosen(episode, 2, place="f:26") and once("moody_death"):
        os._exit(3)
"""
FAILING = {
    "raises": r"raised\nTraceback(.|\n)*mine.py(.|\n)*KeyError: 'no such tool'",
    "dies_async": "ended its process, exit code 3",
    "hangs_async": "took more than 0.5 s for a reply; see --call-timeout",
    "strange_object": "yields .*; expected text, numbers and lists of them",
    "foreign_ids": f"token id 10000, and the model has {VOCAB}",
    "huge": r"asks for a turn with 1000\d{4} characters; at most",
    "returns": r"gives rewards \('reward'\) that the run does not have: add --reward episode",
    "gives_nan": r"raised\n(.|\n)*InputError: episode.reward, for the row at f:3: 'reward' is nan; a reward is",
}


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Functions of the file above in their workers, which are killed when the test is over."""
    copies = "\n".join(map(inspect.getsource, (chatting, branching, truncating)))
    (tmp_path / "mine.py").write_text(SOURCE + copies.replace(": Episode", "") + AT_A_URL)
    monkeypatch.setattr("minirl.workers.pool.GRACE_S", 0.5)
    with in_workers(tmp_path, timeout_s=20.0) as load_function:
        yield load_function


def rollouts_of(rollout, num_steps=1, num_groups=5, **options):
    return collected(make_collector(rollout=rollout, **options), num_steps, num_groups)


def test_an_answer_that_nobody_can_read_is_an_error_only_where_it_is_asked_for(load):
    rollouts_of(load("calculator"), prompts=chat_prompts())
    with pytest.raises(RolloutError, match="no response template that transformers can read"):
        rollouts_of(load("chatting"), prompts=chat_prompts())


def test_an_episode_shows_its_tokens_turns_and_room_in_both_hosts(load, tmp_path):
    """And the text of a turn is that of its tokens."""
    for rollout in (runpy.run_path(str(tmp_path / "mine.py"))["shows_all"], load("shows_all")):
        collector = make_collector(Prompts(lambda _: 60), rollout=rollout, group_size=1)
        (made,) = collector.collect(1, weight_version=7).rewarded.rollouts
        tokens = made.completion
        assert tokens[11:-1] == letter_tokenizer().encode_text(letter_tokenizer().decode(tokens[:4]), "")


# Of each program its twin in this process, and the tokens of a round.
PROGRAMS = [
    ("branching", branching, 6),
    slow("truncating", truncating, 6),
    slow("overlapped", calculator_here, 1),
    slow("chatting", chatting, 6),
    slow("in_thread", in_turns, 6),
    slow("in_loop", in_turns, 6),
]


@pytest.mark.parametrize(("name", "here", "budget"), PROGRAMS)
def test_a_program_makes_the_same_rollouts_anywhere(load, name, here, budget):
    """In this process, on one worker and on three, with a small cache, in parts, from a checkpoint and after a kill."""
    # Only `chatting` asks for the messages of its turns.
    make = functools.partial(make_collector, chat_prompts(120, HERMES + CHAT if here is chatting else CHAT))
    one, three = (load(name, num_workers=n) for n in (1, 3))

    def after_a_kill(**options):
        for worker in three.pool.workers:
            os.kill(worker.pid, signal.SIGKILL)
        tight = {"cache_tokens": 512, "max_running_requests": 5}
        return make(rollout=three, engine_options=tight, **options)

    in_one = functools.partial(make, rollout=one)
    whole = functools.partial(make, rollout=here)
    assert_pauses_change_nothing(in_one, after_a_kill, whole, budget=budget)


def test_row_54_episodes_of_a_process_that_died_are_run_again_from_their_turns(load):
    """It was killed from outside, as it were: nobody is to blame, and nothing differs."""
    workers = load("dies_once_async", num_workers=2)
    pids = [worker.pid for worker in workers.pool.workers]
    assert rollouts_of(workers, 2) == rollouts_of(calculator_here, 2)
    assert sum(is_alive(pid) for pid in pids) == 1


@pytest.mark.slow
def test_row_54_a_kill_of_every_worker_in_the_middle_changes_nothing(load):
    workers = load("slow", num_workers=2)
    collector = make_collector(rollout=workers, group_size=4)
    runner_step = collector._runner.step
    kills = []

    def step():
        worker = workers.pool.workers[len(kills) % 2]
        if len(kills) < 2 and collector._runner._counts["sampled_tokens"] > 40 and worker.is_ready:
            kills.append(worker.pid)
            os.kill(kills[-1], signal.SIGKILL)
        return runner_step()

    collector._runner.step = step
    assert collected(collector, 1, 5) == rollouts_of(calculator_here, group_size=4)
    assert len(kills) == 2


def test_row_54_an_episode_that_asks_for_something_else_when_it_is_run_again_has_failed(load):
    with pytest.raises(
        RolloutError, match=r"moody.*asks for something else; make it a function of its turns"
    ):
        rollouts_of(load("moody"), num_groups=8)


def one_of_each_row(rollout):
    """A collector of one episode for each of 20 rows."""
    return make_collector(Prompts(num_rows=20), rollout=rollout, group_size=1)


@functools.cache
def calm_rollouts():
    """Those of the functions above without the one that fails."""

    def calm(episode):
        yield episode.generate(max_tokens=4)
        yield episode.generate(after="a", max_tokens=3)

    (rows,) = collected(one_of_each_row(calm), 1, 20)
    return {row[0]: row for row in rows}


@pytest.mark.parametrize("name", FAILING)
def test_row_53_a_failure_stops_the_run_or_ends_its_episode_alone(load, name):
    """With function, row and turn, or counted: the other 19 are those of a function that does not fail."""
    timeout_s = 0.5 if "hangs" in name else 20.0
    collector = one_of_each_row(load(name, timeout_s=timeout_s, on_error="end"))
    found = {row[0]: row for row in collected(collector, 1, 20)[0]}
    (failed,) = [rollout_id for rollout_id, row in found.items() if row[1] == "error"]
    assert found.pop(failed)[3].count(True) == 4
    assert [collector.take_count("rollout_errors") for _ in range(2)] == [1, 0]
    if name != "returns":
        assert found == {key: row for key, row in calm_rollouts().items() if key != failed}
    expected = rf"rollout {name} for the row at f:3, after turn 1: (\w+\(episode\).*)?{FAILING[name]}"
    with pytest.raises(RolloutError) as raised:
        one_of_each_row(load(name, timeout_s=timeout_s)).collect(20)
    assert re.match(expected, str(raised.value)), str(raised.value)
    assert raised.value.exit_code == 4


def test_row_53_more_failures_than_are_forgiven_stop_the_run(load):
    """5 % of 60 episodes are three."""
    collector = make_collector(rollout=load("always_raises", on_error="end"))
    with pytest.raises(
        RolloutError, match=r"rollout always_raises for the row at f:\d+, after turn 1: raised"
    ):
        collector.collect(20)
    assert collector.take_count("rollout_errors") == 3


def test_what_a_function_raises_at_its_end_is_said_once_and_harms_nothing(load, capfd):
    collector = make_collector(rollout=load("raises_at_its_end"), prompts=Prompts(lambda _: 60))
    for row in [row for step in collected(collector, 2) for row in step]:
        assert (row[1], row[3].count(True)) == ("length", 8)
    assert capfd.readouterr().out.count("failed at its end (said once)") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["random_replies", "random_replies_async"])
def test_row_55_random_replies_depend_on_the_episode_alone(load, tmp_path, name):
    """Neither on its neighbours in the process nor on their number, with `random` and with NumPy."""
    (tmp_path / "needs_numpy").touch()
    one = load(name)
    (found,) = rollouts_of(one, num_groups=12)
    assert rollouts_of(load(name, num_workers=3), num_groups=12) == [found]
    assert rollouts_of(one, num_groups=1, group_size=1) == [found[:1]]
    assert len({tuple(row[2]) for row in found}) == len(found)


def test_the_engine_decodes_while_replies_are_awaited(load):
    """64 episodes, 3 turns of 10 tokens: were they to wait for one another, most steps would have a few rows."""
    collector = make_collector(rollout=load("naps"), prompts=Prompts(lambda _: 60), group_size=8)
    collector.collect(8)
    stats = collector._runner._engine.take_stats()
    assert stats.decode_tokens > 64 * 25
    assert stats.decode_tokens / stats.decode_steps > 8


def test_an_async_function_in_this_process_is_refused_with_the_flag():
    async def function(episode):
        yield episode.generate()

    with pytest.raises(
        InputError, match=r"is `async def`; such a function runs in a worker process, with --rollout"
    ):
        rollouts_of(function)


def test_a_row_that_json_cannot_hold_is_refused_by_its_place(load):
    prompts = Prompts(num_rows=4)
    for i in range(4):
        prompts.row(i).columns["tensor"] = torch.zeros(1)
    with pytest.raises(InputError, match=r"--rollout: the row at f:\d cannot be sent to it: .*Tensor"):
        rollouts_of(load("calculator"), prompts=prompts)
