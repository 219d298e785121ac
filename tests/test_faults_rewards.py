"""Faults of reward functions: they cannot hang, lie about, or corrupt a run. Rows as in the fault table."""

import math
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from minirl.data.task import Row
from minirl.errors import InputError, RewardError
from minirl.rewards.functions import compute_rewards
from minirl.rewards.reward_workers import load_reward
from minirl.run.config import RunConfig
from minirl.run.load_task import load_task
from support.collecting import in_workers
from support.processes import is_alive

SOURCE = """
import os, random, re, subprocess, sys, time

def good(completions):
    return [float(len(c)) for c in completions]

def helper(text):
    if text == "bad":
        raise KeyError("no \\x1b[31mred\\x1b[0m")
    return 1.0

def raises(completions):
    return [helper(c) for c in completions]

def only_together(completions):
    assert len(completions) == 1, "several"
    return [1.0]

def text_for_bad(completions):
    return ["no" if c == "bad" else 1 for c in completions]

def drops_bad(completions):
    return [1.0 for c in completions if c != "bad"]

def hangs(completions):
    while "bad" in completions:
        time.sleep(0.01)
    return [1.0] * len(completions)

def dies(completions):
    return [os._exit(3) if c == "bad" else 1.0 for c in completions]

def replaces_modules(completions):
    import json, math
    json.dumps = json.loads = math.isfinite = lambda *args, **kwargs: True
    return [float("nan") if c == "bad" else 1.0 for c in completions]

def prints(completions):
    print("hello \\x1b[31m" + "x" * 5_000_000)
    print("to stderr", file=sys.stderr)
    os.system("echo of a program")
    os.write(1, b"to the descriptor")
    sys.stdout.buffer.write(b"bytes")
    return [1.0] * len(completions)

def mutates(prompts, completions, answer):
    count = len(completions)
    answer[0].append(3)
    for values in (prompts, completions, answer):
        values.clear()
    return [1.0] * count

def code_points(completions):
    return [float(ord(c)) for c in completions]

def by_position(completions, /):
    return [1.0]

"""
BATCH = ("fine", "bad", "fine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards")
    (path / "mine.py").write_text(SOURCE)
    return path


@pytest.fixture
def load(folder):
    """`load(name, ...)`: the function of that name in its worker, killed at the end."""
    with in_workers(folder, load_reward, timeout_s=20.0) as load_function:
        yield load_function


def rewards_of(function, completions=BATCH, columns=()):
    rows = [Row("p", dict(columns), f"f.jsonl:{i}") for i in range(1, 1 + len(completions))]
    return compute_rewards(function, rows, completions=completions, completion_ids=[[7]] * len(completions))


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


# Row 23: raises


def test_row_23_an_error_of_the_whole_call_only_is_said_to_be_that(load):
    """No row is blamed that is judged well alone."""
    said = r"3 completions, none of which fails alone: raised\n(.|\n)*several"
    with pytest.raises(RewardError, match=said) as caught:
        rewards_of(load("only_together"))
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("name", ["raises", "text_for_bad", "drops_bad", "dies", "hangs"])
@pytest.mark.parametrize(("num_bad", "count"), [(2, 39), (2, 40)])
def test_row_23_more_failures_than_a_twentieth_stop_all_the_same(load, name, num_bad, count):
    """2 of 40 are 5 %; 2 of 39 are more. Also where the call ends its process, or hangs: fault 25. Pitfall 21."""
    function = load(name, on_error="zero", timeout_s=0.5 if name == "hangs" else 20.0)
    completions = ["fine"] * (count - num_bad) + ["bad"] * num_bad
    if num_bad <= 0.05 * count:
        rewards = rewards_of(function, completions)
        assert [math.isnan(reward) for reward in rewards] == [text == "bad" for text in completions]
        return
    row = count - num_bad + 1
    said = rf"^{num_bad} of .* forgives {num_bad - 1}; reward {name} for the row at f\.jsonl:{row}"
    with pytest.raises(RewardError, match=said):
        rewards_of(function, completions)


# Row 24: the returned value


@pytest.fixture(scope="module")
def returning(tmp_path_factory):
    """The function that returns the value of its row's expression, in a worker and in this process."""
    folder = tmp_path_factory.mktemp("returning")
    (folder / "mine.py").write_text(
        "import decimal, numpy\n"
        "def f(completions, expression):\n"
        "    return eval(expression[0], globals(), {'completions': completions})\n"
    )
    with in_workers(folder, load_reward) as load_function:
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
    "[1, '']": "f.jsonl:2.*'b': returned ''",
    "[1, b'1']": "f.jsonl:2.*'b': returned b'1'",
    "[1, [1.0]]": r"f.jsonl:2.*'b': returned \[1.0\]",
    "[1, {}]": "f.jsonl:2.*'b': returned {}",
    "[1, 1j]": "f.jsonl:2.*'b': returned 1j",
    "[1, bytearray(b'1')]": "f.jsonl:2.*'b': returned bytearray",
    "[1, 10**9000]": "f.jsonl:2.*'b': returned a value of <class 'int'>",
    "[1, 1e30]": r"f.jsonl:2.*'b': returned 1e\+30; .* at most 1e\+12",
    "[1, -1e300]": r"f.jsonl:2.*'b': returned -1e\+300; .* at most",
    "[1, 10**30]": "f.jsonl:2.*'b': returned 1000.*; .* at most",
    "[1, numpy.float32(1e30)]": "f.jsonl:2.*'b': returned .* at most",
    "[1, decimal.Decimal('1e30')]": "f.jsonl:2.*; .* at most",
    "[1, decimal.Decimal('1e400')]": "f.jsonl:2.*; expected a finite",
    "numpy.ones((2, 1))": r"f.jsonl:1.*'a': returned array\(\[1.\]\)",
    "[1, numpy.nan]": "f.jsonl:2.*'b': returned nan",
    "[1, 10**400]": "f.jsonl:2.*'b': returned 1000",
    "1.0": "returned 1.0; expected a list",
    "None": "returned None; expected a list",
    "numpy.array(1.0)": "returned .*; expected a list",
    "'12'[:len(completions)]": "returned '12?'; expected a list",
    "b'12'[:len(completions)]": "returned b'12?'; expected a list",
    "dict.fromkeys(range(len(completions)))": "returned .*; expected a list",
    "set(range(len(completions)))": "returned .*; expected a list",
    "(1.0 for _ in completions)": "returned .*; expected a list",
    "[1.0] * 3": "returned 3 values for",
    "[1.0] * (len(completions) - 1)": r"returned \d values for",
}


