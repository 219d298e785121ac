"""Faults of ranks: which rank reports an error, the exit codes, and how soon all ranks exit.

Most cases run a short script on processes with torchrun's variables; a few run a whole job.
"""

import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore

from minirl.errors import InputError
from minirl.ranks import launch, process_group
from support.jobs import LIMIT_S, ROOT, started, torchrun, wait_for
from support.processes import is_alive
from support.resuming import digests
from support.scripts import all_held_out, extended_fork, read_metrics, read_rollouts, trained

PRELUDE = f"""
import math, os, signal, sys, time
from datetime import timedelta
from types import SimpleNamespace
import torch
import torch.distributed as dist
from minirl.ranks import launch, process_group
from minirl.errors import GuardError, InputError, RewardError

LIMIT_S = {LIMIT_S}

def joined():
    process_group.start(hang_timeout=LIMIT_S)
    launch.announce_phase("step 3, phase reward")
    print("joined", flush=True)

rank = process_group.rank()
"""

# Ranks 0 and 2 report rank 1. Their clock stands still until both have raised their errors.
BOTH = """
def wait_until_both_are_in(phase):
    while {launch.rendezvous().get(f"phase/{rank}").decode() for rank in (0, 2)} != {phase}:
        time.sleep(0.01)

def sleep(seconds):
    wait_until_both_are_in("")
    launch.time.monotonic = lambda: math.inf

launch.time = SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep)
"""

NAN_FORK = """
from minirl.ranks.process_group import rank

step, good_loss, good_skippable = 0, token_loss, skippable_rollouts

def skippable_rollouts(*args):  # called once in a step
    global step
    step += 1
    return good_skippable(*args)

def token_loss(config, micro, new, entropy):
    loss, ratio = good_loss(config, micro, new, entropy)
    return (loss * torch.nan if rank() == 1 and step == 2 else loss), ratio

"""


def python(folder: Path, body: str, before: str = "") -> list[str]:
    """Write a script whose `main` is `body`, and return its command. before: code at module level."""
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    (folder / "script.py").write_text(f"{PRELUDE}{before}\ndef main():\n{lines}\nlaunch.run(main)\n")
    return [str(folder / "script.py")]


def grpo(*flags: str) -> list[str]:
    return [str(ROOT / "train_grpo.py"), *"--prompts-per-step 2 --group-size 4".split(), *flags]


def children(pid: int) -> list[int]:
    """Return the pids of a process's children."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def outputs_of(folder: Path, body: str, codes: list[int]) -> str:
    """Run a script on ranks that must exit with these codes; return their joint output after joining."""
    with started(folder, [python(folder, body)] * len(codes)) as job:
        assert job.codes() == codes
        return "".join(job.output(rank) for rank in range(len(codes))).replace("joined\n", "")


def test_row_62_a_rank_without_torchruns_other_variables_is_refused_at_once(tmp_path):
    with started(tmp_path, [python(tmp_path, "joined()")], WORLD_SIZE="2") as job:
        assert job.codes() == [2]
        assert "is set without MASTER_ADDR, MASTER_PORT, RANK" in job.output(0)


@pytest.mark.parametrize("number", [0, signal.SIGSTOP, signal.SIGKILL])
def test_rows_01_and_37_a_hang_names_the_rank_and_its_phase_and_so_does_a_kill(tmp_path, number):
    """Ranks that wait for rank 1 are not named, and their connection errors are hidden. Fault 42: a stopped process."""
    body = f"""joined()
if rank == 1:
    wait_until_both_are_in("step 3, phase update")
    os.kill(os.getpid(), {number:d})
    time.sleep(LIMIT_S)
