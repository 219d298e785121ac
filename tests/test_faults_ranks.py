"""Rows of the fault table that are about ranks: who speaks, which code all leave with, and how soon.

Most cases are a script of a few lines on two processes with torchrun's variables; three are whole runs.
"""

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minirl.errors import GuardError, InputError
from minirl.ranks import process_group, watchdog
from minirl.report.metrics import StepMetrics
from support.jobs import ROOT, Job, started, torchrun, wait_for
from support.marks import slow
from support.processes import is_alive
from support.scripts import extended_fork, read_rollouts

PRELUDE = """
import os, signal, sys, time
from minirl.ranks import process_group, watchdog
from minirl.errors import GuardError, InputError, RewardError

def joined(hang_timeout=30.0):
    process_group.start(device="cpu", hang_timeout=hang_timeout)
    watchdog.heartbeat(phase="step 3, phase reward")
    print("joined", flush=True)

rank = process_group.rank()
"""


NAN_FORK = """
step, good_loss, good_can_skip = 0, token_loss, can_skip

def can_skip(*args):  # called once in a step
    global step
    step += 1
    return good_can_skip(*args)

def token_loss(config, micro, new, entropy):
    loss, ratio = good_loss(config, micro, new, entropy)
    return (loss * torch.nan if rank() == 1 and step == 2 else loss), ratio

"""


def python(folder: Path, body: str, before: str = "") -> list[str]:
    """The command for a script whose main is `body`. before: what it does as it is imported."""
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    (folder / "script.py").write_text(f"{PRELUDE}{before}\ndef main():\n{lines}\nwatchdog.run(main)\n")
    return [str(folder / "script.py")]


def grpo(*flags: str) -> list[str]:
    return [str(ROOT / "train_grpo.py"), *"--prompts-per-step 2 --group-size 4 --eval-rows 2".split(), *flags]


def children(pid: int) -> list[int]:
    """The processes that this one started."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@contextlib.contextmanager
def two_joined(folder: Path, body: str) -> Iterator[Job]:
    """A script on two ranks, both of which have joined."""
    with started(folder, [python(folder, body)] * 2) as job:
        job.until("joined", 0, 1)
        yield job


def outputs_of(
    folder: Path, body: str, codes: list[int], *, within: float, before: str = "", **variables: str
) -> list[str]:
    """What the ranks of a script print after they joined; they must leave with these codes within so many seconds."""
    with started(folder, [python(folder, body, before)] * len(codes), **variables) as job:
        assert job.codes(within) == codes
        return [job.output(rank).removeprefix("joined\n") for rank in range(len(codes))]


DIE = "if rank == 1:\n    time.sleep(0.6)\n    os.kill(os.getpid(), 9)\n"


@pytest.mark.parametrize(
    ("body", "last_seen"),
    [
        (f"joined()\n{DIE}process_group.barrier()", "step 3, phase reward"),
        slow(f"process_group.GONE_S = 3.0\n{DIE}joined()", "before the first step"),
    ],
    ids=["in a collective", "before it joins"],
)
def test_row_01_when_a_rank_is_killed_one_line_says_which(tmp_path, body, last_seen):
    """The survivor leaves with 1 and without the traceback of its broken connection.

    It waits in a collective, or for the other to join: without torchrun, which would end it at once, after GONE_S.
    """
    said, _ = outputs_of(tmp_path, body, [1, -signal.SIGKILL], within=15)
    assert f"rank 1 is gone, killed or crashed (last seen: {last_seen})" in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_row_01_a_rank_that_dies_before_the_rendezvous_is_not_waited_for_for_ever(tmp_path, killed):
    """Without torchrun, and whether or not it would have kept the store: the other reports within a minute."""
    assert process_group.GONE_S < watchdog.START_S < 60
    codes = [1, 1]
    codes[killed] = -signal.SIGKILL
    die = f"watchdog.START_S = 2.0\nif rank == {killed}:\n    os.kill(os.getpid(), 9)"
    said = outputs_of(tmp_path, "joined()", codes, within=15, before=die)[1 - killed]
    expected = rf"^rank {1 - killed}: after 2 s not all 2 ranks have come to 127.0.0.1:\d+: one was killed, or was not"
    assert re.search(expected, said, re.MULTILINE)
    assert "Traceback" not in said


@pytest.mark.slow
def test_row_01_restarted_ranks_resume_the_run_and_row_04_sigterm_to_torchrun_saves_its_step(tmp_path, runs):
    """Under torchrun --max-restarts, every step once.

    Then SIGTERM: the checkpoint of the step is there, no step is lost, no process is left.
    """
    flags = ("--num-steps", "10000", "--save-every", "4", "--run-name", "restarted")
    command = torchrun(*grpo(*flags), options=["--standalone", "--max-restarts=1"])
    with started(tmp_path, [command], MINIRL_RUNS=str(runs)) as job:
        job.until("step     6/", 0)
        os.kill(children(job.processes[0].pid)[1], signal.SIGKILL)
        job.until("resuming after step 4", 0)
        wait_for(lambda: job.output(0).count("step     5/") == 2, "no step came after the restart")
        ranks = children(job.processes[0].pid)
        assert len(ranks) == 2
        job.processes[0].terminate()
        assert job.codes(within=20) == [1]  # torchrun's own
        assert not any(map(is_alive, ranks))
    folder = runs / "restarted"
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert 5 <= len(lines) < 10000
    assert (folder / "checkpoints" / f"{len(lines):06d}").is_dir()
    after_the_restart = job.output(0).partition("resuming after step")[2]
    assert "Traceback" not in after_the_restart.partition("\ncheckpoint ")[0]


@pytest.mark.slow
def test_row_03_ranks_die_with_torchrun(tmp_path):
    """Also those that are stuck in user code."""
    with started(tmp_path, [torchrun(*python(tmp_path, "joined()\ntime.sleep(300)"))]) as job:
        wait_for(lambda: job.output(0).count("joined") == 2, "the ranks did not start", 60)
        ranks = children(job.processes[0].pid)
        assert len(ranks) == 2
        job.processes[0].kill()
        wait_for(lambda: not any(map(is_alive, ranks)), "ranks outlived torchrun", 5)


def test_row_03_a_rank_that_was_just_started_sees_that_torchrun_is_gone(tmp_path):
    """It may have been killed while the rank was importing: nobody listens at the address that was given."""
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    ranks = {"RANK": "0", "WORLD_SIZE": "2"}
    (said,) = outputs_of(tmp_path, "joined()", [1], within=20, **ranks, **agent)
    assert said == "rank 0: torchrun is gone, it does not answer\n"


LOOP = """joined()
while not (stop := process_group.stop_requested()):
    time.sleep(0.1)