@pytest.mark.parametrize(("expression", "said"), NO_REWARDS.items())
def test_row_24_everything_else_is_named_with_its_value(returning, expression, said):
    """Row, completion and value, before any of it reaches a gradient."""
    for function in returning:
        with pytest.raises(RewardError, match=f"reward f .*{said}"):
            rewards_of(function, ("a", "b"), {"expression": expression})


# Row 25: hangs and deaths


def test_row_25_a_worker_that_does_not_read_cannot_block_the_trainer(load, monkeypatch):
    """A request of more than a pipe holds has the same deadline."""
    function = load("good")
    os.kill(function.pool.workers[0].pid, signal.SIGSTOP)
    monkeypatch.setattr(function.pool.workers[0], "_timeout_s", 0.5)
    with pytest.raises(RewardError, match=r"took more than 0\.5 s"):
        function(completions=["x" * 1_000_000])
    monkeypatch.undo()
    assert function(completions=["x" * 1_000_000] * 5) == [1e6] * 5


@pytest.mark.parametrize("size", [1, 1_000_000])
def test_row_25_a_call_whose_worker_is_killed_from_outside_is_made_again(load, size):
    """The worker may or may not have read the whole request; a death that the call causes recurs and is its error."""
    function = load("good")
    pid = function.pool.workers[0].pid
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    assert function(completions=["x" * size]) == [size]
    assert not is_alive(pid)


# Row 26: side effects


def test_row_26_replaced_modules_do_not_reach_the_trainer(load):
    """The worker reads and writes with the functions that it had at first; the trainer looks at each number itself."""
    with pytest.raises(RewardError, match=r"f\.jsonl:2, completion 'bad': returned nan; expected a finite"):
        rewards_of(load("replaces_modules"))
    assert rewards_of(load("replaces_modules"), ("fine",)) == [1.0]


def test_row_26_changed_arguments_do_not_come_back(load):
    """The row's own lists are unchanged."""
    answer, completions = [1, 2], ["fine", "fine"]
    assert rewards_of(load("mutates"), completions, {"answer": answer}) == [1.0, 1.0]
    assert (answer, completions) == ([1, 2], ["fine", "fine"])


# The file, and the process


def test_row_23_a_function_whose_arguments_cannot_come_by_name_is_refused_at_once(folder):
    with pytest.raises(InputError, match=r"--reward .*mine\.py:by_position: .*'completions' by position"):
        load_reward(f"{folder}/mine.py:by_position")


def test_texts_arrive_as_they_are(load):
    """Also lone surrogates, NUL and what JSON escapes."""
    texts = ["\ud800", "\x00", "\n", "\u2028", "\U0001f600", '"', "\u202e"]
    assert rewards_of(load("code_points"), texts) == [float(ord(text)) for text in texts]


@pytest.mark.slow
def test_row_41_notes_on_rewards_survive_a_closed_output(folder):
    """The reader of stdout has gone: a run that forgives a failure and shows user code's output goes on."""
    program = (
        "from minirl.rewards.reward_workers import load_reward\n"
        f"raises = load_reward('{folder}/mine.py:raises', on_error='zero')\n"
        f"prints = load_reward('{folder}/mine.py:prints')\n"
        "for _ in range(2):\n"
        "    assert raises(completions=['fine', 'bad'])[0] == 1.0\n"
        "    assert prints(completions=['fine']) == [1.0]\n"
        "print('more')\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_row_23_every_rank_prints_its_failures_and_rank_0_what_user_code_prints(load, monkeypatch, capfd):
    """No other rank knows of the failure; user code's output is nearly the same on all."""
    monkeypatch.setattr("minirl.workers.pool.rank", lambda: 1)
    rewards_of(load("raises", on_error="zero"))
    rewards_of(load("prints"))
    printed = capfd.readouterr().out
    assert printed.startswith("note: reward raises for the row at f.jsonl:2")
    assert "reward prints" not in printed


def test_a_call_costs_milliseconds(load):
    """128 completions, the fastest of ten calls, so that no other load counts; 0.5 ms where it was measured alone."""
    function, taken = load("good"), []
    for _ in range(10):
        start = time.perf_counter()
        function(completions=["y" * 1000] * 128)
        taken.append(time.perf_counter() - start)
    assert min(taken) < 0.01


def test_row_46_hostile_completions_are_escaped_and_cut_in_errors():
    """No control character reaches a terminal, and thousands of characters do not either."""

    def nothing(completions):
        return [float("nan")] * len(completions)

    with pytest.raises(RewardError) as caught:
        rewards_of(nothing, ["\x1b[2J\u202e<script>" + "x" * 10_000])
    assert str(caught.value).isprintable()
    assert "<script>" in str(caught.value)
    assert len(str(caught.value)) < 400
