"""Faults of reward functions: they cannot hang, lie about, or corrupt a run. Rows as in the fault table."""

import ast
import importlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from minirl.data.task import Row
from minirl.errors import InputError, RewardError
from minirl.ranks import watchdog
from minirl.rewards.functions import compute_rewards
from minirl.rewards.reward_process import load_reward
from minirl.rewards.reward_queue import reward_rollouts
from minirl.run.load_task import load_task
from support.processes import is_alive
from support.rollouts import make_prompts, make_rollout

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

def hangs_in_c(completions):
    return [float(bool(re.match("(a+)+$", "a" * 50 + "b"))) if c == "bad" else 1.0 for c in completions]

def exits(completions):
    return [sys.exit("done") if c == "bad" else 1.0 for c in completions]

def dies(completions):
    return [os._exit(3) if c == "bad" else 1.0 for c in completions]

def is_killed(completions):
    return [os.kill(os.getpid(), 9) if c == "bad" else 1.0 for c in completions]

def closes_everything(completions):
    if "bad" in completions:
        os.closerange(0, 5000)
        time.sleep(100)
    return [1.0] * len(completions)

def closes_much(completions):
    os.closerange(0, 500)
    return [1.0] * len(completions)

def write_to_all(text):
    for fd in range(5000):
        try:
            os.write(fd, text)
        except OSError:
            pass

def writes_to_all(completions):
    write_to_all(b"hello")
    return [1.0] * len(completions)

def answers_itself(completions):
    write_to_all(b'{"rewards": [7.0], "error": null, "printed": ""}\\n')
    return [1.0] * len(completions)

def floods(completions):
    for fd in range(2000, 5000):
        try:
            while True:
                os.write(fd, b"x" * 1_000_000)
        except OSError:
            pass

def replaces_modules(completions):
    import json, math
    json.dumps = json.loads = math.isfinite = lambda *args, **kwargs: True
    return [float("nan") if c == "bad" else 1.0 for c in completions]

def dies_of_a_signal_without_a_name(completions):
    return [os.kill(os.getpid(), 40) if c == "bad" else 1.0 for c in completions]

def recurses(completions):
    return [recurses(completions) if c == "bad" else 1.0 for c in completions]

def interrupts(completions):
    if "bad" in completions:
        raise KeyboardInterrupt
    return [1.0] * len(completions)

def prints(completions):
    print("hello \\x1b[31m" + "x" * 5_000_000)
    print("to stderr", file=sys.stderr)
    os.system("echo of a program")
    os.write(1, b"to the descriptor")
    sys.stdout.buffer.write(b"bytes")
    return [1.0] * len(completions)

def forks(completions):
    os.fork()
    return [1.0] * len(completions)

def forks_and_raises(completions):
    if os.fork() == 0:
        raise ValueError("in the child")
    return [1.0] * len(completions)

def moves(completions):
    here = os.getcwd()
    os.chdir("/")
    return [float(len(here))] * len(completions)

def seeds(completions):
    random.seed(0)
    os.environ["MINE"] = "1"
    return [1.0] * len(completions)

def mutates(prompts, completions, answer):
    count = len(completions)
    answer[0].append(3)
    for values in (prompts, completions, answer):
        values.clear()
    return [1.0] * count

def code_points(completions):
    return [float(ord(c)) for c in completions]

def modules(completions):
    print(sorted(name for name in sys.modules if name.partition(".")[0] in ("torch", "minirl")))
    return [1.0] * len(completions)

def pids(completions):
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    return [float(os.getpid()), float(child)]

def starts(completions):
    return [float(os.getpid()), float(subprocess.Popen(["sleep", "1000"]).pid)]

def by_position(completions, /):
    return [1.0]

not_callable = 3
"""
DRAWS = """
import numpy, random

def draws(completions):
    return [random.random() + numpy.random.rand() for _ in completions]
