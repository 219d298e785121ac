"""Faults of reward functions: they cannot hang, lie or corrupt the run. Row numbers are those of the fault table."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minirl.errors import InputError, RewardError
from minirl.reward_process import RewardProcess
from minirl.rewards import compute_rewards
from minirl.tasks import Row
from minirl.tasks.load import load_task

ROOT = Path(__file__).parent.parent
ROWS = [Row(f"p{i}", {"answer": i}, f"f.jsonl:{i + 1}") for i in range(4)]
TEXTS = ["a", "b", "c", "d"]


@pytest.fixture
def reward(tmp_path):
    """A process that runs this text as a reward file."""
    started = []

    def start(text, name="score", timeout_s=20.0, max_errors=0.0):
        (tmp_path / "mine.py").write_text(text)
        started.append(RewardProcess(f"{tmp_path}/mine.py:{name}", timeout_s=timeout_s, max_errors=max_errors))
        return started[-1]

    yield start
    for process in started:
        process.close()


def rewards_of(function, rows=ROWS, texts=TEXTS, seed=""):
    return compute_rewards(function, rows, completions=texts, completion_ids=[[1]] * len(texts), seed=seed)


def guilty_at(completion, action):
    """A reward file that does something bad with one completion."""
    body = "".join(f"            {line}\n" for line in action.splitlines())
    return (
        "import os, sys, time\nimport ctypes\ndef score(completions, **kwargs):\n"
        f"    for c in completions:\n        if c == {completion!r}:\n{body}    return [1.0] * len(completions)\n"
    )


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("raise KeyError('answer')", "KeyError: 'answer'"),
        ("sys.exit(3)", "SystemExit: 3"),
        ("os._exit(3)", r"ended its process \(exit code 3\)"),
        ("os.kill(os.getpid(), 11)", r"ended its process \(SIGSEGV\)"),
        ("time.sleep(100)", r"gave no answer within 0\.5 s; see --reward-timeout"),
        ("while True: pass", r"gave no answer within 0\.5 s"),
    ],
    ids=["row-23-raises", "row-26-exits", "row-26-dies", "row-26-crashes", "row-25-sleeps", "row-25-loops"],
)
def test_the_guilty_completion_is_named(reward, action, said):
    """Function, row and completion; the time is bounded; the process is there again for the next call."""
    function = reward(guilty_at("c", action), timeout_s=0.5)
    began = time.monotonic()
    with pytest.raises(RewardError, match=rf"(?s)reward score, row f\.jsonl:3, completion 'c': .*{said}"):
        rewards_of(function)
    assert time.monotonic() - began < 4
    assert rewards_of(function, ROWS[:2], TEXTS[:2]) == [1.0, 1.0]


def test_row_23_the_traceback_is_the_users_only(reward, tmp_path):
    """Its file and line, none of ours."""
    with pytest.raises(RewardError) as raised:
        rewards_of(reward("def score(completions):\n    return [1 / 0]\n"))
    said = str(raised.value)
    assert f'File "{tmp_path}/mine.py", line 2, in score' in said
    assert "ZeroDivisionError" in said
    assert "reward_worker" not in said


def test_row_23_a_fault_of_the_whole_batch_says_so(reward):
    """No single completion is guilty."""
    function = reward("def score(completions):\n    assert len(completions) < 2\n    return [0.0]\n")
    with pytest.raises(RewardError, match=r"(?s)reward score: .*AssertionError.*for 4 completions, for none alone"):
        rewards_of(function)


def test_row_23_few_errors_may_be_tolerated_and_are_counted(reward):
    """At least one completion of a call may fail and gets 0; more than the share is an error all the same."""
    function = reward(guilty_at("c", "raise ValueError"), max_errors=0.05)
    assert rewards_of(function) == [1.0, 1.0, 0.0, 1.0]
    assert function.num_errors == 1
    assert rewards_of(function, ROWS * 10, TEXTS[:2] * 20) == [1.0] * 40
    assert rewards_of(function, ROWS * 10, ["c", "c", *"ab" * 19])[:3] == [0.0, 0.0, 1.0]
    assert function.num_errors == 3
    with pytest.raises(RewardError, match=r"row f\.jsonl:1, completion 'c'"):
        rewards_of(function, texts=["c", "c", "a", "a"])
    returns_none = "def score(completions):\n    return [None, *[1.0] * (len(completions) - 1)]\n"
    returns_none = reward(returns_none, max_errors=0.05)
    assert rewards_of(returns_none) == [0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("[float('nan')] * 4", "f.jsonl:1, completion 'a': returned nan; return a finite number"),
        ("[1, 2, float('inf'), 4]", "f.jsonl:3, completion 'c': returned inf"),
        ("[1, None, 3, 4]", "f.jsonl:2, completion 'b': returned None"),
        ("[1, 2, 3, 'x']", "f.jsonl:4, completion 'd': returned 'x'"),
        ("[[1], 2, 3, 4]", "f.jsonl:1, completion 'a': returned \\[1\\]"),
        ("[1, 2]", "returned 2 values for 4 completions"),
        ("[]", "returned 0 values for 4"),
        ("3.0", "returned 3.0; expected a list of 4 numbers"),
        ("None", "returned None; expected a list of 4"),
        ("'1234'", "returned '1234'; expected a list"),
        ("dict.fromkeys(completions, 1.0)", "returned {.*; expected a list"),
    ],
)
def test_row_24_what_is_not_a_list_of_finite_numbers_is_refused(reward, returned, said):
    """With index, by row and completion, and value; or the length."""
    with pytest.raises(RewardError, match=rf"(?s)reward score.*{said}"):
        rewards_of(reward(f"def score(completions):\n    return {returned}\n"))


@pytest.mark.parametrize(
    "returned",
    ["numpy.array([1, 0, 1, 0])", "torch.tensor([1.0, 0, 1, 0])", "[numpy.float32(1), numpy.bool_(0), True, 0]"],
)
def test_row_24_numbers_of_every_kind_are_accepted(reward, returned):
    """Arrays, tensors, bools."""
    text = f"import {returned.split('.')[0].strip('[')}\ndef score(completions):\n    return {returned}\n"
    assert rewards_of(reward(text)) == [1.0, 0.0, 1.0, 0.0]


HOSTILE = """
import os, random, sys
def score(completions, answer, prompts):
    print("x" * 3_000_000)
    sys.stderr.write("y" * 3_000_000)
    os.write(1, b"z" * 100_000)
    os.chdir("/")
    random.seed(0)
    os.environ["HOME"] = "/nowhere"
    answer.clear(); prompts[:] = ["changed"] * len(prompts); completions.append("more")
    if os.fork() == 0:
        return [9.0] * 4
    return [1.0] * 4
