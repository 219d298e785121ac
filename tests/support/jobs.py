"""Run programs as ranks: processes with torchrun's environment variables, and files for their output."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore

from support.forked import ForkedScript, python_path

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 600.0  # timeout for operations that take seconds, which only a hang reaches, even on a busy machine


@dataclass
class Job:
    """Processes, one per rank (or only torchrun), the files with their output, and the ranks' store."""

    processes: list[ForkedScript | subprocess.Popen]
    files: list[Path]
    store: TCPStore

    def output(self, rank: int) -> str:
        return self.files[rank].read_text(errors="replace")

    def until(self, text: str, *ranks: int) -> None:
        """Wait until these ranks have printed the text."""
        wait_for(lambda: all(text in self.output(rank) for rank in ranks), f"{text!r} was not printed")

    def codes(self) -> list[int]:
        """Wait for all processes; return their exit codes."""
        return [process.wait(LIMIT_S) for process in self.processes]

    def kill(self) -> None:
        """Kill all processes and everything that they started."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(condition: Callable[[], object], message: str) -> None:
    """Wait until the condition holds."""
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until, message
        time.sleep(0.05)


def start(folder: Path, commands: Sequence[Sequence[str]], **variables: str) -> Job:
    """Start commands, as ranks if there are several. A command that begins with a script is forked (`support.forked`).

    folder: folder for output files and runs.
    """
    base = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    base |= {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "MINIRL_RUNS": str(folder), **variables}
    # Like torchrun's store, this store outlives the ranks.
    job = Job([], [], TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.store.port)}
    address["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    for rank, command in enumerate(commands):
        ranks = {"RANK": str(rank), "WORLD_SIZE": str(len(commands)), **address}
        environment = base | (ranks if len(commands) > 1 else {})
        job.files.append(folder / f"output-{rank}")
        job.files[-1].touch()
        if command[0].endswith(".py"):
            job.processes.append(ForkedScript(command, env=environment, output=job.files[-1]))
            continue
        with job.files[-1].open("w") as out:
            job.processes.append(
                subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
            )
    return job


@contextmanager
def started(folder: Path, commands: Sequence[Sequence[str]], **variables: str) -> Iterator[Job]:
    """Start a job with `start`; kill all its processes at the end of the block."""
    job = start(folder, commands, **variables)
    try:
        yield job
    finally:
        job.kill()


def torchrun(script: str | Path, *flags: str, options: Sequence[str]) -> list[str]:
    """Return the torchrun command that starts a script on two ranks of a node with these options."""
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node=2"]
    return [*command, str(script), *flags]