print("saved")
return 128 + stop
"""


def test_row_04_sigterm_to_one_rank_stops_all_at_the_same_step(tmp_path):
    """All leave with 143; one line says what happens, on the rank that got the signal."""
    with two_joined(tmp_path, LOOP) as job:
        job.processes[1].send_signal(signal.SIGTERM)
        assert job.codes(within=5) == [143, 143]
        assert [job.output(rank).count("saved") for rank in (0, 1)] == [1, 1]
        assert [job.output(rank).count("SIGTERM: finishing this step") for rank in (0, 1)] == [0, 1]


@pytest.mark.parametrize("handler", ["SIG_IGN", "SIG_DFL"], ids=["nohup", "terminal"])
def test_row_04_a_closed_terminal_saves_unless_it_is_ignored(tmp_path, handler):
    """SIGHUP stops as SIGTERM does, with 129; where it was ignored at the start it stays so."""
    command = python(tmp_path, LOOP, before=f"signal.signal(signal.SIGHUP, signal.{handler})")
    with started(tmp_path, [command]) as job:
        job.until("joined", 0)
        job.processes[0].send_signal(signal.SIGHUP)
        if handler == "SIG_IGN":
            time.sleep(1)
            assert job.processes[0].poll() is None
            job.processes[0].terminate()
        assert job.codes(within=5) == [143 if handler == "SIG_IGN" else 129]
        assert job.output(0).count("saved") == 1


def test_row_04_a_second_sigterm_leaves_at_once(tmp_path):
    """One rank sits in user code, the other in a collective; a signal that is delivered twice counts once."""
    body = "joined()\nif rank == 1:\n    time.sleep(300)\nprocess_group.barrier()"
    with two_joined(tmp_path, body) as job:
        for _ in range(2):
            job.processes[0].send_signal(signal.SIGTERM)
            time.sleep(0.1)
        time.sleep(0.6)
        assert [process.poll() for process in job.processes] == [None, None]
        job.processes[0].send_signal(signal.SIGTERM)
        assert job.codes(within=5) == [143, 143]
        assert "SIGTERM again: leaving at once" in job.output(0)


@pytest.mark.slow
def test_row_05_ctrl_c_saves_and_twice_leaves(tmp_path, runs):
    """A whole run in plain Python: 130 and a checkpoint; a script that is stuck leaves at the second."""
    command = grpo("--num-steps", "10000", "--run-name", "row-05")
    with started(tmp_path, [command], MINIRL_RUNS=str(runs)) as job:
        job.until("step     2/", 0)
        job.processes[0].send_signal(signal.SIGINT)
        assert job.codes(within=10) == [130]
        assert "again to leave at once" in job.output(0)
        assert "Traceback" not in job.output(0)
    assert len(list((runs / "row-05" / "checkpoints").iterdir())) == 1
    with started(tmp_path, [python(tmp_path, "joined()\ntime.sleep(300)")]) as job:
        job.until("joined", 0)
        job.processes[0].send_signal(signal.SIGINT)
        job.until("SIGINT: finishing", 0)
        time.sleep(0.7)
        job.processes[0].send_signal(signal.SIGINT)
        assert job.codes(within=2) == [130]


def test_row_04_signals_of_a_forked_child_are_its_own(tmp_path):
    """It can be terminated, and the run takes no notice."""
    body = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 has one for forks beside threads
joined()
if not (child := os.fork()):
    time.sleep(300)
time.sleep(0.2)
os.kill(child, signal.SIGTERM)
killed_by = os.WTERMSIG(os.waitpid(child, 0)[1])
time.sleep(0.5)
print("child", killed_by, "run", watchdog.this_process.stop_signal)
"""
    assert outputs_of(tmp_path, body, [0], within=20) == [f"child {int(signal.SIGTERM)} run 0\n"]


