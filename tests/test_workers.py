"""Users' rollout functions in worker processes: faults stay in the process and are reported.

More of them are in test_rollout_workers; those of rewards are in test_faults_rewards.
"""

import ast
import os
import random
import re
import time
from pathlib import Path

import pytest

from minirl.data.task import Row
from minirl.episodes.episode import Episode
from minirl.episodes.program import Failed
from minirl.episodes.rollout_workers import load_rollout
from minirl.errors import InputError, RolloutError
from support.forked import fork, make_pipe
from support.marks import slow
from support.processes import is_alive

SOURCE = """
import asyncio, os, random, re, subprocess, sys, time

def rollout(episode):
    globals()[episode.row.prompt]()
    yield episode.generate()

async def rollout_async(episode):
    await asyncio.sleep(0)
    globals()[episode.row.prompt]()
    yield episode.generate()

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

def is_killed():
    os.kill(os.getpid(), 9)

def dies_of_a_signal_without_a_name():
    os.kill(os.getpid(), 40)

def closes_everything():
    os.closerange(0, 5000)
    time.sleep(100)

def hangs():
    time.sleep(1000)

def hangs_in_c():
    re.match("(a+)+$", "a" * 50 + "b")

def write_to_all(text):
    for fd in range(5000):
        try:
            os.write(fd, text)
        except OSError:
            pass

def writes_to_all():
    write_to_all(b"hello")

def answers_itself():
    write_to_all(b'{"number": 0, "reply": [7.0], "is_last": true, "facts": null, "seconds": 0, "printed": ""}\\n')

def floods():
    for fd in range(2000, 5000):
        try:
            while True:
                os.write(fd, b"x" * 1_000_000)
        except OSError:
            pass

def prints():
    print("hello \\x1b[31m" + "x" * 5_000_000)
    print("to stderr", file=sys.stderr)
    os.system("echo of a program")
    os.write(1, b"to the descriptor")
    sys.stdout.buffer.write(b"bytes")

def forks():
    os.fork()

def forks_and_raises():
    if os.fork() == 0:
        raise ValueError("in the child")

def moves():
    os.chdir("/")

def is_where_it_began():
    assert os.getcwd() != "/"

def closes_much():
    os.closerange(0, 500)

def seeds():
    random.seed(0)
    os.environ["MINE"] = "1"

def starts():
    with open(__file__ + ".pids", "a") as file:
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        program = subprocess.Popen(["sleep", "1000"]).pid
        file.write(f"{os.getpid()} {child} {program} ")

def shows_modules():
    names = ("torch", "numpy", "transformers", "tokenizers", "minirl")
    print(sorted(name for name in sys.modules if name.partition(".")[0] in names))
"""
NO_ANSWER = (
    "its process sent something other than an answer; does its code write to files that it did not open"
)
RAISED = {
    "raises": r"raised\nTraceback(.|\n)*mine\.py\", line \d+, in raises\n(.|\n)*KeyError: 'no \\x1b\[31mred",
    "exits": r"raised\n(.|\n)*SystemExit: done",
    "interrupts": r"raised\n(.|\n)*KeyboardInterrupt",
    "recurses": r"raised\n(.|\n)*RecursionError",
}
DIED = {
    "dies": "ended its process, exit code 3",
    "is_killed": "ended its process, SIGKILL",
    "dies_of_a_signal_without_a_name": "ended its process, signal 40",
    "closes_everything": "closed the pipes of its process",
    "hangs": "took more than 1 s .*; see --call-timeout",
    "hangs_in_c": "took more than 1 s .*; see --call-timeout",
    "writes_to_all": NO_ANSWER,
    "answers_itself": NO_ANSWER,
    "floods": NO_ANSWER,
}
HARMLESS = ("prints", "forks", "forks_and_raises", "moves", "closes_much", "seeds")
KINDS = ("rollout", "rollout_async")


def load(kind, folder, **options):
    """The function of that name in its workers."""
    return load_rollout(f"{folder}/mine.py:{kind}", **options)


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    """The functions of the file by name, each with one worker, which a test then disturbs."""
    folder = tmp_path_factory.mktemp("workers")
    (folder / "mine.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minirl.workers.pool.GRACE_S", 0.5)
        loaded = {kind: load(kind, folder) for kind in KINDS}
        yield loaded
        for function in loaded.values():
            function.pool.stop()


def error_of(function, action):
    """The error of a function that does this; None without an error."""
    try:
        number = function.begin(Episode(Row(action, {}, "f:1"), 7, 100))
        while not (replies := function.replies(1.0)):
            pass
    except RolloutError as error:
        return str(error)
    ((replied, reply),) = replies
    assert replied == number
    if isinstance(reply, Failed):
        return reply.why
    function.close(number)
    return None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "action", RAISED, ids=["row-23-raise", "row-26-exit", "row-26-interrupt", "row-53-recursion"]
)
def test_what_code_raises_is_told_and_its_process_lives_on(functions, kind, action):
    """With the user's lines of the traceback and none of ours; also what would end the process."""
    function = functions[kind]
    assert error_of(function, "fine") is None
    pid = function.pool.workers[0].pid
    error = error_of(function, action)
    assert re.search(RAISED[action], error)
    assert "minirl/" not in error
    assert len(error) < 5000
    assert error_of(function, "fine") is None
    assert function.pool.workers[0].pid == pid