"""
BATCH = ("fine", "bad", "fine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards")
    (path / "mine.py").write_text(SOURCE)
    return path


@pytest.fixture
def load(folder):
    """`load(name, ...)`: the function of that name in its worker, closed at the end."""
    loaded = []

    def load_one(name, **options):
        loaded.append(load_reward(f"{folder}/mine.py:{name}", **{"timeout_s": 20.0, **options}))
        return loaded[-1]

    yield load_one
    for function in loaded:
        function.close()


def rewards_of(function, completions=BATCH, columns=()):
    rows = [Row("p", dict(columns), f"f.jsonl:{i}") for i in range(1, 1 + len(completions))]
    return compute_rewards(function, rows, completions=completions, completion_ids=[[7]] * len(completions))


def assert_gone(*pids):
    deadline = time.monotonic() + 5
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, f"still alive: {[pid for pid in pids if is_alive(pid)]}"
        time.sleep(0.02)


# Row 17: columns


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("part", ["training", "held_out"])
def test_row_17_a_field_that_the_reward_needs_is_missed_before_anything_starts(tmp_path, part):
    """File, line, field, function and the fields that are there; in every row of both files."""
    (tmp_path / "needs.py").write_text("def right(completions, answer, level=None, **kw):\n    return []\n")
    rows = {"prompt": "a", "answer": 1}, {"prompt": "b", "solution": 1}
    good, bad = write_rows(tmp_path / "good.jsonl", rows[0]), write_rows(tmp_path / "bad.jsonl", *rows)
    files = dict(data=bad, eval_data=[good]) if part == "training" else dict(data=good, eval_data=[bad])
    with pytest.raises(
        InputError, match=r"bad\.jsonl:2: no field 'answer', .* reward right .*only \['solution'\]"
    ):
        load_task("auto", **files, reward=[f"{tmp_path}/needs.py:right"])
    task = load_task("auto", data=good, eval_data=(), reward=[f"{tmp_path}/needs.py:right"])
    assert list(task.rewards) == ["right"]


# Row 23: raises


@pytest.mark.parametrize("completions", [BATCH, ("bad",)], ids=["row-23-of-several", "row-23-alone"])
def test_row_23_an_error_names_function_row_completion_and_the_users_lines(load, completions):
    """The traceback has the user's frames and none of ours; control characters are spelt out. Pitfall 21."""
    with pytest.raises(RewardError) as caught:
        rewards_of(load("raises"), completions)
    said = str(caught.value)
    assert (
        f"reward raises for the row at f.jsonl:{completions.index('bad') + 1}, completion 'bad': raised"
        in said
    )
    assert "in helper\n" in said
    assert "in raises\n" in said
    assert "KeyError" in said
    assert "minirl/" not in said
    assert "\x1b" not in said
    assert caught.value.exit_code == 4


def test_row_23_an_error_of_the_whole_call_only_is_said_to_be_that(load):
    """No row is blamed that is judged well alone."""
    with pytest.raises(
        RewardError, match=r"3 completions, none of which fails alone: raised\n(.|\n)*several"
    ):
        rewards_of(load("only_together"))


def test_row_23_few_failures_count_as_zero_and_are_counted_if_asked(load, capfd):
    """One always is forgiven; the others keep their rewards; it is said once. Pitfall 21."""
    function = load("raises", on_error="zero")
    for _ in range(2):
        first, failed, last = rewards_of(function)
        assert (first, last) == (1.0, 1.0)
        assert math.isnan(failed)
    printed = capfd.readouterr().out
    assert printed.count("note: reward raises for the row at f.jsonl:2") == 1


@pytest.mark.parametrize("name", ["raises", "text_for_bad", "drops_bad"])
@pytest.mark.parametrize(("num_bad", "count"), [(2, 39), (2, 40), (3, 59)])
def test_row_23_more_failures_than_a_twentieth_stop_all_the_same(load, name, num_bad, count):
    """2 of 40 are 5 %; 2 of 39 and 3 of 59 are more. Pitfall 21."""
    function = load(name, on_error="zero")
    completions = ["fine"] * (count - num_bad) + ["bad"] * num_bad
    if num_bad <= 0.05 * count:
        assert [math.isnan(reward) for reward in rewards_of(function, completions)] == [
            c == "bad" for c in completions
        ]
    else:
        said = rf"^{num_bad} of .* forgives {num_bad - 1}; reward {name} for the row at f\.jsonl:{count - num_bad + 1}"
        with pytest.raises(RewardError, match=said):
            rewards_of(function, completions)


def make_rollouts(tmp_path, texts):
    """Prompts of one row, and a rollout of each text."""
    prompts = make_prompts(tmp_path, [Row("ab", {}, "f:1")])
    return prompts, [make_rollout(prompts, 5, sample, text) for sample, text in enumerate(texts)]