def test_row_05_ctrl_c_before_the_first_step_leaves_at_once(tmp_path):
    """There is nothing to save."""
    with started(tmp_path, [python(tmp_path, "print('started', flush=True)\ntime.sleep(300)")]) as job:
        job.until("started", 0)
        job.processes[0].send_signal(signal.SIGUSR1)
        job.until('script.py", line', 0)  # the stacks
        assert job.processes[0].poll() is None
        job.processes[0].send_signal(signal.SIGINT)
        assert job.codes(within=2) == [130]
        assert "nothing to save" in job.output(0)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        ("SystemExit(0)", 1, r"^rank 1 raised:\nTraceback(.|\n)*SystemExit: 0$"),
        slow(
            "RewardError('reward few raised')",
            4,
            r"^error: reward few raised \[rank 1, step 3, phase reward\]$",
        ),
        ("KeyError('answer')", 1, r"^rank 1 raised:\nTraceback(.|\n)*KeyError: 'answer'$"),
    ],
    ids=["exit", "RewardError", "bug"],
)
def test_row_23_an_error_on_one_rank_is_printed_once_and_ends_all(tmp_path, error, code, message):
    """Within 5 seconds and with one code, though the other rank is in a collective; that one prints nothing."""
    body = f"joined()\nif rank == 1:\n    time.sleep(0.5)\n    raise {error}\nprocess_group.barrier()"
    others, said = outputs_of(tmp_path, body, [code, code], within=5)
    assert others == ""
    assert re.match(message, said.strip())
    assert code == 1 or "Traceback" not in said


@pytest.mark.slow
def test_row_23_ranks_in_user_code_leave_too_and_the_first_error_wins(tmp_path):
    """Rank 0 would fail later with another error."""
    body = "joined()\ntime.sleep(0.3)\nif rank:\n    raise GuardError('loss is nan')\ntime.sleep(300)"
    assert outputs_of(tmp_path, body, [3, 3], within=5)[0] == ""


@pytest.mark.slow
def test_row_31_nan_on_one_rank_stops_all_before_the_update_with_the_rollouts(tmp_path, runs):
    """A whole run of a fork whose loss is nan in step 2 on rank 1: it says where; exit 3; finite weights."""
    fork = extended_fork(tmp_path, "train_grpo.py", NAN_FORK, name="nan")
    command = [str(fork), *grpo("--num-steps", "9", "--save-every", "1")[1:]]
    with started(tmp_path, [[*command, "--run-name", "row-31"]] * 2, MINIRL_RUNS=str(runs)) as job:
        assert job.codes(within=60) == [3, 3]
        (error,) = [
            line for rank in (0, 1) for line in job.output(rank).splitlines() if line.startswith("error")
        ]
        assert "Traceback" not in job.output(0) + job.output(1)
    # Of the step's two updates the first in which rank 1 has a microbatch.
    assert re.match("error: policy/loss is nan before update [23]", error)
    assert error.endswith("[rank 1, step 2, phase update]")
    assert len([rollout["reward"] for rollout in read_rollouts(runs / "row-31", 2)]) == 8
    (saved,) = (runs / "row-31" / "checkpoints").iterdir()
    assert all(bool(torch.isfinite(x).all()) for x in load_file(saved / "model.safetensors").values())


