"""Run a script's `main` on a rank, and end the process after an error, a signal or the loss of another rank.

Ranks wait for each other in collectives. A collective raises if the connection to another rank breaks or if a
rank does not arrive within --hang-timeout seconds. When one rank exits, torchrun ends the other ranks.
"""

import contextlib
import ctypes
import faulthandler
import functools
import io
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist

from minirl.errors import InputError, refuse

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Times in seconds.
START_TIMEOUT_S = 300.0  # maximum time between the starts of two ranks
REPEAT_DELAY_S = 1.0  # a second signal within this delay is ignored: torchrun may deliver one signal twice
REPORT_S = 3.0  # time that a failed rank waits for other ranks to hit the same error before it reports
POLL_S = 0.1  # interval for polling the other ranks
GLOO_SOURCE = re.compile(r"/gloo/\S+\.cc:\d+\]")
# Out-of-memory errors raised by Python, the host, CUDA and the CUDA libraries.
OUT_OF_MEMORY = re.compile(r"MemoryError|out of memory|allocate memory|ALLOC_FAILED")
STARTUP_PHASE = "before the first step"  # phase of a rank that has nothing to save yet


@dataclass
class _ProcessState:
    """Current phase of this process, and its pending stop request."""

    phase: str = STARTUP_PHASE  # current step and phase
    stop_signal: int = 0  # number of the signal that requested a stop after the step, or 0
    stop_requested_at: float = 0.0  # time of that signal, from time.monotonic()
    pid: int = 0  # pid of the process that called `run`
    # Returns the memory planned for a phase and the flags that lower it.
    memory_advice: Callable[[str], str] = lambda phase: "nothing yet"


this_process = _ProcessState()


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run a script's `main` and exit with the code that `main` returns (None: 0), or with the exit code of its error.

    Every rank must call this function, which ends with a collective. An error that all ranks raise is printed once.
    An error with an `exit_code` (`minirl.errors`) is printed as a message, any other error with its traceback.

    SIGTERM, SIGINT and SIGHUP (a closed terminal) request a stop at the end of the step
    (`process_group.stop_requested`). A second signal, or a signal before the first step, ends the process at once.
    Signals that were ignored at startup (such as SIGHUP under nohup) stay ignored. SIGUSR1 prints the stacks of all
    threads. If torchrun dies, the process dies too.
    """
    _prepare_process()
    try:
        announce_phase(STARTUP_PHASE)
        exit_code = main() or 0
        if dist.is_initialized():
            dist.barrier()
    except (Exception, SystemExit) as error:
        exit_code = _report_error(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # During a normal interpreter exit, gloo's threads occasionally abort a finished run ("terminate called without an
    # active exception", torch 2.13), which torchrun would then report as failed.
    os._exit(exit_code)


def announce_phase(phase: str) -> None:
    """Publish the step and phase that this rank is starting, for use in other ranks' error reports. Not collective."""
    this_process.phase = phase
    rendezvous().set(f"phase/{_rank()}", phase)


@functools.cache
def rendezvous() -> Any:
    """Return the key-value store that all ranks share: torchrun's, rank 0's, or a local one for a single process.

    Raises InputError if only some of torchrun's environment variables are set, and torch's DistError if the store
    cannot be reached within START_TIMEOUT_S.
    """
    missing_variables = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - os.environ.keys()
    if {"RANK", "WORLD_SIZE"} <= missing_variables:
        return dist.HashStore()
    refuse(
        missing_variables,
        f"RANK or WORLD_SIZE is set without {', '.join(sorted(missing_variables))}: use torchrun, or unset them",
    )
    store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=START_TIMEOUT_S)))
    # torchrun keeps its store when it restarts the ranks, so each attempt's keys need their own prefix.
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)