def test_row_23_a_forgiven_completion_has_reward_zero_and_is_marked(load, tmp_path):
    """What is trained on is 0, not nan; what another function says of it stays. Pitfall 59."""
    prompts, rollouts = make_rollouts(tmp_path, ["fine<eos>", "bad<eos>"])
    judged = reward_rollouts(
        {"raises": load("raises", on_error="zero"), "good": load("good")}, prompts, rollouts
    )
    assert judged.rewards.tolist() == [[1.0, 4.0], [0.0, 3.0]]
    assert judged.failed.tolist() == [False, True]
    both = judged + judged.select([1])
    assert both.failed.tolist() == [False, True, True]


# Row 24: what is returned


@pytest.fixture
def returning(tmp_path):
    """A worker's function that returns the value of an expression."""
    loaded = []

    def make(expression):
        imports = "".join(f"import {name}\n" for name in ("numpy", "decimal") if name in expression)
        (tmp_path / "returns.py").write_text(f"{imports}def f(completions):\n    return {expression}\n")
        loaded.append(load_reward(f"{tmp_path}/returns.py:f"))
        return loaded[-1]

    yield make
    for function in loaded:
        function.close()


@pytest.mark.parametrize(
    "expression",
    [
        pytest.param("[True, 0]", id="row-24-bool-int"),
        pytest.param("(1.0, numpy.float32(0))", id="row-24-tuple-numpy"),
        pytest.param("numpy.array([1, 0])", id="row-24-array"),
        pytest.param("[numpy.array(1.0), decimal.Decimal(0)]", id="row-24-0-d"),
    ],
)
def test_row_24_numbers_of_every_kind_are_accepted(returning, expression):
    """And arrive as floats."""
    assert rewards_of(returning(expression), ("a", "b")) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        pytest.param("[1, float('nan')]", "f.jsonl:2.*'b': returned nan", id="row-24-nan"),
        pytest.param("[float('-inf'), 1]", "f.jsonl:1.*'a': returned -inf", id="row-24-inf"),
        pytest.param("[1, '1.0']", "f.jsonl:2.*'b': returned '1.0'", id="row-24-text"),
        pytest.param("[1, b'1']", "f.jsonl:2.*'b': returned b'1'", id="row-24-bytes"),
        pytest.param("[1, [1.0]]", r"f.jsonl:2.*'b': returned \[1.0\]", id="row-24-list"),
        pytest.param("[1, bytearray(b'1')]", r"f.jsonl:2.*'b': returned bytearray", id="row-24-buffer"),
        pytest.param(
            "[1, 10**9000]", "f.jsonl:2.*'b': returned a value of <class 'int'>", id="row-24-endless"
        ),
        pytest.param("[1, 1e30]", r"f.jsonl:2.*'b': returned 1e\+30; .* at most 1e\+12", id="row-24-1e30"),
        pytest.param("[1, -1e300]", r"f.jsonl:2.*'b': returned -1e\+300; .* at most", id="row-24-1e300"),
        pytest.param("[1, 10**30]", "f.jsonl:2.*'b': returned 1000.*; .* at most", id="row-24-great-int"),
        pytest.param(
            "[1, numpy.float32(1e30)]", "f.jsonl:2.*'b': returned .* at most", id="row-24-great-numpy"
        ),
        pytest.param("[1, decimal.Decimal('1e30')]", "f.jsonl:2.*; .* at most", id="row-24-great-decimal"),
        pytest.param("[1, decimal.Decimal('1e400')]", "f.jsonl:2.*; expected a finite", id="row-24-decimal"),
        pytest.param("numpy.ones((2, 1))", r"f.jsonl:1.*'a': returned array\(\[1.\]\)", id="row-24-2-d"),
        pytest.param("[1, numpy.nan]", "f.jsonl:2.*'b': returned nan", id="row-24-numpy-nan"),
        pytest.param("[1, 10**400]", "f.jsonl:2.*'b': returned 1000", id="row-24-huge"),
        pytest.param("1.0", "f.jsonl:1.*returned 1.0; expected a list", id="row-24-scalar"),
        pytest.param("None", "f.jsonl:1.*returned None; expected a list", id="row-24-nothing"),
        pytest.param("numpy.array(1.0)", "f.jsonl:1.*; expected a list", id="row-24-0-d-whole"),
        pytest.param(
            "'12'[:len(completions)]", "f.jsonl:1.*returned '1'; expected a list", id="row-24-whole-text"
        ),
        pytest.param(
            "dict.fromkeys(range(len(completions)))", "f.jsonl:1.*; expected a list", id="row-24-dict"
        ),
        pytest.param("set(range(len(completions)))", "f.jsonl:1.*; expected a list", id="row-24-set"),
        pytest.param("(1.0 for _ in completions)", "f.jsonl:1.*; expected a list", id="row-24-generator"),
        pytest.param("[1.0] * 3", "f.jsonl:1.*returned 3 values for 1 comp", id="row-24-long"),
        pytest.param(
            "[1.0] * (len(completions) - 1)", "f.jsonl:1.*returned 0 values for 1 comp", id="row-24-short"
        ),
    ],
)
def test_row_24_everything_else_is_named_with_its_value(returning, expression, said):
    """Row, completion and value, before any of it reaches a gradient."""
    with pytest.raises(RewardError, match=f"reward f for the row at {said}"):
        rewards_of(returning(expression), ("a", "b"))


