"""Faults of reward functions: they cannot hang, lie about, or corrupt a run. Rows as in the fault table."""

import os
import re
import runpy
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from minirl.data.task import Row
from minirl.errors import InputError, RewardError
from minirl.rewards.reward_workers import RewardWorkers
from minirl.run.config import RunConfig
from minirl.run.load_task import load_task
from support.collecting import in_workers
from support.forked import fork, make_pipe
from support.processes import is_alive
from support.programs import NO_SPEC, UNNAMED
from support.rollouts import rewards_of_call

SOURCE = """
import asyncio, ctypes, os, re, subprocess, sys, time

def good(completions):
    return [float(len(c)) for c in completions]

def acts(completions):
    for action in completions:
        globals()[action]()
    return [1.0] * len(completions)

async def acts_async(completions):
    await asyncio.sleep(0)
    return acts(completions)

def fine():
    pass

def raises():
    raise KeyError("no \\x1b[31mred\\x1b[0m")

def exits():
    sys.exit("done")

def interrupts():
    raise KeyboardInterrupt

def recurses():
    recurses()

def dies():
    os._exit(3)

def reads_nowhere():
    ctypes.string_at(0)

def closes_everything():
    os.closerange(0, 5000)
    time.sleep(100)

def hangs():
    time.sleep(1000)

def hangs_in_c():
    re.match("(a+)+$", "a" * 50 + "b")

def prints_forever():
    while True:
        print("x" * 1_000_000)

def write_to_all(text):
    for fd in range(5000):
        try:
            os.write(fd, text)
        except OSError:
            pass

def writes_to_all():
    write_to_all(b"hello")

def floods():
    while True:
        write_to_all(b"x" * 1_000_000)

def prints():
    print("hello \\x1b[31m" + "x" * 5_000_000)
    print("to stderr", file=sys.stderr)
    os.system("echo of a program")
    os.write(1, b"to the descriptor")
    sys.stdout.buffer.write(b"bytes")

def starts():
    with open(__file__ + ".pids", "a") as file:
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        program = subprocess.Popen(["sleep", "1000"]).pid
        file.write(f"{os.getpid()} {child} {program} ")

def mutates(prompts, completions, answer):
    count = len(completions)
    answer[0].append(3)
    for values in (prompts, completions, answer):
        values.clear()
    return [1.0] * count

def code_points(completions):
    return [float(ord(c)) for c in completions]

async def one_is_late(completions):
    await asyncio.sleep(1000 if completions == ["late"] else 0)
    return [1.0] * len(completions)
"""
RAISED = {
    "raises": r"raised\nTraceback(.|\n)*mine\.py\", line \d+, in raises\n(.|\n)*KeyError: 'no \\x1b\[31mred",
    "exits": r"raised\n(.|\n)*SystemExit: done",
    "interrupts": r"raised\n(.|\n)*KeyboardInterrupt",
    "recurses": r"raised\n(.|\n)*RecursionError",
}
NO_ANSWER = "its process sent something other than an answer"
LOST = {
    "dies": "ended its process, exit code 3",
    "reads_nowhere": r"ended its process, signal 11 \(Segmentation fault\)",
    "closes_everything": r"ended its process, signal 9 \(Killed\)",
    "hangs": "took more than 1 s and was killed",
    "hangs_in_c": "took more than 1 s and was killed",
    "prints_forever": "took more than 1 s and was killed",
    "writes_to_all": NO_ANSWER,
    "floods": NO_ANSWER,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards")
    (path / "mine.py").write_text(SOURCE)
    return path


@pytest.fixture
def load(folder):
    """`load(name, ...)`: the function of that name in its processes, killed at the end."""
    with in_workers(folder, timeout_s=20.0) as load_function:
        yield load_function


def rewards_of(function, completions, columns=()):
    rows = [Row("p", dict(columns), f"f.jsonl:{i}") for i in range(1, 1 + len(completions))]
    return rewards_of_call(function, rows, completions)


def assert_gone(pids):
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, f"still alive: {[pid for pid in pids if is_alive(pid)]}"
        time.sleep(0.02)


# Row 17: columns


@pytest.mark.parametrize("part", ["data", "eval_data"])
def test_row_17_a_field_that_the_reward_needs_is_missed_before_anything_starts(tmp_path, part):
    """File, line, field, function and the fields that are there; in every row of both files."""
    (tmp_path / "needs.py").write_text("def right(completions, answer, level=None, **kw):\n    return []\n")
    good, bad = str(tmp_path / "good.jsonl"), str(tmp_path / "bad.jsonl")
    row = '{"prompt": "a", "answer": 1}\n'
    Path(good).write_text(row)
    Path(bad).write_text(row + '{"prompt": "b", "solution": 1}')
    reward = (f"{tmp_path}/needs.py:right",)
    files = {"data": good, part: bad if part == "data" else (bad,)}
    said = r"bad\.jsonl:2: no field 'answer', .* reward right .*only \['solution'\]"
    with pytest.raises(InputError, match=said):
        load_task(RunConfig(**files, reward=reward))
    assert list(load_task(RunConfig(data=good, reward=reward)).rewards) == ["right"]


# Rows 23 and 25: it raises, hangs or dies


@pytest.mark.parametrize("name", ["acts", "acts_async"])
@pytest.mark.parametrize("action", RAISED, ids=lambda action: f"row-23-{action}")
def test_what_a_function_raises_is_told_with_the_row_and_its_process_lives_on(load, name, action):
    """With the user's lines of the traceback and none of ours; also what would end the process. Pitfall 21."""
    function = load(name)
    with pytest.raises(
        RewardError, match=rf"^reward {name} for the row at f\.jsonl:1: {RAISED[action]}"
    ) as error:
        rewards_of(function, [action])
    assert error.value.exit_code == 4
    assert "minirl/" not in str(error.value)
    assert len(str(error.value)) < 5000
    assert rewards_of(function, ["fine"]) == [1.0]


@pytest.mark.parametrize("name", ["acts", "acts_async"])
@pytest.mark.parametrize("action", LOST, ids=lambda action: f"row-25-{action}")
def test_a_process_that_dies_hangs_or_lies_is_killed_and_its_row_is_named(load, name, action):
    """Fault 26 for output. The calls that wait for it fail with the same error, and so do all later ones."""
    function = load(name, timeout_s=1.0 if "killed" in LOST[action] else 20.0)
    rows = [Row("p", {}, f"f.jsonl:{i}") for i in range(2)]
    calls = [function.submit({"completions": [action]}, [row], ["a"]) for row in rows]
    errors = [call.exception() for call in calls]
    assert re.match(rf"reward {name} for the row at f\.jsonl:[01].*: {LOST[action]}", str(errors[0]))
    assert errors[1] is errors[0]
    assert_gone([function._processes[0]._process.pid])
    with pytest.raises(RewardError, match=re.escape(str(errors[0]))):
        rewards_of(function, ["fine"])


def test_row_25_the_late_one_of_several_async_calls_is_named(load):
    """Not one of those that are lost with the process."""
    function = load("one_is_late", timeout_s=0.5)
    assert rewards_of(function, ["early"]) == [1.0]
    rows = [Row("p", {}, f"f.jsonl:{i}") for i in range(9)]
    calls = [
        function.submit({"completions": ["late" if i == 4 else "early"]}, [rows[i]], ["a"]) for i in range(9)
    ]
    assert [call.exception() is None for call in calls] == [i != 4 for i in range(9)]
    assert "for the row at f.jsonl:4: took more than 0.5 s" in str(calls[4].exception())


def test_row_25_a_process_that_does_not_read_holds_no_call_up(load):
    """A request of more than a pipe holds is sent beside this thread, and has the same deadline."""
    function = load("good", timeout_s=0.5)
    os.kill(function._processes[0]._process.pid, signal.SIGSTOP)
    start = time.monotonic()
    call = function.submit({"completions": ["x" * 10_000_000]}, [Row("p", {}, "f:1")], ["x"])
    assert time.monotonic() - start < 0.4
    assert "took more than 0.5 s" in str(call.exception())


def test_row_25_a_process_that_was_killed_while_idle_is_an_error_of_the_next_call(load):
    function = load("good")
    assert rewards_of(function, ["a"]) == [1.0]
    os.kill(function._processes[0]._process.pid, signal.SIGKILL)
    with pytest.raises(RewardError, match=r"row at f\.jsonl:1: ended its process, signal 9 \(Killed\)"):
        rewards_of(function, ["a"])


# Row 24: the returned value


@pytest.fixture(scope="module")
def returning(tmp_path_factory):
    """The function that returns the value of its row's expression, in a process of its own and in this one."""
    folder = tmp_path_factory.mktemp("returning")
    (folder / "mine.py").write_text(
        "import decimal, numpy\n"
        "def f(completions, expression):\n"
        "    return eval(expression[0], globals(), {'completions': completions})\n"
    )
    with in_workers(folder) as load_function:
        yield load_function("f"), runpy.run_path(str(folder / "mine.py"))["f"]


@pytest.mark.parametrize(
    "expression",
    [
        "[True, 0]",
        "(1.0, numpy.float32(0))",
        "numpy.array([1, 0])",
        "[numpy.array(1.0), decimal.Decimal(0)]",
        "[numpy.bool_(True), numpy.int64(0)]",
    ],
)
def test_row_24_numbers_of_every_kind_are_accepted(returning, expression):
    """And arrive as floats."""
    for function in returning:
        rewards = rewards_of(function, ("a", "b"), {"expression": expression})
        assert (rewards, *map(type, rewards)) == ([1.0, 0.0], float, float)


NO_REWARDS = {
    "[1, float('nan')]": "f.jsonl:2.*'b': returned nan",
    "[float('-inf'), 1]": "f.jsonl:1.*'a': returned -inf",
    "[1, '1.0']": "f.jsonl:2.*'b': returned '1.0'",
    "[1, b'1']": "f.jsonl:2.*'b': returned b'1'",
    "[1, [1.0]]": r"f.jsonl:2.*'b': returned \[1.0\]",
    "[1, {}]": "f.jsonl:2.*'b': returned {}",
    "[1, 1j]": "f.jsonl:2.*'b': returned 1j",
    "[1, 10**9000]": "f.jsonl:2.*'b': returned a value of <class 'int'>",
    "[1, 1e30]": r"f.jsonl:2.*'b': returned 1e\+30; .* at most 1e\+12",
    "[1, decimal.Decimal('1e400')]": "f.jsonl:2.*; expected a finite",
    "numpy.ones((2, 1))": r"f.jsonl:1.*'a': returned array\(\[1.\]\)",
    "1.0": "f.jsonl:1: returned 1.0; expected a list",
    "None": "f.jsonl:1: returned None; expected a list",
    "numpy.array(1.0)": "returned .*; expected a list",
    "'12'": "returned '12'; expected a list",
    "dict.fromkeys(range(len(completions)))": "returned .*; expected a list",
    "(1.0 for _ in completions)": "returned .*; expected a list",
    "[1.0] * 3": "f.jsonl:1: returned 3 values for 2",
}


@pytest.mark.parametrize(("expression", "said"), NO_REWARDS.items())
def test_row_24_everything_else_is_named_with_its_value(returning, expression, said):
    """Row, completion and value, before any of it reaches a gradient."""
    for function in returning:
        with pytest.raises(RewardError, match=f"reward f .*{said}"):
            rewards_of(function, ("a", "b"), {"expression": expression})


# Row 26: side effects


@pytest.mark.parametrize("name", ["acts", "acts_async"])
def test_row_26_what_user_code_prints_is_shown_once_and_no_more_than_its_beginning(load, name, capfd):
    """2,000 bytes, control characters spelt out, nothing of programs and descriptors; rank 0 alone shows them."""
    function = load(name)
    for _ in range(2):
        assert rewards_of(function, ["prints"]) == [1.0]
    out, err = capfd.readouterr()
    assert out.startswith(f"note: reward {name} printed (said once):\nhello \\x1b[31mxxx")
    assert 2000 < len(out) < 2100
    assert err == ""


def test_row_26_changed_arguments_do_not_come_back(load):
    """The row's own lists are unchanged."""
    answer, completions = [1, 2], ["fine", "fine"]
    assert rewards_of(load("mutates"), completions, {"answer": answer}) == [1.0, 1.0]
    assert (answer, completions) == ([1, 2], ["fine", "fine"])


# The file, and the processes


UNUSABLE = {
    "def reward(completions:\n": "SyntaxError",
    "import sys\nsys.exit(4)\n": "SystemExit: 4",
    "import no_such_module_of_mine\n": r'mine\.py", line 1',
    "import os\nos._exit(4)\n": "ended its process, exit code 4",
    "reward = 3\n": r"mine\.py has no function reward",
}


@pytest.mark.parametrize("source", UNUSABLE)
def test_row_23_a_file_that_cannot_be_used_is_an_input_error_at_once(tmp_path, source):
    """Before any model is loaded, with the flag; no thread is left. Faults 25 and 26."""
    (tmp_path / "mine.py").write_text(source)
    num_threads = threading.active_count()
    with pytest.raises(InputError, match=rf"--reward .*mine\.py:reward: (.|\n)*{UNUSABLE[source]}"):
        RewardWorkers(f"{tmp_path}/mine.py:reward", num_workers=2)
    deadline = time.monotonic() + 5
    while threading.active_count() > num_threads:  # those of other tests may still end
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("spec", ["", *UNNAMED])
def test_what_names_no_function_is_refused_with_the_flag(spec):
    with pytest.raises(InputError) as error:
        RewardWorkers(spec)
    assert str(error.value).startswith(f"--reward {spec}: {UNNAMED.get(spec, NO_SPEC)}")


def test_the_file_is_loaded_in_its_processes_alone(tmp_path):
    (tmp_path / "mine.py").write_text(
        f"import os\nopen(f'{tmp_path}/{{os.getpid()}}.loaded', 'w')\ndef f(completions):\n    return [1.0]\n"
    )
    function = RewardWorkers(f"{tmp_path}/mine.py:f", num_workers=2)
    pids = {process._process.pid for process in function._processes}
    assert {int(path.stem) for path in tmp_path.glob("*.loaded")} == pids
    function.stop()


def test_a_system_that_starts_no_more_processes_is_an_input_error(folder, monkeypatch):
    """With the system's reason; the processes that did start are gone."""
    started, start = [], subprocess.Popen

    def start_two(*args, **options):
        if len(started) == 2:
            raise OSError(24, "Too many open files")
        started.append(start(*args, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start_two)
    with pytest.raises(InputError, match=r"--reward .*mine\.py:good: .*Too many open files"):
        RewardWorkers(f"{folder}/mine.py:good", num_workers=3)
    assert_gone([process.pid for process in started])


def test_texts_arrive_as_they_are(load):
    """Also lone surrogates, NUL and what JSON escapes."""
    texts = ["\ud800", "\x00", "\n", "\u2028", "\U0001f600", '"', "\u202e"]
    assert rewards_of(load("code_points"), texts) == [float(ord(text)) for text in texts]


@pytest.mark.parametrize("name", ["acts", "acts_async"])
def test_no_process_and_no_thread_is_left_after_stop(tmp_path, name):
    """Neither a worker nor what its code forked or started, also while a call hangs."""
    (tmp_path / "mine.py").write_text(SOURCE)
    num_threads = threading.active_count()
    function = RewardWorkers(f"{tmp_path}/mine.py:{name}", num_workers=2)
    assert rewards_of(function, ["starts"]) == [1.0]
    pids = [*map(int, (tmp_path / "mine.py.pids").read_text().split())]
    pids += [process._process.pid for process in function._processes]
    assert all(map(is_alive, pids))
    call = function.submit({"completions": ["hangs"]}, [Row("p", {}, "f:1")], ["a"])
    time.sleep(0.2)
    assert not call.done()
    function.stop()
    assert_gone(pids)
    deadline = time.monotonic() + 5
    while threading.active_count() > num_threads:  # those of other tests may still end
        assert time.monotonic() < deadline
        time.sleep(0.05)


def hang_in_workers(pipe, folder):
    """Start processes in both workers, send the workers' ids, and wait for one that holds the interpreter's lock."""
    functions = [RewardWorkers(f"{folder}/mine.py:{name}") for name in ("acts", "acts_async", "acts")]
    for function in functions[:2]:
        assert rewards_of(function, ["starts"]) == [1.0]
    pipe.send([function._processes[0]._process.pid for function in functions])
    rewards_of(functions[2], ["hangs_in_c"])


@pytest.mark.skipif(not Path("/proc").exists(), reason="processes are looked up in /proc")
def test_no_process_is_left_after_the_trainer_was_killed(tmp_path):
    """SIGKILL while workers wait and while one hangs in C; processes of user code go too."""
    (tmp_path / "mine.py").write_text(SOURCE)
    ours, theirs = make_pipe()
    trainer = fork(hang_in_workers, theirs, tmp_path)
    pids = ours.recv()
    pids += [*map(int, (tmp_path / "mine.py.pids").read_text().split())]
    time.sleep(0.2)
    assert len(pids) == 3 + 2 * 3
    assert all(map(is_alive, pids))
    trainer.kill()
    trainer.join()
    assert_gone(pids)


def test_row_46_hostile_completions_are_escaped_and_cut_in_errors():
    """No control character reaches a terminal, and thousands of characters do not either."""

    def nothing(completions):
        return [float("nan")] * len(completions)

    with pytest.raises(RewardError) as caught:
        rewards_of(nothing, ["\x1b[2J\u202e<script>" + "x" * 10_000])
    assert str(caught.value).isprintable()
    assert "<script>" in str(caught.value)
    assert len(str(caught.value)) < 400