launch.announce_phase("step 3, phase update")
gloo = dist.group.WORLD._get_backend(torch.device("cpu"))
assert gloo.options._timeout == timedelta(seconds=LIMIT_S)
gloo._set_default_timeout(timedelta(seconds=1))
process_group.barrier()"""
    with started(tmp_path, [python(tmp_path, body, before=BOTH)] * 3) as job:
        assert [job.processes[rank].wait(LIMIT_S) for rank in (0, 2)] == [1, 1]
        (said,) = (job.output(0) + job.output(2)).replace("joined\n", "").splitlines()
    assert said.startswith(
        "error: rank 1 (step 3, phase reward) has ended, hangs or is slower than --hang-timeout [rank"
    )


@pytest.mark.slow
def test_rows_01_03_and_04_a_run_under_torchrun_outlives_the_death_of_ranks_and_launcher(tmp_path, runs):
    """--max-restarts restarts a killed rank, ranks die with a killed torchrun, and SIGTERM saves the step.

    The run continues after each fault: every step is logged once, and no process is left. Faults 1, 3 and 4.
    """
    flags = ("--num-steps", "10000", "--save-every", "4", "--run-name", "restarted")
    command = torchrun(*grpo(*flags), options=["--standalone", "--max-restarts=1"])
    with started(tmp_path, [command], MINIRL_RUNS=str(runs)) as job:
        job.until("step     6/", 0)
        os.kill(children(job.processes[0].pid)[1], signal.SIGKILL)
        job.until("resuming after step 4", 0)
        wait_for(lambda: job.output(0).count("step     5/") == 2, "no step after the restart")
        ranks = children(job.processes[0].pid)
        assert len(ranks) == 2
        job.processes[0].kill()
        wait_for(lambda: not any(map(is_alive, ranks)), "ranks outlived torchrun")
    with started(tmp_path, [command], MINIRL_RUNS=str(runs)) as job:
        job.until("step    10/", 0)
        ranks = children(job.processes[0].pid)
        job.processes[0].terminate()
        assert job.codes() == [1]  # torchrun's exit code, not a rank's
        assert not any(map(is_alive, ranks))
        assert "Traceback" not in job.output(0).partition("\ncheckpoint ")[0]
    steps = [line["step"] for line in read_metrics(runs / "restarted")]
    assert steps == list(range(1, len(steps) + 1))
    assert 10 <= len(steps) < 10000
    assert (runs / "restarted" / "checkpoints" / f"{len(steps):06d}").is_dir()


LOOP = """joined()
while not (stop := process_group.stop_requested()):
    time.sleep(0.1)
print("saved")
return 128 + stop
"""


@pytest.mark.parametrize("number", launch.STOP_SIGNALS)
def test_rows_04_and_05_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path, number):
    """All ranks save, then exit with the signal's code."""
    with started(tmp_path, [python(tmp_path, LOOP)] * 2) as job:
        job.until("joined", 0, 1)
        job.processes[1].send_signal(number)
        assert job.codes() == [128 + number] * 2
        assert [job.output(rank).count("saved") for rank in (0, 1)] == [1, 1]


def test_row_04_a_second_sigterm_exits_at_once(tmp_path):
    """The second signal interrupts even user code. A signal delivered twice counts once, an ignored signal never."""
    ignore = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    body = """joined()
signal.raise_signal(signal.SIGHUP)
for now in (0.0, 0.9, 1.1):
    print(now, flush=True)
    launch.time = SimpleNamespace(monotonic=lambda: now)
    signal.raise_signal(signal.SIGTERM)
"""
    with started(tmp_path, [python(tmp_path, body, before=ignore)]) as job:
        assert job.codes() == [143]
        said = "SIGTERM: stopping after this step; send the signal again to exit at once"
        assert job.output(0).splitlines() == ["joined", "0.0", said, "0.9", "1.1"]


def test_row_05_ctrl_c_before_the_first_step_exits_at_once_and_a_signal_ends_a_forked_child(tmp_path):
    """Nothing has to be saved yet. SIGUSR1 prints the stacks. Signals to a forked child do not affect the run."""
    body = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 has one for forks beside threads
launch.announce_phase("step 1, phase generate")
has_forked, pipe = os.pipe()
if child := os.fork():
    os.read(has_forked, 1)  # Python drops signals that come while it forks
    os.kill(child, signal.SIGTERM)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    launch.announce_phase(launch.STARTUP_PHASE)
else:
    os.write(pipe, b"x")
