"""How a rank ends: by an error, by a signal after its step, or because another rank is lost.

Ranks wait for each other in collectives. There torch.distributed raises when the connection to another rank breaks, and
when a rank has not come after --hang-timeout seconds. torchrun ends the other ranks when one ends.
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
START_TIMEOUT_S = 300.0  # between the starts of two ranks
REPEAT_DELAY_S = 1.0  # a second signal sooner than this is ignored: torchrun may deliver one signal twice
REPORT_S = 3.0  # from an error on one rank to its report, in which the other ranks may meet the same one
POLL_S = 0.1  # between two looks at the other ranks
GLOO_SOURCE = re.compile(r"/gloo/\S+\.cc:\d+\]")
# The errors of allocators: those of Python, the host, CUDA and its libraries.
OUT_OF_MEMORY = re.compile(r"MemoryError|out of memory|allocate memory|ALLOC_FAILED")
STARTUP_PHASE = "before the first step"  # the phase of a rank that has nothing to save


@dataclass
class _ProcessState:
    """What this process does, and the requests to it."""

    phase: str = STARTUP_PHASE  # the step and its phase
    stop_signal: int = 0  # number of the signal that asked for a stop at the end of the step; 0: none did
    stop_requested_at: float = 0.0  # by time.monotonic()
    pid: int = 0  # of the process that called `run`
    # The bytes that were planned for a phase, and the flags that lower them.
    memory_advice: Callable[[str], str] = lambda phase: "nothing yet"


this_process = _ProcessState()


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run a script's `main` and end the process with what it returns (None: 0), or with the code of its error.

    Every rank calls it (collective at the end). An error that all ranks meet is printed once. One with an `exit_code`
    (`minirl.errors`) is a message, any other a traceback.

    SIGTERM, SIGINT and SIGHUP (the terminal has gone) ask for a stop at the end of the step
    (`process_group.stop_requested`); a second one, or one before the first step, ends the process at once. A signal
    that is ignored stays so, as SIGHUP by nohup. SIGUSR1 prints the stacks of all threads. The process dies with
    torchrun.
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
    # In the interpreter's normal exit gloo's threads now and then abort a finished run ("terminate called without an
    # active exception", torch 2.13), and torchrun would report it as failed.
    os._exit(exit_code)


def announce_phase(phase: str) -> None:
    """Tell the other ranks the step and phase that begin on this one. Not collective."""
    this_process.phase = phase
    rendezvous().set(f"phase/{_rank()}", phase)


@functools.cache
def rendezvous() -> Any:
    """The key-value store of all ranks: torchrun's, or one that rank 0 hosts; a process that is alone has its own.

    Raises InputError without all of torchrun's variables, and torch's DistError if it cannot be reached in
    START_TIMEOUT_S.
    """
    missing = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - os.environ.keys()
    if {"RANK", "WORLD_SIZE"} <= missing:
        return dist.HashStore()
    refuse(
        missing,
        f"RANK or WORLD_SIZE is set without {', '.join(sorted(missing))}: use torchrun, or unset them",
    )
    store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=START_TIMEOUT_S)))
    # torchrun may restart all ranks and keep its store: keys of an earlier attempt must not count.
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)


def _prepare_process() -> None:
    """Make the process die with torchrun, handle signals, and print any character in any locale."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    this_process.pid = os.getpid()
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _handle_stop_signal)
    faulthandler.register(signal.SIGUSR1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the locale cannot encode would raise otherwise, and end the run.
        sys.stdout.reconfigure(errors="backslashreplace")


def _handle_stop_signal(number: int, frame: FrameType | None) -> None:
    """Ask for a stop at the end of the step, or end the process: see `run`."""
    now = time.monotonic()
    is_repeated = this_process.stop_signal and now - this_process.stop_requested_at > REPEAT_DELAY_S
    is_forked_child = os.getpid() != this_process.pid
    if is_repeated or is_forked_child or this_process.phase == STARTUP_PHASE:
        os._exit(128 + number)
    if not this_process.stop_signal:
        this_process.stop_signal = number
        this_process.stop_requested_at = now
        if _rank() == 0:
            text = f"{signal.Signals(number).name}: stopping after this step; again to leave at once\n"
            with contextlib.suppress(OSError):  # print could meet itself here, in the middle of a line
                os.write(2, text.encode())


def _report_error(error: BaseException) -> int:
    """Print the error of `main`, unless another rank was the first to meet one; return the exit code."""
    for number in STOP_SIGNALS:  # torchrun's, if another rank leaves first
        signal.signal(number, signal.SIG_IGN)
    is_first, missing = True, []
    # The store ended with torchrun or rank 0, or there is none.
    with contextlib.suppress(dist.DistError, InputError):
        is_first = rendezvous().add("num_errors", 1) == 1
        missing = _ranks_without_error()
    exit_code, message = _exit_code_and_message(error, missing)
    if is_first and message:
        with contextlib.suppress(OSError):
            print(message, file=sys.stderr, flush=True)
    if _rank() == 0:
        time.sleep(2 * POLL_S)  # without torchrun it keeps the store, which other ranks still read
    return exit_code


def _ranks_without_error() -> list[str]:
    """Wait until all ranks have met an error, REPORT_S at most; those that have not, with their phases."""
    store = rendezvous()
    store.set(f"phase/{_rank()}", "")
    ranks = range(int(os.environ.get("WORLD_SIZE", 1)))
    until = time.monotonic() + REPORT_S
    while True:
        phases = {
            rank: store.get(f"phase/{rank}").decode() for rank in ranks if store.check([f"phase/{rank}"])
        }
        missing = [f"rank {rank} ({phase})" for rank, phase in phases.items() if phase]
        if not missing or time.monotonic() > until:
            return missing
        time.sleep(POLL_S)


def _exit_code_and_message(error: BaseException, missing: Sequence[str]) -> tuple[int, str]:
    """The exit code for an error that `main` raised, and the message ("": print nothing).

    missing: the ranks that have met no error.
    """
    where = f"rank {_rank()}, {this_process.phase}"
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code, ""  # the parser of flags has printed why
    cause = str(error).partition("\n")[0]
    exit_code = getattr(error, "exit_code", 0)
    if not exit_code and OUT_OF_MEMORY.search(repr(error)):
        advice = this_process.memory_advice(this_process.phase)
        return InputError.exit_code, f"error: out of memory; planned: {advice} [{where}: {cause}]"
    # gloo's errors have no class of their own, but begin with the place in its source.
    is_gloo_error = type(error) is RuntimeError and GLOO_SOURCE.search(cause)
    if isinstance(error, dist.DistError) or is_gloo_error:
        lost = ", ".join(missing) or "another rank"
        return 1, f"error: {lost} has ended, hangs or is slower than --hang-timeout [{where}: {cause}]"
    # A full disk, a folder that cannot be written to.
    if isinstance(error, OSError) and this_process.phase == STARTUP_PHASE:
        exit_code = InputError.exit_code
    if exit_code:
        return exit_code, f"error: {error} [{where}]"
    return 1, f"{where} raised:\n{''.join(traceback.format_exception(error))}"


def _rank() -> int:
    """This process's rank. Does not need the process group, unlike `process_group.rank`."""
    return int(os.environ.get("RANK", 0))