@pytest.mark.parametrize("kind", [slow("rollout"), "rollout_async"])
@pytest.mark.parametrize(
    "action",
    [slow(action) if action == "hangs_in_c" else action for action in DIED],
    ids=lambda action: f"row-25-{action}",
)
def test_a_process_that_dies_hangs_or_lies_is_told_and_replaced(functions, monkeypatch, kind, action):
    """Fault 53 for a rollout, fault 26 for output: never taken for an answer."""
    function = functions[kind]
    with monkeypatch.context() as patch:
        if "hangs" in action:
            # Not for the others: a loaded machine may need longer.
            patch.setattr(function.pool.workers[0], "_timeout_s", 1.0)
        error = error_of(function, action)
    pid = function.pool.workers[0].pid
    assert re.search(DIED[action], error), error
    assert not is_alive(pid)
    assert error_of(function, "fine") is None


@pytest.fixture(autouse=True)
def nothing_was_printed(functions):
    """A note is printed once in a run: here once in a test."""
    for function in functions.values():
        function.pool._printed_notes.clear()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("action", HARMLESS, ids=lambda action: f"row-26-{action}")
def test_what_touches_only_its_process_is_harmless(functions, kind, action, capfd):
    """Fault 55 for a rollout. One answer for each message, from the worker; the working directory is back."""
    before = random.getstate()
    for _ in range(2):
        assert error_of(functions[kind], action) is None
        assert error_of(functions[kind], "is_where_it_began") is None
    assert random.getstate() == before
    assert "MINE" not in os.environ
    out, err = capfd.readouterr()
    assert err == ""
    if action == "prints":
        # 2,000 characters, control characters spelt out, nothing of programs and descriptors.
        kind_of_code = kind.partition("_")[0]
        assert out.startswith(f"note: {kind_of_code} {kind} printed (said once):\nhello \\x1b[31mxxx")
        assert 2000 < len(out) < 2100
    else:
        assert out == ""


# The file, and the process


UNUSABLE = {
    "def reward(completions:\n": "SyntaxError",
    "import sys\nsys.exit(4)\n": "SystemExit: 4",
    "import no_such_module_of_mine\n": r'mine\.py", line 1',
    "import os\nos._exit(4)\n": "ended its process, exit code 4",
    "rollout = 3\n": r"mine\.py has no function rollout",
}


@pytest.mark.parametrize("source", UNUSABLE)
def test_row_23_a_file_that_cannot_be_used_is_an_input_error_at_once(tmp_path, source):
    """Before any model is loaded, with the flag. Faults 25, 26 and 53."""
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(InputError, match=rf"--rollout .*mine\.py:rollout: (.|\n)*{UNUSABLE[source]}"):
        load("rollout", tmp_path)


NO_SPEC = "expected file.py:function or module:function"


UNNAMED = {
    **dict.fromkeys(("mine.py", "mine.py:", "mine:", ":score", "", "folder/mine.txt:f"), NO_SPEC),
    "none.py:f": "there is no file none.py",
    "no_such_package.rewards:f": "there is no module 'no_such_package' here; is it installed",
    "minirl.no_such_module:f": "there is no module 'minirl.no_such_module' here",
    "minirl.data.gsm8k:f": "minirl.data.gsm8k has no function f",
}


@pytest.mark.parametrize("spec", UNNAMED)
def test_what_names_no_function_is_refused_with_the_flag(spec):
    """The error repeats the flag and the value."""
    with pytest.raises(InputError) as error:
        load_rollout(spec)
    assert str(error.value).startswith(f"--rollout {spec}: {UNNAMED[spec]}")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"raised\n(.|\n)*FileNotFoundError"),
        ("import os\nos._exit(5)", "ended its process, exit code 5"),
    ],
    ids=["row-25-gone", "row-54-dies"],
)
def test_a_worker_that_cannot_be_replaced_is_an_error_with_what_it_was_for(tmp_path, content, said):
    """With its row; never an answer without a number."""
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    function = load("rollout", tmp_path)
    file.unlink() if content is None else file.write_text(content)
    function.pool.stop()
    error = error_of(function, "fine")
    assert re.match(rf"rollout rollout.*: {said}", error)
    assert "for the row at" in error


@pytest.mark.parametrize("kind", KINDS)
def test_the_worker_loads_no_more_than_it_needs(functions, kind, capfd):
    """It starts in a moment, and the code finds no more than it imports: few modules of the package, no other."""
    assert error_of(functions[kind], "shows_modules") is None
    loaded = {*ast.literal_eval(capfd.readouterr().out.splitlines()[1])}
    assert {name.partition(".")[0] for name in loaded} == {"minirl"}


def assert_gone(pids):
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, f"still alive: {[pid for pid in pids if is_alive(pid)]}"
        time.sleep(0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_no_process_is_left_after_stop(tmp_path, kind):
    """Neither a worker nor what its code forked or started."""
    (tmp_path / "mine.py").write_text(SOURCE)
    function = load(kind, tmp_path, num_workers=2)
    assert error_of(function, "starts") is None
    pids = [*map(int, (tmp_path / "mine.py.pids").read_text().split())]
    pids += [worker.pid for worker in function.pool.workers]
    assert all(map(is_alive, pids))
    function.pool.stop()
    assert_gone(pids)


def hang_in_workers(pipe, folder):
    """Start processes in all workers, send the workers' ids, and wait for one that hangs."""
    functions = [load(kind, folder) for kind in (*KINDS, "rollout")]
    for function in functions[:2]:
        assert error_of(function, "starts") is None
    pipe.send([function.pool.workers[0].pid for function in functions])
    error_of(functions[2], "hangs")


@pytest.mark.skipif(not Path("/proc").exists(), reason="processes are looked up in /proc")
def test_no_process_is_left_after_the_trainer_was_killed(tmp_path):
    """SIGKILL while workers wait and while one hangs in its code; processes of user code go too."""
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