time.sleep(LIMIT_S)
"""
    with started(tmp_path, [python(tmp_path, body)]) as job:
        job.until("child 143", 0)
        job.processes[0].send_signal(signal.SIGUSR1)
        job.until('script.py", line', 0)
        job.processes[0].send_signal(signal.SIGINT)
        assert job.codes() == [130]


@pytest.mark.parametrize(
    ("body", "codes", "message"),
    [
        (
            "joined()\nif rank == 1:\n    raise RewardError('/home/igloo/a')\nprocess_group.barrier()",
            [1, 4],
            r"error: /home/igloo/a \[rank 1, step 3, phase reward\]",
        ),
        (
            "joined()\nif rank == 1:\n    raise RuntimeError('gloo')\nprocess_group.barrier()",
            [1, 1],
            r"rank 1, step 3, phase reward raised:\nTraceback(.|\n)*RuntimeError: gloo",
        ),
        (
            "launch.REPORT_S = LIMIT_S\nraise InputError('no')",
            [2, 2],
            r"error: no \[rank \d, before the first step\]",
        ),
        (
            "joined()\nlaunch.REPORT_S = LIMIT_S\nraise InputError('no')",
            [2, 2],
            r"error: no \[rank \d, step 3, phase reward\]",
        ),
        ("open('/', 'w')", [2], r"error: \[Errno 21\] Is a directory: '/' \[rank 0, before the first step\]"),
    ],
)
def test_rows_06_and_23_an_error_is_printed_once_and_ends_all_ranks(tmp_path, body, codes, message):
    """One rank raises an error while the other waits, or both raise one. An unwritable file gives no traceback."""
    assert re.fullmatch(message, outputs_of(tmp_path, body, codes).strip())


def test_row_38_out_of_memory_is_reported_with_its_phase_plan_and_flags(tmp_path, runs):
    """The update runs out of memory."""
    too_large = "def token_loss(*args):\n    torch.empty(2**50)\n"
    fork = extended_fork(tmp_path, too_large, name="memory")
    with started(tmp_path, [[str(fork), *grpo()[1:]]], MINIRL_RUNS=str(runs)) as job:
        assert job.codes() == [2]
        plan = r"training \S+ GB: gradients .*; lower --max-tokens-per-microbatch.*"
        where = r"\[rank 0, step 1, phase update: .*allocate memory.*\]"
        assert re.search(f"^error: out of memory; planned: {plan} {where}$", job.output(0), re.MULTILINE)


@pytest.mark.slow
def test_row_31_nan_on_one_rank_stops_all_before_the_update_with_the_rollouts(tmp_path, runs):
    """A fork whose loss is NaN on rank 1 in step 2 names a parameter, exits with code 3 and saves finite weights only.

    The run folder contains the script that ran.
    """
    fork = extended_fork(tmp_path, NAN_FORK, name="nan")
    command = [str(fork), *grpo("--num-steps", "9", "--save-every", "1", "--run-name", "row-31")[1:]]
    with started(tmp_path, [command] * 2, MINIRL_RUNS=str(runs)) as job:
        assert job.codes() == [3, 3]
        said = job.output(0) + job.output(1)
    error = r"^error: gradient norm is nan: first in model\S+\. Nothing was updated.* \[rank ., step 2, phase update\]$"
    assert len(re.findall(error, said, re.MULTILINE)) == said.count("error") == 1
    assert len(read_rollouts(runs / "row-31", 2)) == 8
    assert (runs / "row-31" / fork.name).read_bytes() == fork.read_bytes()
    (saved,) = (runs / "row-31" / "checkpoints").iterdir()
    assert all(bool(x.isfinite().all()) for x in load_file(saved / "model.safetensors").values())


@pytest.mark.slow
@pytest.mark.parametrize("into", ["| head -n 1", "> /dev/full 2>&1"])
def test_row_41_failed_output_does_not_stop_a_run(tmp_path, into):
    """A closed pipe or a full disk, in an ASCII locale: the run continues to its end."""
    body = "for i in range(300):\n    process_group.print0('\\u4f60' * 100)\nopen(sys.argv[1], 'w').close()"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    script = f"{sys.executable} {' '.join(python(tmp_path, body))} {tmp_path}/done"
    with started(tmp_path, [["bash", "-c", f"set -o pipefail; {script} {into}"]], **locale) as job:
        assert job.codes() == [0]
        assert ("\\u4f60" in job.output(0)) == ("head" in into)
        assert "Error" not in job.output(0)
    assert (tmp_path / "done").exists()


def test_row_44_a_device_that_is_too_old_is_refused_for_every_model(monkeypatch):
    """The message names the device's index on this node."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9 - 2 * index, 5))
    with pytest.raises(
        InputError, match=r"CUDA device 1 has compute capability \(7, 5\), but \(8, 0\) \(Ampere\) or newer"
    ):
        process_group.select_device(may_use_cpu=True)


def test_row_44_the_embedded_model_needs_no_gpu_per_rank(tmp_path, runs):
    """With more ranks than devices, all ranks compute on the CPU, and one line says so."""
    body = f"""
import train_grpo
os.environ.update(MINIRL_RUNS={str(runs)!r}, LOCAL_WORLD_SIZE="2")
torch.cuda.device_count = lambda: 1
return train_grpo.main(train_grpo.Config(num_steps=1, prompts_per_step=2))
"""
    line = "2 ranks on a node where torch sees 1 CUDA device(s): the ranks run on the CPU\n"
    assert outputs_of(tmp_path, body, [0, 0]).count(line) == 1