"""


def test_row_26_what_a_reward_does_stays_in_its_process(reward, capfd):
    """Prints, forks, directories, seeds, the environment and changed arguments; megabytes printed block nothing."""
    function, here, state = reward(HOSTILE), os.getcwd(), random.getstate()
    home = os.environ.get("HOME")
    for _ in range(3):
        assert rewards_of(function) == [1.0] * 4
    assert (os.getcwd(), random.getstate(), os.environ.get("HOME")) == (here, state, home)
    assert [row.columns for row in ROWS] == [{"answer": i} for i in range(4)]
    printed = capfd.readouterr()
    assert printed.out.count("reward score printed (said once)") == 1
    assert len(printed.out + printed.err) < 5000


def test_row_26_the_directory_is_the_same_in_every_call(reward):
    """A function that changes it does not change the next call's."""
    text = "import os\ndef score(completions):\n    ok = os.getcwd() != '/'\n    os.chdir('/')\n    return [ok]\n"
    function = reward(text)
    assert [rewards_of(function, ROWS[:1], TEXTS[:1]) for _ in range(3)] == [[1.0]] * 3


def test_a_random_reward_is_a_function_of_the_rollouts(reward):
    """So that a resumed run gets it again; other rollouts draw others."""
    text = "import random, numpy\ndef score(completions):\n"
    text += "    return [random.random() + numpy.random.rand() for _ in completions]\n"
    function, other = reward(text), reward(text)
    first = rewards_of(function, seed="train 0 (1, 2)")
    assert rewards_of(function, seed="train 0 (3, 0)") != first
    assert rewards_of(other, seed="train 0 (1, 2)") == first
    assert len(set(first)) == 4