@pytest.mark.parametrize(
    "value", [{0: 1.0, 1: 1.0}, {1.0, 2.0}, "11", b"11"], ids=["dict", "set", "text", "bytes"]
)
def test_row_24_functions_of_this_process_are_checked_alike(value):
    """A dict's keys are not rewards."""
    with pytest.raises(RewardError, match="expected a list of 2 numbers"):
        rewards_of(lambda completions: value, ("a", "b"))


# Row 25: hangs and deaths


@pytest.mark.parametrize("name", ["hangs", "hangs_in_c"])
def test_row_25_a_call_that_hangs_is_killed_and_its_row_named(load, name):
    """Also where Python's own signal handlers would not run; the next call has a new worker. Pitfall 21."""
    function = load(name, timeout_s=0.5)
    before, start = function.pool.workers[0].pid, time.monotonic()
    said = r"f\.jsonl:2, completion 'bad': took more than 0\.5 s and was killed; see --reward-timeout"
    with pytest.raises(RewardError, match=said):
        rewards_of(function)
    assert time.monotonic() - start < 5
    assert_gone(before, function.pool.workers[0].pid)
    assert rewards_of(function, ("fine",)) == [1.0]


def test_row_25_a_hang_is_forgiven_like_an_error(load):
    """The others are judged by new workers."""
    first, failed, last = rewards_of(load("hangs", timeout_s=0.5, on_error="zero"))
    assert (first, last) == (1.0, 1.0)
    assert math.isnan(failed)


def test_row_25_waiting_for_a_call_within_its_deadline_is_no_hang_of_the_rank(load):
    """--reward-timeout may be longer than --hang-timeout; a search among many completions is, too."""
    function, before = load("hangs", timeout_s=1.6), watchdog.this_process.num_heartbeats
    with pytest.raises(RewardError, match="killed"):
        rewards_of(function, ("bad",))
    assert watchdog.this_process.num_heartbeats >= before + 3


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param("dies", "ended its process, exit code 3", id="row-25-exit"),
        pytest.param("is_killed", "ended its process, SIGKILL", id="row-25-kill"),
        pytest.param("dies_of_a_signal_without_a_name", "ended its process, signal 40", id="row-25-signal"),
        pytest.param("closes_everything", "closed the pipes of its process", id="row-25-close"),
    ],
)
def test_row_25_a_dead_worker_is_said_to_be_dead_and_replaced(load, name, said):
    """Within a second or two, long before the deadline."""
    function = load(name)
    with pytest.raises(RewardError, match=rf"f\.jsonl:2, completion 'bad': {said}"):
        rewards_of(function)
    assert rewards_of(function, ("fine",)) == [1.0]


def test_row_25_a_worker_that_does_not_read_cannot_block_the_trainer(load):
    """A request of more than a pipe holds has the same deadline."""
    function = load("good", timeout_s=1.0)
    os.kill(function.pool.workers[0].pid, signal.SIGSTOP)
    with pytest.raises(RewardError, match="took more than 1 s"):
        function(completions=["x" * 1_000_000])
    assert function(completions=["x" * 1_000_000] * 5) == [1e6] * 5


