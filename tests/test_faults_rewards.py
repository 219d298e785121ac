"""Faults of reward functions cannot hang or corrupt a run."""

import decimal
import os
import re
import signal
import time

import numpy
import pytest

from minirl.data.task import Row
from minirl.errors import InputError, RewardError
from minirl.rewards.calls import validate_rewards
from minirl.rewards.functions import PromptGroup
from minirl.rewards.reward_workers import WorkerReward
from minirl.run.config import RunConfig
from minirl.run.inputs import load_rewards, load_task
from support.forked import fork, make_pipe
from support.jobs import LIMIT_S, wait_for
from support.processes import is_alive
from support.rollouts import rewards_of_call
from support.scripts import run_in_pool, write_rows

SOURCE = """
import asyncio, os, re, subprocess, sys, time

def note(*pids):
    with open(__file__ + ".pids", "a") as file:
        print(*pids, file=file)

note(os.getpid())

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

def dies():
    os._exit(3)

def closes_everything():
    os.closerange(0, 5000)
    time.sleep(100)

def starts_and_hangs():
    starts()
    hangs_in_c()

def hangs_in_c():
    re.match("(a+)+$", "a" * 50 + "b")

def floods():
    for fd in range(5000):
        try:
            os.write(fd, b"x" * 1000)
        except OSError:
            pass

def prints():
    print("hello")
    os.system("echo of a program")

def starts():
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    note(child, subprocess.Popen(["sleep", "1000"]).pid)

"""
RAISED = {
    "raises": r"raised\nTraceback(.|\n)*mine\.py\", line \d+, in raises\n(.|\n)*KeyError: 'no \\x1b\[31mred",
    "exits": r"raised\n(.|\n)*SystemExit: done",
}
LOST = {
    "dies": "ended its process, exit code 3",
    "closes_everything": r"ended its process, signal 9 \(Killed\)",
    "starts_and_hangs": "took more than 1 s and was killed",
    "floods": "its worker process sent an invalid response",
}


def rewards_of(function, completions):
    return rewards_of_call(function, Row("p", {}, "f.jsonl:1"), completions)


def submit(function, number, completion):
    row = Row("p", {}, f"f.jsonl:{number}")
    return function.submit("mine", PromptGroup(row, [], [completion], tokenizer=None))


def noted_pids(folder):
    """Return the pids of the workers and of all processes that their code started."""
    return list(map(int, (folder / "mine.py.pids").read_text().split()))


def assert_gone(pids):
    wait_for(lambda: not any(map(is_alive, pids)), f"still alive: some of {pids}")


@pytest.mark.parametrize("part", ["data", "eval_data"])
def test_row_17_a_missing_reward_column_is_reported_before_a_model_is_loaded(tmp_path, part):
    """The error names file, line, field, function and the available fields. All rows of both files are checked."""
    (tmp_path / "needs.py").write_text("def right(completions, answer, level=None, **kw):\n    return []\n")
    row = {"prompt": "a", "answer": 1}
    good = write_rows(tmp_path / "good.jsonl", [row])
    bad = write_rows(tmp_path / "bad.jsonl", [row, {"prompt": "b", "solution": 1}])
    flags = {"data": good, part: bad if part == "data" else (str(bad),)}
    said = r"bad\.jsonl:2: no field 'answer', .* reward right .*available: completion_ids, .*, solution"
    config = RunConfig(**flags, reward=(f"{tmp_path}/needs.py:right",))
    with pytest.raises(InputError, match=said):
        load_rewards(config, load_task(config))


@pytest.mark.parametrize("name", ["acts", "acts_async"])
@pytest.mark.parametrize("action", RAISED, ids=lambda action: f"row-23-{action}")
def test_an_exception_in_a_reward_is_reported_with_the_row_and_its_worker_survives(load_reward, name, action):
    """The traceback shows only the user's frames. SystemExit does not end the worker either. Pitfall 21."""
    function = load_reward(name)
    said = rf"^reward mine for the row at f\.jsonl:1: {RAISED[action]}"
    with pytest.raises(RewardError, match=said) as error:
        rewards_of(function, [action])
    assert error.value.exit_code == 4
    assert "minirl/" not in str(error.value)
    assert rewards_of(function, ["fine"]) == [1.0]


@pytest.mark.parametrize("name", ["acts", "acts_async"])
@pytest.mark.parametrize("action", LOST, ids=lambda action: f"row-25-{action}")
def test_a_worker_that_dies_hangs_or_sends_garbage_is_killed_and_its_row_is_named(
    load_reward, tmp_path, name, action
):
    """The error names the first call. All pending and later calls of that function fail with the same error.

    Fault 26: user code floods the pipes.
    """
    function = load_reward(name, timeout_s=1.0 if "killed" in LOST[action] else 60.0)
    calls = [submit(function, number, action) for number in range(2)]
    error = calls[0].exception()
    assert re.match(rf"reward mine for the row at f\.jsonl:0.*: {LOST[action]}", str(error))
    assert calls[1].exception() is error
    assert_gone(noted_pids(tmp_path))
    assert submit(function, 2, "fine").exception() is error