@pytest.mark.parametrize("text", ["\ud800", "\x00\x1b[31m", "שלום", "x" * 2_000_000])
def test_row_19_any_text_reaches_the_function_whole(reward, text):
    """Lone surrogates, control characters, right-to-left text, megabytes: its length is right, and order is kept."""
    function = reward("def score(completions):\n    return [len(c) + (c[0] == '\\ud800') for c in completions]\n")
    values = rewards_of(function, ROWS[:2], [text, "a"])
    assert values == [len(text) + (text == "\ud800"), 1.0]


def test_row_46_hostile_completions_are_escaped_in_errors(reward):
    """No control character reaches the terminal, and the excerpt is short."""
    with pytest.raises(RewardError) as raised:
        rewards_of(reward("def score(completions):\n    return [None]\n"), ROWS[:1], ["\x1b[2J<script>" + "x" * 10_000])
    assert "\x1b" not in str(raised.value)
    assert len(str(raised.value)) < 400


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_row_17_a_column_that_a_reward_needs_is_checked_before_anything_is_loaded(tmp_path):
    """File, line, field and function; in held-out rows too; a parameter with a default is not needed."""
    (tmp_path / "mine.py").write_text("def score(completions, answer, extra=None, **rest):\n    return []\n")
    good = write_rows(tmp_path / "good.jsonl", [{"prompt": "a", "answer": None}] * 2)
    bad = write_rows(tmp_path / "bad.jsonl", [{"prompt": "a", "answer": 1}, {"prompt": "b", "anwser": 1}])
    spec = (f"{tmp_path}/mine.py:score",)
    load_task("auto", data=good, eval_data=good, reward=spec)
    for data, eval_data in ((bad, None), (good, bad)):
        with pytest.raises(InputError, match=r"bad\.jsonl:2: no field 'answer', which reward score needs.* anwser"):
            load_task("auto", data=data, eval_data=eval_data, reward=spec)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("def other(): pass", "has no function score"),
        ("import sys; sys.exit()", "SystemExit"),
        ("def", "SyntaxError"),
    ],
)
def test_row_23_a_file_that_does_not_load_is_refused_at_once(tmp_path, text, said):
    """By flag, before any model."""
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(InputError, match=rf"(?s)--reward .*mine\.py:score: .*{said}"):
        load_task("auto", data=None, eval_data=None, reward=(f"{tmp_path}/mine.py:score",))


def children_of_workers():
    """Processes that run the worker or were left by the functions of these tests."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"reward_worker.py" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            pass
    return found


def test_no_process_outlives_its_trainer(tmp_path):
    """Neither idle, nor in the middle of a call, nor its forks, when the trainer is killed; nor after `close`."""
    text = "import os, time\ndef score(completions):\n    os.fork()\n    time.sleep(600)\n"
    (tmp_path / "mine.py").write_text(text)
    script = "from minirl.reward_process import RewardProcess\n"
    script += f"p = RewardProcess('{tmp_path}/mine.py:score', timeout_s=600)\n"
    for action in ("import time; time.sleep(600)", "p(completions=['a'])"):
        before = set(children_of_workers())
        trainer = subprocess.Popen([sys.executable, "-c", script + action], cwd=ROOT)
        wait_for(lambda before=before, n=1 if "time" in action else 2: len(set(children_of_workers()) - before) >= n)
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        if "time" in action:
            wait_for(lambda before=before: not set(children_of_workers()) - before)
        else:
            wait_for(lambda before=before: len(set(children_of_workers()) - before) <= 1)
            for pid in set(children_of_workers()) - before:  # a grandchild of a killed trainer has nobody to end it
                os.kill(pid, signal.SIGKILL)


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_worker_starts_with_the_standard_library_only():
    """Neither torch nor minirl: it is there within a fraction of a second."""
    worker = ROOT / "minirl" / "reward_worker.py"
    script = f"import runpy, sys; runpy.run_path({str(worker)!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "minirl"} & set(done.stdout.split())