@pytest.mark.parametrize("size", [1, 1_000_000])
def test_row_25_a_call_whose_worker_is_killed_from_outside_is_made_again(load, size):
    """Whether or not the worker got the whole request; a death that the call causes comes again and is its error."""
    function = load("good")
    pid = function.pool.workers[0].pid
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    assert function(completions=["x" * size]) == [size]
    assert not is_alive(pid)


def test_row_25_an_interrupted_call_leaves_no_answer_for_the_next(load):
    """Ctrl-C in the middle of a call, and another call after it: each answer belongs to its question."""

    def interrupt(*_):
        raise TimeoutError

    function = load("hangs")
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(TimeoutError):
            rewards_of(function)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert rewards_of(function, ("fine", "fine")) == [1.0, 1.0]


# Row 26: side effects


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param("exits", "SystemExit: done", id="row-26-sys-exit"),
        pytest.param("interrupts", "KeyboardInterrupt", id="row-26-interrupt"),
        pytest.param("recurses", "RecursionError", id="row-26-recursion"),
    ],
)
def test_row_26_what_would_end_the_process_is_an_error_of_the_row(load, name, said):
    """And the worker lives on."""
    function = load(name)
    pid = function.pool.workers[0].pid
    with pytest.raises(RewardError, match=rf"f\.jsonl:2, completion 'bad': raised\n(.|\n)*{said}") as caught:
        rewards_of(function)
    assert len(str(caught.value)) < 5000
    assert rewards_of(function, ("fine",)) == [1.0]
    assert function.pool.workers[0].pid == pid


def test_row_26_prints_are_kept_off_the_run_and_shown_once_in_part(load, capfd):
    """2,000 characters, control characters spelt out, nothing of programs and descriptors."""
    function = load("prints")
    for _ in range(2):
        assert rewards_of(function) == [1.0] * 3
    out, err = capfd.readouterr()
    assert out.startswith("note: reward prints printed (said once):\nhello \\x1b[31mxxx")
    assert 2000 < len(out) < 2100
    assert err == ""


@pytest.mark.parametrize("name", ["forks", "forks_and_raises"])
def test_row_26_a_fork_that_returns_answers_nothing(load, name):
    """One answer for each call, from the worker."""
    function = load(name)
    for count in (1, 2, 3):
        assert rewards_of(function, ["fine"] * count) == [1.0] * count


@pytest.mark.parametrize("name", ["writes_to_all", "answers_itself", "floods"])
def test_row_26_what_user_code_writes_is_never_taken_for_an_answer(load, name):
    """It is said, with the function, and the next call has a new worker: no wrong number, no hang, no traceback."""
    with pytest.raises(RewardError, match=f"reward {name} .*: its process sent something that is no answer"):
        rewards_of(load(name), ("fine",))
    with pytest.raises(RewardError, match=f"reward {name} .*: its process sent something that is no answer"):
        rewards_of(load(name), ("fine", "fine"))


def test_row_26_low_descriptors_may_all_be_closed(load):
    """As daemons do it: the pipes of the worker are not among them."""
    function = load("closes_much")
    assert rewards_of(function) == rewards_of(function) == [1.0] * 3


def test_row_26_replaced_modules_do_not_reach_the_trainer(load):
    """The worker reads and writes with the functions that it had at first; the trainer looks at each number itself."""
    with pytest.raises(RewardError, match=r"f\.jsonl:2, completion 'bad': returned nan; expected a finite"):
        rewards_of(load("replaces_modules"))
    assert rewards_of(load("replaces_modules"), ("fine",)) == [1.0]


