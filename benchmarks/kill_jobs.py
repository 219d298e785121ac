"""Kill whole jobs at random times until they have finished, and compare their results with an uninterrupted run's.

    python benchmarks/kill_jobs.py [--kills 25] [--seed 0] [--script train_ppo.py] [--runs FOLDER]

A job is two ranks under torchrun, with a checkpoint after every step and two epochs of two updates. A kill hits rank 0,
rank 1, torchrun's agent or all of them, by SIGKILL or SIGTERM, at a random time; then the same command is started
again. At the end every tensor file, every rollout and the columns of metrics.jsonl but times must be bitwise those of
the uninterrupted run. Linux only.
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
    *("--num-steps", "30"),
    *("--save-every", "1"),
    *("--eval-every", "10"),
    *("--num-epochs", "2"),
    *("--prompts-per-step", "6"),
    *("--eval-rows", "16"),
)


def start(script: str, runs: Path, name: str) -> subprocess.Popen:
    """Start the job of the run `name`, or start it again; its output is added to NAME.log."""
    log = (runs / f"{name}.log").open("a")
    flags = ("--run-name", name, *FLAGS)
    return start_script(script, *flags, runs=runs, stdout=log, stderr=log, start_new_session=True)


def read_environment(process: Path) -> dict[bytes, bytes]:
    """The environment variables of a process, from its folder in /proc."""
    variables = {}
    for entry in (process / "environ").read_bytes().split(b"\0"):
        name, _, value = entry.partition(b"=")
        variables[name] = value
    return variables


def workers(run_name: str) -> dict[str, int]:
    """Process ids of a run's live ranks, by "rank N". Found by their command lines and environments."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            variables = read_environment(process)
        except OSError:
            continue
        is_agent = b"torch.distributed.run" in command
        if run_name.encode() in command and not is_agent and b"RANK" in variables:
            found[f"rank {variables[b'RANK'].decode()}"] = int(process.name)
    return found


def kill_once(job: subprocess.Popen, run_name: str, rng: random.Random) -> str:
    """Send a random signal to a random part of the job; returns a description of it."""
    alive = {"agent": job.pid, **workers(run_name)}
    target = rng.choice(["rank 0", "rank 1", "agent", "all"])
    kind = rng.choice([signal.SIGKILL, signal.SIGTERM])
    for victim, pid in alive.items():
        if target in (victim, "all"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, kind)
    return f"{kind.name} to {target}"


def wait_until_gone(job: subprocess.Popen, run_name: str) -> float:
    """Seconds until no process of the job is left. Raises AssertionError after 45."""
    began = time.monotonic()
    while job.poll() is None or workers(run_name):
        assert time.monotonic() - began < 45, f"still alive: {workers(run_name)}"
        time.sleep(0.05)
    return time.monotonic() - began


def digest(content: bytes) -> str:
    """SHA-256."""
    return hashlib.sha256(content).hexdigest()


def result(folder: Path) -> dict[str, str]:
    """Digests of everything that must be equal."""
    digests = {}
    for path in (*(folder / "checkpoints").rglob("*.safetensors"), *(folder / "rollouts").iterdir()):
        digests[str(path.relative_to(folder))] = digest(path.read_bytes())
    numbers = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        # All but seconds, and tokens per second.
        numbers.append(
            {k: v for k, v in metrics.items() if not k.startswith(("time", "perf/tok_s_", "perf/idle"))}
        )
    digests["metrics"] = digest(json.dumps(numbers).encode())
    return digests


class Killer:
    """Runs jobs to their end, and kills them up to `max_kills` times on the way."""

    def __init__(self, script: str, runs: Path, *, max_kills: int, max_wait_s: float, seed: int):
        """max_wait_s: the greatest time from the start of a job to its kill."""
        self.script = script
        self.runs = runs
        self.max_kills = max_kills
        self.max_wait_s = max_wait_s
        self.num_kills = 0
        self.rng = random.Random(seed)

    def run_to_end(self, name: str) -> None:
        """Start the run's job again and again until it exits 0 without a kill."""
        is_done = False
        while not is_done:
            job = start(self.script, self.runs, name)
            is_done = self._end_or_kill(job, name)

    def _end_or_kill(self, job: subprocess.Popen, name: str) -> bool:
        """Wait for a random time, then kill the job if it still runs. Returns whether it exited 0."""
        if self.num_kills == self.max_kills:
            return job.wait() == 0
        try:
            return job.wait(self.rng.uniform(2, self.max_wait_s)) == 0
        except subprocess.TimeoutExpired:
            what = kill_once(job, name, self.rng)
        self.num_kills += 1
        gone_s = wait_until_gone(job, name)
        checkpoints = self.runs / name / "checkpoints"
        steps = sorted(path.name for path in checkpoints.iterdir()) if checkpoints.exists() else []
        print(
            f"kill {self.num_kills}: {what}, gone after {gone_s:.1f} s, agent {job.returncode}, {steps}",
            flush=True,
        )
        return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--script", default="train_grpo.py")
    parser.add_argument("--runs", type=Path, help="folder for the runs; default: a temporary one")
    args = parser.parse_args()
    runs = args.runs or Path(tempfile.mkdtemp())
    runs.mkdir(parents=True, exist_ok=True)

    began = time.monotonic()
    exit_code = start(args.script, runs, "reference").wait()
    assert exit_code == 0, (runs / "reference.log").read_text()[-2000:]
    whole_s = time.monotonic() - began
    expected = result(runs / "reference")

    killer = Killer(args.script, runs, max_kills=args.kills, max_wait_s=whole_s, seed=args.seed)
    num_runs = 0
    while killer.num_kills < args.kills:
        num_runs += 1
        name = f"killed-{num_runs}"
        killer.run_to_end(name)
        got = result(runs / name)
        differing = sorted(key for key in expected.keys() | got.keys() if expected.get(key) != got.get(key))
        print(f"run {name} is done: {len(got)} digests, {len(differing)} differ {differing[:3]}", flush=True)
        assert not differing
    print(f"RESULT kills={killer.num_kills} runs={num_runs} differing=0")


if __name__ == "__main__":
    main()
