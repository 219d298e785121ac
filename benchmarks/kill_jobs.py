"""Kill whole jobs at random until they have finished, and compare what they leave with an uninterrupted run.

    python benchmarks/kill_jobs.py [--kills 25] [--seed 0] [--script train_ppo.py] [--runs FOLDER]

Two ranks under torchrun, a checkpoint after every step, two epochs of two updates. A kill hits rank 0, rank 1, the
agent or all of them, by SIGKILL or SIGTERM, at a random time; then the same command is given again. At the end every
tensor file, every rollout and the time-free columns of metrics.jsonl must be bitwise the reference's. Linux only.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from workload import start_script

FLAGS = (
    "--num-steps 30 --save-every 1 --eval-every 10 --num-epochs 2 --prompts-per-step 6 --eval-rows 16".split()
)


def start(script: str, runs: Path, name: str) -> subprocess.Popen:
    log = (runs / f"{name}.log").open("a")
    flags = ("--run-name", name, *FLAGS)
    return start_script(script, *flags, runs=runs, stdout=log, stderr=log, start_new_session=True)


def workers(name: str) -> dict[str, int]:
    """The ranks of a run that are alive, by RANK; found by their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            variables = dict(x.partition(b"=")[::2] for x in (folder / "environ").read_bytes().split(b"\0"))
        except OSError:
            continue
        if name.encode() in command and b"torch.distributed.run" not in command and b"RANK" in variables:
            found[f"rank {variables[b'RANK'].decode()}"] = int(folder.name)
    return found


def kill_once(job: subprocess.Popen, name: str, rng: random.Random) -> str:
    """Send a random signal to a random part of the job; what was done."""
    alive = {"agent": job.pid, **workers(name)}
    target, kind = (
        rng.choice(["rank 0", "rank 1", "agent", "all"]),
        rng.choice([signal.SIGKILL, signal.SIGTERM]),
    )
    for victim, pid in alive.items():
        if target in (victim, "all"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, kind)
    return f"{kind.name} to {target}"


def wait_until_gone(job: subprocess.Popen, name: str) -> float:
    """Seconds until no process of the job is left; an error after 45."""
    began = time.monotonic()
    while job.poll() is None or workers(name):
        assert time.monotonic() - began < 45, f"still alive: {workers(name)}"
        time.sleep(0.05)
    return time.monotonic() - began


def result(folder: Path) -> dict[str, str]:
    """Digests of all that must be equal."""
    files = [*(folder / "checkpoints").rglob("*.safetensors"), *(folder / "rollouts").iterdir()]
    digests = {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    numbers = [{k: v for k, v in line.items() if not k.startswith(("time/", "perf/"))} for line in lines]
    return digests | {"metrics": hashlib.sha256(json.dumps(numbers).encode()).hexdigest()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--script", default="train_grpo.py")
    parser.add_argument("--runs", type=Path)
    arguments = parser.parse_args()
    runs, rng, kills, chain = arguments.runs or Path(tempfile.mkdtemp()), random.Random(arguments.seed), 0, 0
    runs.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    assert start(arguments.script, runs, "reference").wait() == 0, (runs / "reference.log").read_text()[
        -2000:
    ]
    whole_s, expected = time.monotonic() - began, result(runs / "reference")
    while kills < arguments.kills:
        chain, is_done = chain + 1, False
        name = f"killed-{chain}"
        while not is_done:
            job = start(arguments.script, runs, name)
            if kills < arguments.kills:
                try:
                    is_done = job.wait(rng.uniform(2, whole_s)) == 0
                except subprocess.TimeoutExpired:
                    done, kills = kill_once(job, name, rng), kills + 1
                    gone_s = wait_until_gone(job, name)
                    checkpoints = runs / name / "checkpoints"
                    steps = [path.name for path in checkpoints.iterdir()] if checkpoints.exists() else []
                    print(
                        f"kill {kills}: {done}, gone after {gone_s:.1f} s, agent {job.returncode}, {sorted(steps)}",
                        flush=True,
                    )
            else:
                is_done = job.wait() == 0
        got = result(runs / name)
        differing = sorted(key for key in expected.keys() | got.keys() if expected.get(key) != got.get(key))
        print(f"run {name} is done: {len(got)} digests, {len(differing)} differ {differing[:3]}", flush=True)
        assert not differing
    print(f"RESULT kills={kills} runs={chain} differing=0")


if __name__ == "__main__":
    main()