def test_row_31_the_metric_that_is_not_finite_is_named():
    """A loss, ratio or logprob; numbers outside of the update may be anything."""
    metrics = StepMetrics(4)
    metrics.add("importance/max", float("inf"))
    metrics.add_total("policy/loss", 1.0)
    metrics.refuse_nonfinite(update=7)
    metrics.add_max("policy/ratio_max", torch.tensor([1.0, float("inf")]))
    with pytest.raises(GuardError, match="policy/ratio_max is inf before update 7"):
        metrics.refuse_nonfinite(update=7)


def test_row_37_a_hang_names_every_ranks_step_phase_and_silence(tmp_path):
    """The one that does not wait for others is blamed, with its line; code 5, soon after the timeout."""
    body = "joined(1.5)\nif rank == 1:\n    watchdog.heartbeat('reward few')\n    time.sleep(300)\n"
    body += "process_group.barrier()"
    (report,) = [said for said in outputs_of(tmp_path, body, [5, 5], within=6) if "error: " in said]
    assert "no rank has moved for 1.5 s (--hang-timeout); it looks like rank 1" in report
    assert re.search(
        r"rank 0: step 3, phase reward, silent \d s, waiting for other ranks at process_group.py:\d+", report
    )
    assert re.search(
        r"rank 1: step 3, phase reward, reward few, silent \d s, at script.py:\d+ in main", report
    )


@pytest.mark.slow
def test_row_37_a_slow_rank_is_no_hang_and_a_stopped_process_is(tmp_path):
    """Rank 0 waits far longer than the timeout for a rank that moves; then that one's process is stopped."""
    body = "joined(hang_timeout=2.5)\nwhile rank == 1:\n    watchdog.heartbeat()\n    time.sleep(0.1)\n"
    body += "process_group.barrier()"
    with two_joined(tmp_path, body) as job:
        time.sleep(4)
        assert [process.poll() for process in job.processes] == [None, None]
        job.processes[1].send_signal(signal.SIGSTOP)
        assert job.processes[0].wait(12) == 5
        assert re.search(r"rank 1: .*process gone or stopped for \d", job.output(0))


def test_row_37_a_beat_costs_a_microsecond():
    """It is called for every token that is decoded."""
    start = time.process_time()
    for _ in range(100_000):
        watchdog.heartbeat()
    assert time.process_time() - start < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("into", ["| head -n 1", "> /dev/full 2>&1"])
def test_row_41_no_output_stops_a_run(tmp_path, into):
    """The reader of a pipe leaves, or the disk is full, in a locale of ASCII; the run goes on to its end."""
    body = "for i in range(300):\n    process_group.print0('\\u4f60' * 100)\nopen(sys.argv[1], 'w').close()"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    script = f"{sys.executable} {' '.join(python(tmp_path, body))} {tmp_path}/done"
    with started(tmp_path, [["bash", "-c", f"set -o pipefail; {script} {into}"]], **locale) as job:
        assert job.codes(within=30) == [0]
        assert ("\\u4f60" in job.output(0)) == ("head" in into)
        assert "Error" not in job.output(0)
    assert (tmp_path / "done").exists()


FULL_DISK = """
import resource
from pathlib import Path
from minirl.files import durable
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (5, before[1]))
try:
    durable.replace_file(Path(__file__).parent / "args.json", "{}" * 9)
finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
"""


def test_row_06_a_disk_that_is_full_at_the_start_is_no_bug(tmp_path):
    """One line with the file, and exit 2."""
    (said,) = outputs_of(tmp_path, FULL_DISK, [2], within=20)
    assert said == f"error: {tmp_path}/.half-args.json: File too large\n"