def test_on_cuda_a_rank_gets_its_share_of_its_own_node(tmp_path):
    """Each of two ranks on a node (of four in total) gets its own device and half of the cores and host memory.

    The allocator is configured before CUDA starts, and bf16 matmuls accumulate in fp32.
    """
    body = """
from minirl.run import planning
os.environ.update(RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
def starts_cuda(index):
    print(os.environ["PYTORCH_ALLOC_CONF"], index)
    return (8, 0)
torch.cuda.device_count = lambda: 2
torch.cuda.get_device_capability = starts_cuda
torch.cuda.set_device = print
os.sched_getaffinity = lambda pid: range(8)
dist.init_process_group = lambda **options: print(options["rank"], options["world_size"])
print(process_group.start(shares_cores=True), torch.get_num_threads())
planning.free_memory = lambda: 100
print(planning.this_machine(torch.device("cpu")).free_bytes)
print(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction)
"""
    expected = ["expandable_segments:True 1", "cuda:1", "3 4", "cuda:1 4", "50.0", "False"]
    assert outputs_of(tmp_path, body, [0]).splitlines() == expected


def test_row_62_nodes_that_see_different_copies_are_refused(tmp_path, embedded_model):
    """Every rank raises: otherwise checkpoints would lack files, or ranks would train different things.

    A node with fewer devices than ranks is rejected for every model but the bundled one. Fault 44.
    """
    body = f"""
import json, shutil
from pathlib import Path
import train_grpo
from minirl.run.setup import Setup
os.environ["LOCAL_WORLD_SIZE"] = "1"
own = Path({str(tmp_path)!r}, str(rank))
shutil.copytree({str(embedded_model)!r}, own)
(own / "a").mkdir()
(own / "a/lock").touch()
weights = (own / "model.safetensors").read_bytes()
(own / "model.safetensors").write_bytes(weights[:-1000] + bytes([rank]) * 1000)
rows = [json.dumps(dict(prompt=text)) for text in ("1", "12")]
(own / "rows").write_text(chr(10).join(rows[:: 1 - 2 * rank]))
joined()
names = ("runs", "model", "data", "command")
for differing in (*names, "restarts", "devices"):
    runs, model, data, command = (own if name == differing else own.with_name("0") for name in names)
    os.environ["LOCAL_WORLD_SIZE"] = "12"[differing == "devices"]
    torch.cuda.device_count = lambda: int(differing == "devices")
    os.environ["MINIRL_RUNS"] = str(runs)
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "01"[differing == "restarts"]
    sys.argv = [str(command)]
    os.chdir(model)
    config = train_grpo.Config(model=".", data=str(data / "rows"), max_new_tokens=4, run_name="a")
    try:
        Setup(config, name="a", rewards=dict(length=len))
    except InputError as error:
        print(error)
"""
    said = outputs_of(tmp_path, body, [0, 0])
    node = socket.gethostname()
    different = f" must be the same on all ranks, but ranks on {node} and {node} disagree\n"
    for message in (
        f"/a: the run folder ($MINIRL_RUNS){different}",
        f".: the weights{different}",
        f"the prompts and their order{different}",
        f"the command line and the device type{different}",
        "--max-restarts: works only on one node",
        "use --nproc-per-node 1, or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU\n",
    ):
        assert said.count(message) == 2, said


KILLED_FORK = """
import os, signal
from minirl.ranks import launch

good_weights = rollout_loss_weights

def rollout_loss_weights(*args):
    where = [os.environ["TORCHELASTIC_RUN_ID"], os.environ["RANK"], launch.this_process.phase]
    if where == ["killed", "3", "step 2, phase score"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return good_weights(*args)


"""


@pytest.mark.slow
def test_rows_01_and_12_two_nodes_train_die_and_resume_as_four_ranks_of_one(four_ranks, tmp_path, runs):
    """Two torchruns rendezvous over c10d, and a rank of the second is killed. All bits equal four ranks on one node."""
    fork = extended_fork(tmp_path, KILLED_FORK, name="nodes")
    flags = (
        "--num-steps 3 --save-every 1 --eval-every 0 --keep-checkpoints 0 --prompts-per-step 5 --group-size 4"
    )
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, codes in (("killed", [1, 1]), ("resumed", [0, 0])):
        options = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{store.port}"]
        command = torchrun(fork, *flags.split(), "--run-name=nodes", options=[*options, f"--rdzv-id={name}"])
        with started(tmp_path, [command] * 2, MINIRL_RUNS=str(runs)) as job:
            assert job.codes() == codes
            said = job.output(0) + job.output(1)
    assert "resuming after step 1" in said
    whole = trained(four_ranks, runs / "whole", "train_grpo.py", flags, under=all_held_out)
    assert digests(runs / "nodes") == digests(whole)