def test_row_25_a_worker_killed_while_idle_fails_the_next_call(load_reward):
    function = load_reward("acts")
    os.kill(function._processes[0]._process.pid, signal.SIGKILL)
    with pytest.raises(RewardError, match=r"row at f\.jsonl:1: ended its process, signal 9 \(Killed\)"):
        rewards_of(function, ["fine"])


NUMBERS = (
    [True, None],
    (1.0, numpy.float32(0)),
    numpy.array([1, 0]),
    [numpy.array(1.0), decimal.Decimal(0)],
)
NO_REWARDS = (
    ([1, float("nan")], "completion 'b': returned nan; expected a finite number"),
    ([1, "1.0"], "completion 'b': returned '1.0'"),
    ([1, 1e30], r"completion 'b': returned 1e\+30; a magnitude above 1e\+12"),
    (numpy.ones((2, 1)), r"completion 'a': returned array\(\[1.\]\)"),
    (1.0, "returned 1.0; expected a list of 2 numbers"),
    (None, "returned None; expected a list"),
    ("12", "returned '12'; expected a list"),
    ([1.0] * 3, "returned 3 values for 2 completions"),
)


def test_row_24_all_numeric_types_become_floats_and_other_values_are_named():
    """The error names completion and value, before any value reaches a gradient."""
    for values in NUMBERS:
        rewards = validate_rewards(values, ["a", "b"])
        assert rewards == [1.0, None if values[1] is None else 0.0]
        assert type(rewards[0]) is float
    for values, said in NO_REWARDS:
        assert re.match(said, validate_rewards(values, ["a", "b"]))


def test_row_24_a_wrong_value_stops_the_run_with_function_and_row():
    """Fault 46: hostile completions are escaped and truncated."""

    def returns_nan(completions):
        return [float("nan")]

    hostile = "\x1b[2J\u202e<script>" + "x" * 10_000
    with pytest.raises(RewardError, match=r"^reward mine .* f\.jsonl:1: completion .*nan") as caught:
        rewards_of(returns_nan, [hostile])
    assert str(caught.value).isprintable()
    assert "<script>" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_row_26_output_of_user_code_goes_to_stderr(load_reward, capfd):
    """User output is not mixed into the worker's replies, and only rank 0 shows the output."""
    assert rewards_of(load_reward("acts"), ["prints"]) == [1.0]
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "hello\nof a program\n"


UNUSABLE = {
    "def reward(completions:\n": "SyntaxError",
    "import os\nos._exit(4)\n": "ended its process, exit code 4",
    "reward = 3\n": r"mine\.py has no function reward",
}


@pytest.mark.parametrize("source", UNUSABLE)
def test_row_23_an_unusable_reward_file_is_an_input_error_at_once(tmp_path, source):
    """The error names the flag and comes before any model is loaded."""
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(InputError, match=rf"--reward .*mine\.py:reward: (.|\n)*{UNUSABLE[source]}"):
        WorkerReward(f"{tmp_path}/mine.py:reward")


def test_no_process_starts_before_the_runs_folder_is_locked(one_rank, tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    with pytest.raises(AssertionError, match="plain name"):
        run_in_pool(
            one_rank, "train_grpo.py", f"--reward {tmp_path}/mine.py:acts --run-name ..", runs=tmp_path
        )
    assert not list(tmp_path.glob("*.pids"))


def hang_in_workers(pipe, folder, waits):
    """Start processes in one worker, report the start, and call another worker that hangs while holding the GIL."""
    idle, hanging = (WorkerReward(f"{folder}/mine.py:acts") for _ in range(2))
    assert rewards_of(idle, ["starts"]) == [1.0]
    pipe.send(True)
    call = submit(hanging, 1, "hangs_in_c")
    if waits:
        call.result()


@pytest.mark.parametrize("is_killed", [True, False])
def test_no_process_survives_a_trainer_that_was_killed_or_exited(tmp_path, is_killed):
    """One worker is idle and one hangs in C. Processes that user code started die too. No call delays the exit."""
    (tmp_path / "mine.py").write_text(SOURCE)
    ours, theirs = make_pipe()
    trainer = fork(hang_in_workers, theirs, tmp_path, is_killed)
    assert ours.recv()
    pids = noted_pids(tmp_path)
    assert len(pids) == 2 + 2
    if is_killed:
        time.sleep(0.2)
        assert all(map(is_alive, pids))
        trainer.kill()
    trainer.join(LIMIT_S)
    assert trainer.exitcode is not None
    assert_gone(pids)