ANSWERS = {
    "number": "3",
    "other_id": '{**ANSWER, "id": "0"}',
    "other_conversation": '{**ANSWER, "number": 7}',
    "no_print": '{**ANSWER, "printed": None}',
    "no_rewards": '{**ANSWER, "reply": None}',
    "too_many": '{**ANSWER, "reply": [1.0, 1.0]}',
    "error_of_no_text": '{**ANSWER, "error": 3}',
    "no_seconds": "dict(list(ANSWER.items())[:-1])",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_row_26_an_answer_of_another_shape_is_an_error(monkeypatch, answer):
    """Whatever a worker sends, the trainer takes nothing but what the protocol says."""
    program = (
        "import json, sys\n"
        "ID = json.loads(sys.stdin.readline())['id']\n"
        "takes = dict(required=['completions'], optional=[], takes_all=False)\n"
        "print(json.dumps(dict(id=ID, is_async=False, max_conversations=None, description=takes, printed='')),"
        " flush=True)\n"
        "request = json.loads(sys.stdin.readline())\n"
        "ANSWER = dict(id=ID, number=request['number'], reply=[1.0], facts=None, is_last=True, printed='',"
        " seconds=0.1)\n"
        f"print(json.dumps({answer}), flush=True)\n"
        "sys.stdin.readline()\n"
    )
    monkeypatch.setattr("minirl.workers.pool.PROGRAM", program)
    function = load_reward("minirl.data.gsm8k:f")
    with pytest.raises(RewardError, match="its process sent something that is no answer"):
        rewards_of(function, ("fine",))
    function.close()


def test_row_26_working_directory_and_generators_are_the_trainers(load):
    """The directory is back for the next call; what the user seeds is not the trainer's generator."""
    function, before = load("moves"), random.getstate()
    assert rewards_of(function) == rewards_of(function) == [float(len(os.getcwd()))] * 3
    rewards_of(load("seeds"))
    assert random.getstate() == before
    assert "MINE" not in os.environ


def test_row_26_changed_arguments_do_not_come_back(load):
    """The row's own lists are what they were."""
    answer, completions = [1, 2], ["fine", "fine"]
    assert rewards_of(load("mutates"), completions, {"answer": answer}) == [1.0, 1.0]
    assert (answer, completions) == ([1, 2], ["fine", "fine"])


# Row 27: randomness


def test_row_27_a_random_reward_depends_on_the_rollout_not_on_what_ran_before(tmp_path):
    """The same again in a new worker, after other calls; another for another rollout."""
    (tmp_path / "random_reward.py").write_text(DRAWS)
    prompts, rollouts = make_rollouts(tmp_path, ["a<eos>", "a<eos>"])
    fresh, used = (load_reward(f"{tmp_path}/random_reward.py:draws") for _ in range(2))
    first = reward_rollouts({"draws": fresh}, prompts, rollouts).rewards
    other = reward_rollouts({"draws": used}, prompts, rollouts[1:]).rewards
    assert torch.equal(reward_rollouts({"draws": used}, prompts, rollouts).rewards, first)
    assert other.item() not in first.flatten().tolist()


# Row 29: nothing written


def test_row_29_empty_completions_are_judged_and_none_need_no_call(load, tmp_path):
    """All end at once: finite rewards; a rank without rollouts has none."""
    prompts, rollouts = make_rollouts(tmp_path, ["<eos>", "<eos>"])
    assert reward_rollouts({"good": load("good")}, prompts, rollouts).rewards.tolist() == [[0.0], [0.0]]
    nothing = reward_rollouts({"raises": load("raises")}, prompts, [])
    assert (nothing.rewards.shape, nothing.failed.shape) == ((0, 1), (0,))


# The file, and the process


@pytest.mark.parametrize(
    ("source", "said"),
    [
        pytest.param("def f(completions:\n", r"SyntaxError", id="row-23-syntax"),
        pytest.param("import sys\nsys.exit(4)\n", "SystemExit: 4", id="row-26-exit-at-import"),
        pytest.param("raise RuntimeError('mine')\n", r'mine\.py", line 1', id="row-23-raise-at-import"),
        pytest.param(
            "import os\nos._exit(4)\n", "ended its process, exit code 4", id="row-25-death-at-import"
        ),
        pytest.param("f = 3\n", r"mine\.py has no function f", id="row-23-no-function"),
        pytest.param(
            "def f(completions, /): pass\n", "takes 'completions' by position", id="row-23-position"
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_an_input_error_at_once(tmp_path, source, said):
    """Before any model is loaded, with the flag."""
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(InputError, match=rf"--reward .*mine\.py:f: (.|\n)*{said}"):
        load_reward(f"{tmp_path}/mine.py:f")


def test_texts_arrive_as_they_are(load):
    """Also lone surrogates, NUL and what JSON escapes."""
    texts = ["\ud800", "\x00", "\n", "\u2028", "\U0001f600", '"', "\u202e"]
    assert rewards_of(load("code_points"), texts) == [float(ord(text)) for text in texts]


def test_the_worker_loads_the_standard_library_and_few_modules_of_the_package(load, capfd):
    """It starts in a moment, and the function finds no more than it imports."""
    rewards_of(load("modules"), ("a",))
    loaded = ast.literal_eval(capfd.readouterr().out.splitlines()[1])
    allowed = {"minirl.rewards.reward_adapter", "minirl.rewards.values"}
    allowed |= {f"minirl.workers.{name}" for name in ("child", "containment", "conversation", "user_code")}
    assert {*loaded} == {"minirl", "minirl.rewards", "minirl.workers"} | allowed
    for name in loaded:
        tree = ast.parse(Path(importlib.import_module(name).__file__).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                imported = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                assert imported in allowed or imported.partition(".")[0] in sys.stdlib_module_names


def test_modules_beside_the_file_are_found_and_ours_are_not_in_their_way(tmp_path):
    """A helper module of the user's may be called like one of the package's."""
    (tmp_path / "batch.py").write_text("VALUE = 7\n")
    (tmp_path / "mine.py").write_text("import batch\ndef f(completions):\n    return [batch.VALUE]\n")
    function = load_reward(f"{tmp_path}/mine.py:f")
    assert function(completions=["a"]) == [7.0]
    function.close()


@pytest.mark.parametrize("name", ["pids", "starts"])
def test_no_process_is_left_after_close(load, name):
    """Neither a worker nor what it forked or started. Fault 25."""
    function = load(name, num_workers=2)
    processes = [int(pid) for pid in function(completions=["a", "b"])]
    processes += [worker.pid for worker in function.pool.workers]
    assert all(map(is_alive, processes))
    function.close()
    assert_gone(*processes)


@pytest.mark.skipif(not Path("/proc").exists(), reason="processes are looked up in /proc")
def test_no_process_is_left_after_the_trainer_was_killed(folder):
    """SIGKILL while the worker waits and while it hangs in a call; a program that user code started goes too.

    Fault 25.
    """
    program = (
        "import sys\nfrom minirl.rewards.reward_process import load_reward\n"
        "pids, starts, hangs = (\n"
        f"    load_reward('{folder}/mine.py:' + name, num_workers=1 + (name == 'hangs_in_c'))\n"
        "    for name in ('pids', 'starts', 'hangs_in_c')\n"
        ")\n"
        "for function in (pids, starts):\n"
        "    print(*map(int, function(completions=['a', 'b'])), end=' ')\n"
        "print(*(worker.pid for worker in hangs.pool.workers), flush=True)\n"
        "hangs(completions=['bad'])\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    processes = [int(pid) for pid in trainer.stdout.readline().split()]
    time.sleep(0.2)
    assert len(processes) == 6
    assert all(map(is_alive, processes))
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert_gone(*processes)


def test_row_41_notes_on_rewards_survive_a_closed_output(folder):
    """The reader of stdout has gone: a run that forgives a failure and shows what user code prints goes on."""
    program = (
        "from minirl.rewards.reward_process import load_reward\n"
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
    """No other rank knows of the failure; what user code prints is much the same on all."""
    monkeypatch.setattr("minirl.workers.pool.rank", lambda: 1)
    rewards_of(load("raises", on_error="zero"))
    rewards_of(load("prints"))
    printed = capfd.readouterr().out
    assert printed.startswith("note: reward raises for the row at f.jsonl:2")
    assert "reward prints" not in printed


def test_a_call_costs_milliseconds(load):
    """128 completions, the median of ten calls; 0.5 ms where it was measured alone."""
    function, taken = load("good"), []
    for _ in range(10):
        start = time.perf_counter()
        function(completions=["y" * 1000] * 128)
        taken.append(time.perf_counter() - start)
    assert sorted(taken)[5] < 0.05


def test_row_46_hostile_completions_are_escaped_and_cut_in_errors():
    """No control character reaches a terminal, and thousands of characters do not either."""

    def nothing(completions):
        return [float("nan")] * len(completions)

    with pytest.raises(RewardError) as caught:
        rewards_of(nothing, ["\x1b[2J\u202e<script>" + "x" * 10_000])
    assert str(caught.value).isprintable()
    assert "<script>" in str(caught.value)
    assert len(str(caught.value)) < 400