def _prepare_process() -> None:
    """Make the process die with torchrun, install signal handlers, and make stdout accept any character."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    this_process.pid = os.getpid()
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _handle_stop_signal)
    faulthandler.register(signal.SIGUSR1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Otherwise printing a character that the locale cannot encode would raise and end the run.
        sys.stdout.reconfigure(errors="backslashreplace")


def _handle_stop_signal(number: int, frame: FrameType | None) -> None:
    """Request a stop at the end of the step, or exit at once; see `run`."""
    now = time.monotonic()
    is_repeated_signal = this_process.stop_signal and now - this_process.stop_requested_at > REPEAT_DELAY_S
    is_forked_child = os.getpid() != this_process.pid
    if is_repeated_signal or is_forked_child or this_process.phase == STARTUP_PHASE:
        os._exit(128 + number)
    if not this_process.stop_signal:
        this_process.stop_signal = number
        this_process.stop_requested_at = now
        if _rank() == 0:
            signal_name = signal.Signals(number).name
            stop_message = f"{signal_name}: stopping after this step; send the signal again to exit at once\n"
            with contextlib.suppress(OSError):  # the signal may interrupt a print, which is not reentrant
                os.write(2, stop_message.encode())


def _report_error(error: BaseException) -> int:
    """Print the error raised by `main`, unless another rank failed first; return the exit code."""
    for number in STOP_SIGNALS:  # torchrun sends these signals if another rank exits first
        signal.signal(number, signal.SIG_IGN)
    is_first, ranks_without_error = True, []
    # The store may be missing, or may have disappeared with torchrun or rank 0.
    with contextlib.suppress(dist.DistError, InputError):
        is_first = rendezvous().add("num_errors", 1) == 1
        ranks_without_error = _ranks_without_error()
    exit_code, message = _exit_code_and_message(error, ranks_without_error)
    if is_first and message:
        with contextlib.suppress(OSError):
            print(message, file=sys.stderr, flush=True)
    if _rank() == 0:
        # Without torchrun, rank 0 hosts the store, which other ranks may still be reading.
        time.sleep(2 * POLL_S)
    return exit_code


def _ranks_without_error() -> list[str]:
    """Wait up to REPORT_S for all ranks to fail; return the ranks that have not failed, with their phases."""
    store = rendezvous()
    store.set(f"phase/{_rank()}", "")
    ranks = range(int(os.environ.get("WORLD_SIZE", 1)))
    deadline = time.monotonic() + REPORT_S
    while True:
        phase_by_rank = {
            rank: store.get(f"phase/{rank}").decode() for rank in ranks if store.check([f"phase/{rank}"])
        }
        missing = [f"rank {rank} ({phase})" for rank, phase in phase_by_rank.items() if phase]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(POLL_S)


def _exit_code_and_message(error: BaseException, missing: Sequence[str]) -> tuple[int, str]:
    """Return the exit code and the message ("": print nothing) for an error that `main` raised.

    missing: the ranks that have not reported an error, with their phases.
    """
    rank_and_phase = f"rank {_rank()}, {this_process.phase}"
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code, ""  # the flag parser has already printed the reason
    cause = str(error).partition("\n")[0]
    exit_code = getattr(error, "exit_code", 0)
    if not exit_code and OUT_OF_MEMORY.search(repr(error)):
        memory_hint = this_process.memory_advice(this_process.phase)
        return (
            InputError.exit_code,
            f"error: out of memory; planned: {memory_hint} [{rank_and_phase}: {cause}]",
        )
    # gloo raises plain RuntimeErrors, whose messages begin with a source location.
    is_gloo_error = type(error) is RuntimeError and GLOO_SOURCE.search(cause)
    if isinstance(error, dist.DistError) or is_gloo_error:
        lost_ranks = ", ".join(missing) or "another rank"
        return (
            1,
            f"error: {lost_ranks} has ended, hangs or is slower than --hang-timeout [{rank_and_phase}: {cause}]",
        )
    # Before the first step, an OSError usually means that the disk is full or a folder is read-only.
    if isinstance(error, OSError) and this_process.phase == STARTUP_PHASE:
        exit_code = InputError.exit_code
    if exit_code:
        return exit_code, f"error: {error} [{rank_and_phase}]"
    return 1, f"{rank_and_phase} raised:\n{''.join(traceback.format_exception(error))}"


def _rank() -> int:
    """Return this process's rank. Unlike `process_group.rank`, this function works without a process group."""
    return int(os.environ.get("RANK", 0))