AMPERE, TURING, HOPPER = (8, 6), (7, 5), (9, 0)
FEW = "2 ranks on this node, and torch sees 1 CUDA device(s); for those use --nproc-per-node 1"
OLD = (
    "CUDA device 1, a card, has compute capability 7.5, and at least 8.0 (Ampere) is needed; "
    "leave it out by CUDA_VISIBLE_DEVICES"
)


@pytest.mark.parametrize(
    ("capabilities", "fault"),
    [
        ([AMPERE, HOPPER], None),
        ([AMPERE, HOPPER, TURING], None),
        ([HOPPER], FEW),
        ([AMPERE, TURING], OLD),
        ([], None),
    ],
    ids=["one each", "an old one that no rank uses", "fewer than ranks", "an old one", "none"],
)
def test_row_44_devices_that_cannot_serve_all_ranks_are_refused_or_left_with_a_note(
    capabilities, fault, monkeypatch, capsys
):
    """`cuda` is refused, `auto` takes the CPU and says why; two ranks on this node, of more on others."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 8, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a card")
    if capabilities and not fault:
        assert [process_group.device_type(device) for device in ("auto", "cuda")] == ["cuda", "cuda"]
        return
    assert process_group.device_type("auto") == process_group.device_type("cpu") == "cpu"
    assert capsys.readouterr().out == (f"note: --device auto takes the CPU: {fault}\n" if fault else "")
    with pytest.raises(InputError, match=re.escape(f"--device cuda: {fault or 'torch sees no CUDA device'}")):
        process_group.device_type("cuda")


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({}, ["expandable_segments:True", None]),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, ["backend:native", None]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:99"}, [None, "max_split_size_mb:99"]),
    ],
    ids=["unset", "set", "set by the older name"],
)
def test_on_cuda_freed_memory_can_be_joined_unless_the_user_set_it_and_bf16_sums_are_not_rounded(
    given, settings, monkeypatch
):
    """The allocator's settings are there before CUDA starts, which reads them; and a device is set up."""
    for name in process_group.ALLOCATOR_SETTINGS:
        monkeypatch.setenv(name, "")  # undoes the settings below
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = []

    def starts_cuda(device: str) -> str:
        found.extend(map(os.environ.get, process_group.ALLOCATOR_SETTINGS))
        return "cuda"

    monkeypatch.setattr(process_group, "device_type", starts_cuda)
    monkeypatch.setattr(process_group.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(watchdog.this_process, "hang_timeout", 0.0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    products = torch.backends.cuda.matmul
    assert products.allow_bf16_reduced_precision_reduction
    try:
        assert process_group.start(device="cuda") == torch.device("cuda", 0)
        assert not products.allow_bf16_reduced_precision_reduction
    finally:
        products.allow_bf16_reduced_precision_reduction = True
    assert found == settings


@pytest.mark.parametrize(
    ("device", "num_devices", "codes", "line"),
    [
        ("cuda", (2, 0), [2, 2], "error: --device cuda: torch sees no CUDA device; use --device cpu or auto"),
        (
            "auto",
            (2, 0),
            [2, 2],
            "error: --device: all ranks need the same, but rank 1 on cpu, rank 0 on cuda",
        ),
        ("auto", (1, 1), [0, 0], f"note: --device auto takes the CPU: {FEW}"),
    ],
)
def test_row_44_all_ranks_agree_on_the_device(tmp_path, device, num_devices, codes, line):
    """One exit code and one line in all, also where a rank sees other devices than the others do."""
    body = f"""
import torch
num_devices = {num_devices}[rank]
torch.cuda.is_available = lambda: num_devices > 0
torch.cuda.device_count = lambda: num_devices
torch.cuda.get_device_capability = lambda index: (8, 0)
torch.cuda.set_device = print
print(process_group.start(device={device!r}))
"""
    output = "".join(outputs_of(tmp_path, body, codes, within=15, LOCAL_WORLD_SIZE="2"))
    assert output.count(line) == 1
    assert output.count("cpu\n") == codes.count(0)
    assert "Traceback" not in output


@pytest.mark.slow
def test_row_43_a_wrong_flag_is_told_once_by_all_ranks(tmp_path):
    """Before there is a process group: code 2, one line in all."""
    with started(tmp_path, [grpo("--grop-size", "4")] * 2) as job:
        assert job.codes(within=30) == [2, 2]
        output = job.output(0) + job.output(1)
        assert output.count("--group-size") == 1
        assert "Traceback" not in output
