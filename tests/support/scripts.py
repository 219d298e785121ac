"""The training scripts as users start them, and what their runs leave."""

import contextlib
import importlib
import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from minirl.ranks.time_account import TimeAccount
from minirl.run.flags import chosen_preset, parse
from support.cuda_rules import pad_as_on_cuda
from support.rank_pool import RankPool

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = ("train_grpo.py", "train_ppo.py")
FAST_LEARNING = ("--num-steps", "40", "--prompts-per-step", "32", "--num-minibatches", "4")


def script_command(script: Path, *flags: str, ranks: int) -> list[str]:
    """The script under torchrun, or plain Python for one rank."""
    torchrun = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    )
    return [sys.executable, *torchrun, str(script), *flags]


def script_environment(runs: Path) -> dict[str, str]:
    return {**os.environ, "MINIRL_RUNS": str(runs), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


BRANCHES = '''
from support.rollouts import in_two_branches


def with_branches(rollout):
    """Of the first prompt one rollout is in two branches, of the second one two, and so on."""
    rollout_id = rollout.rollout_id
    return in_two_branches(rollout) if rollout_id.sample <= rollout_id.prompt_ordinal else rollout


class BranchingSetup(Setup):
    def make_collector(self, *args, **options):
        collector = super().make_collector(*args, **options)
        step = collector._runner.step
        collector._runner.step = lambda: [with_branches(rollout) for rollout in step()]
        return collector


Setup = BranchingSetup
'''


def branching_fork(folder: Path, script: str) -> Path:
    """A copy of the script with rollouts in branches."""
    fork = folder / f"branching_{script}"
    head, guard, tail = (ROOT / script).read_text().partition('if __name__ == "__main__":')
    fork.write_text(head + BRANCHES + guard + tail)
    return fork


def run_script(script: Path, *flags: str, runs: Path, ranks: int = 2) -> str:
    """Run a script to its end and return its output; fails with its errors."""
    command, environment = script_command(script, *flags, ranks=ranks), script_environment(runs)
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def run_on_nodes(script: Path, *flags: str, runs: Path, nodes: int, ranks: int) -> None:
    """Run a script to its end on so many nodes of so many ranks, all of them on this host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={nodes}",
        f"--nproc-per-node={ranks}",
    ]
    torchrun += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    agents = []
    for node in range(nodes):
        command = [*torchrun, f"--node-rank={node}", str(script), *flags]
        agents.append(
            subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=script_environment(runs))
        )
    for agent in agents:
        _, errors = agent.communicate(timeout=600)
        assert agent.returncode == 0, errors[-4000:]


def start_script(script: Path, *flags: str, runs: Path, ranks: int = 2) -> subprocess.Popen:
    """Start a script in a session of its own, so that all its processes can be killed."""
    return subprocess.Popen(
        script_command(script, *flags, ranks=ranks),
        env=script_environment(runs),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def run_in_pool(pool: RankPool, script: str, *flags: str, runs: Path) -> str:
    """Run a script's main on every rank of a pool, which is faster than to start processes; rank 0's output.

    script: the name of one of the original ones, or the path of a fork, under a name of its own.
    """
    return pool.run(_run_main, script, str(runs), flags)[0]


def run_padded_as_on_cuda(pool: RankPool, script: str, *flags: str, runs: Path) -> str:
    """As `run_in_pool`, with CUDA's padding on the CPU: ranks without work get no tokens."""
    return pool.run(_run_main_padded_as_on_cuda, script, str(runs), flags)[0]


def _run_main_padded_as_on_cuda(rank: int, script: str, runs: str, flags: tuple[str, ...]) -> str:
    with pad_as_on_cuda():
        return _run_main(rank, script, runs, flags)


def run_beside_a_clock(
    pool: RankPool, script: str, *flags: str, runs: Path
) -> list[list[tuple[float, float]]]:
    """As `run_in_pool`; for each rank the moments before and after it began its account of time, and took it."""
    return pool.run(_run_main_beside_a_clock, script, str(runs), flags)


def _run_main_beside_a_clock(
    rank: int, script: str, runs: str, flags: tuple[str, ...]
) -> list[tuple[float, float]]:
    moments = []

    def watched(method: Callable[[TimeAccount], Any]) -> Callable[[TimeAccount], Any]:
        def call(account: TimeAccount) -> Any:
            before = time.monotonic()
            result = method(account)
            moments.append((before, time.monotonic()))
            return result

        return call

    with (
        mock.patch.object(TimeAccount, "begin", watched(TimeAccount.begin)),
        mock.patch.object(TimeAccount, "take", watched(TimeAccount.take)),
    ):
        _run_main(rank, script, runs, flags)
    return moments


def _run_main(rank: int, script: str, runs: str, flags: tuple[str, ...]) -> str:
    os.environ["MINIRL_RUNS"] = runs
    path = ROOT / script
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.import_module(path.stem)
    presets = getattr(module, "ALGORITHMS", {"default": {}})
    preset = chosen_preset("--algorithm", presets, flags)
    config = parse(module.Config, description="", preset=preset, arguments=flags)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = module.main(config)
    assert code == 0, f"exit code {code}"
    return printed.getvalue()


def wait_for(condition: Callable[[], bool], failure: str, timeout_s: float = 300) -> None:
    """Wait until the condition holds."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, failure
        time.sleep(0.05)


def read_metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def untimed(line: dict) -> dict:
    """The numbers of a step that a second run must give again: all but seconds, and what follows from them."""
    return {k: v for k, v in line.items() if not k.startswith(("time", "perf/tok_s_", "perf/idle"))}
