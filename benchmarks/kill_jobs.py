"""Kill jobs at random times until they finish, and compare their results with an uninterrupted run's.

    python benchmarks/kill_jobs.py [--kills 25] [--seed 0] [--script train_ppo.py]

A job is two ranks under torchrun, with a checkpoint after every step and two epochs of two updates. SIGKILL or SIGTERM
hits rank 0, rank 1, torchrun or all of them, at a random time or in the middle of a save; then the same command is
started again. In the end, every tensor of the checkpoints, every rollout and every column of metrics.jsonl except times
must be bitwise equal to the uninterrupted run's. Linux only.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from workload import ROOT, docstring_parser, start_script

FLAGS = "--num-steps 30 --save-every 1 --eval-every 10 --num-epochs 2 --prompts-per-step 6"


def start(script: str, runs: Path, name: str) -> subprocess.Popen:
    """Start or restart the job for the run `name`. Its output is appended to NAME.log."""
    log = (runs / f"{name}.log").open("a")
    flags = ("--run-name", name, *FLAGS.split())
    return start_script(script, *flags, runs=runs, stdout=log, stderr=log, start_new_session=True)


def ranks_of(job: subprocess.Popen) -> list[int]:
    """Return the process ids of torchrun's children in rank order."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


def kill_at_random(job: subprocess.Popen, folder: Path, rng: random.Random, max_wait_s: float) -> str:
    """Send a random signal to a random part of the job, unless the job ends first. Return a description of the kill."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(rng.uniform(2, max_wait_s))
    in_save = rng.random() < 0.5
    while in_save and job.poll() is None and not any(folder.glob("checkpoints/.half-*/resume")):
        time.sleep(0.0005)
    time.sleep(rng.uniform(0, 0.02))
    pids = [job.pid, *ranks_of(job)]
    target = rng.choice([pids, *([pid] for pid in pids)])
    kind = rng.choice([signal.SIGKILL, signal.SIGTERM])
    if job.poll() is not None:
        return "none"
    for pid in target:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, kind)
    began = time.monotonic()
    while job.poll() is None or any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() - began < 45, f"still alive: {pids}"
        time.sleep(0.05)
    is_half_made = any(folder.glob("checkpoints/.*"))
    steps = [path.name for path in sorted(folder.glob("checkpoints/[0-9]*"))]
    seconds = time.monotonic() - began
    return f"{kind.name} to {len(target)} of {len(pids)}, half a save {is_half_made}, gone in {seconds:.1f} s, {steps}"


def main() -> None:
    parser = docstring_parser(__doc__)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--script", default="train_grpo.py")
    args = parser.parse_args()
    sys.path.append(str(ROOT / "tests"))
    from support.resuming import digests

    rng = random.Random(args.seed)
    num_kills = num_runs = 0
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        began = time.monotonic()
        assert start(args.script, runs, "whole").wait() == 0, (runs / "whole.log").read_text()[-2000:]
        whole_s = time.monotonic() - began
        expected = digests(runs / "whole")
        while num_kills < args.kills:
            num_runs += 1
            killed = runs / f"killed-{num_runs}"
            job = start(args.script, runs, killed.name)
            while num_kills < args.kills and (what := kill_at_random(job, killed, rng, whole_s)) != "none":
                num_kills += 1
                print(f"kill {num_kills}: {what}", flush=True)
                job = start(args.script, runs, killed.name)
            assert job.wait() == 0, killed.with_suffix(".log").read_text()[-2000:]
            found = digests(killed)
            names = expected.keys() | found.keys()
            differing = sorted(name for name in names if expected.get(name) != found.get(name))
            assert not differing, f"of {len(expected)} digests {len(differing)} differ: {differing[:3]}"
    print(f"RESULT kills={num_kills} runs={num_runs} digests={len(expected)} differing=0")


if __name__ == "__main__":
    main()
