"""Watchdog: if one rank fails, hangs or is stopped, end all ranks with one exit code and one message.

When one rank fails, the main threads of the others may be stuck in a collective or in user code, where no
exception reaches them. So `run` starts a second thread on each rank, the watchdog thread. The watchdog
threads communicate through the rendezvous store (torch's key-value store, `rendezvous`), never through
collectives.

The main thread calls `heartbeat` wherever it makes progress. Every POLL_S seconds each watchdog thread does:

1. It publishes its rank's status in the store: the time of writing, the time since the last heartbeat, and the main
   thread's activity. From it other ranks tell a hang from a slow rank, and a dead process from a live one.
2. It looks for the key "claim". If a rank wrote it to end the run, the thread waits until every live rank has seen
   the claim, and ends its process with the claim's exit code.
3. If its main thread has failed, it writes a claim (its rank and exit code) with compare-and-set, so that the
   first claim wins. The rank whose claim won prints its message. The other ranks print nothing and follow it
   as in 2.
4. If no rank has had a heartbeat for `hang_timeout` seconds, it writes a claim with HangError's exit code;
   the message lists the status of every rank. While one rank makes progress, the ranks that wait for it do
   not count as hung.
5. It handles signals. The first SIGTERM, SIGINT or SIGHUP sets `this_process.stop_signal`, which the ranks exchange
   at the end of each step (`process_group.stop_requested`). A second signal, or one before the first step, is
   a claim.

Errors with an `exit_code` (`minirl.errors`) and those of a full disk are printed as a message, all others with their
traceback. The module's only state is `this_process`, which describes the main thread of this process.
"""

import contextlib
import ctypes
import dataclasses
import errno
import faulthandler
import functools
import io
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from minirl.errors import HangError, InputError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Errors of a write that are not bugs.
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)

# Times in seconds.
START_S = 50.0  # between the starts of two ranks
TORCHRUN_START_S = 300.0  # the same under torchrun, which ends the others when one of them dies
POLL_S = 0.25  # between two reads of the store
GONE_S = 2.0  # age of a rank's status above which its process counts as dead or stopped
BROKEN_CONNECTION_S = 3.0  # from a broken connection to its claim, see `_Watchdog.report_failure`
FOLLOW_S = 5.0  # at most, until all live ranks have seen a claim
CHECKPOINT_S = 8.0  # at most, for a checkpoint that is being written when the run fails
REPEATED_SIGNAL_S = 0.5  # a second signal sooner than this is ignored: torchrun may deliver one signal twice


@dataclass
class _ProcessState:
    """The state of this process's main thread, and the requests to it."""

    phase: str = ""  # step and phase, for reports; "" before the first step
    user_function: str = ""  # the user's function that is being called, for reports; "" outside of one
    num_heartbeats: int = 0
    stop_signal: int = 0  # number of the signal that asked for a stop at the end of the step; 0: none did
    hang_timeout: float = 0.0  # seconds; 0: never
    checkpoint_thread: threading.Thread | None = None  # given CHECKPOINT_S to end when the run fails


this_process = _ProcessState()


def heartbeat(user_function: str | None = None, *, phase: str | None = None) -> None:
    """Record that the main thread makes progress. Optionally set the activity that a hang report shows.

    phase: the step and phase that begin now.
    user_function: the user's function that is called now, or "" after it returned.

    Takes less than a microsecond. Not collective. The watchdog looks for hangs only after the first heartbeat,
    since loading a model may take long.
    """
    if phase is not None:
        this_process.phase = phase
        this_process.user_function = ""
    if user_function is not None:
        this_process.user_function = user_function
    this_process.num_heartbeats += 1


@functools.cache
def rendezvous() -> Any:
    """The key-value store shared by all ranks: torchrun's, or one that rank 0 hosts.

    Without the environment variables of a rank the process gets its own store. Raises torch's DistError if it is not
    reachable in time, or not all ranks reach it.
    """
    if "RANK" not in os.environ:
        return dist.HashStore()
    store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=_start_s())))
    # torchrun may restart all ranks and keep its store: addresses and claims of an earlier attempt must not count.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt {attempt}", store)


def _start_s() -> float:
    """How long a rank waits for the others to start."""
    return TORCHRUN_START_S if "TORCHELASTIC_RUN_ID" in os.environ else START_S


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run a script's `main` on this rank and end the process, on all ranks with the same exit code.

    The exit code is what `main` returns (None: 0). When `main` raises on one rank, all ranks end, wherever
    they are. All ranks call it (collective at the end).

    SIGTERM, SIGINT and SIGHUP (the terminal has gone) ask for a stop at the end of the step
    (`process_group.stop_requested`); a second one, or one before the first step, ends the run at once. SIGHUP has no
    effect where it is ignored at the start, as by nohup. SIGUSR1 prints the stacks of all threads. Under
    torchrun the process is killed when torchrun dies.
    """
    _prepare_process()
    try:
        watchdog = _Watchdog()
    except dist.DistError:
        _leave_without_all_ranks()
    watchdog.start()
    try:
        exit_code = main() or 0
        if dist.is_initialized():
            dist.barrier()
    except BaseException as error:
        watchdog.report_failure(error)
    leave_now(exit_code)


def is_a_rank_gone(seconds: float) -> bool:
    """Return whether a rank that began `run` has been silent for more than `seconds`. Not collective."""
    statuses = _read_statuses(dist.PrefixStore("watchdog", rendezvous()))
    return any(status.age_s() > seconds for status in statuses.values())


def leave_now(exit_code: int) -> NoReturn:
    """Flush the output and end the process with this exit code. Not collective.

    Uses `os._exit`, since in the interpreter's normal exit gloo's threads now and then abort a finished run
    ("terminate called without an active exception", torch 2.13), and torchrun would report it as failed.
    """
    # The flush blocks if the output is a pipe that nobody reads: exit all the same after 2 seconds.
    threading.Timer(2.0, os._exit, [exit_code]).start()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


def _prepare_process() -> None:
    """Make the process die with torchrun, print stacks on SIGUSR1, and print any character in any locale."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        _leave_if_torchrun_is_gone()
    faulthandler.register(signal.SIGUSR1)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the locale cannot encode would raise otherwise, and end the run.
            stream.reconfigure(errors="backslashreplace")


def _leave_if_torchrun_is_gone() -> None:
    """End the process if torchrun died before the kernel was asked to kill this process with it.

    torchrun listens at the rendezvous address before it starts a rank, so a refused connection means that it
    is dead.
    """
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    try:
        socket.create_connection(address, timeout=30).close()
    except OSError:
        _print_error(f"rank {_rank()}: torchrun is gone, it does not answer")
        leave_now(1)


def _leave_without_all_ranks() -> NoReturn:
    """End the process because some unknown rank has not reached the rendezvous store."""
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    _print_error(
        f"rank {_rank()}: after {_start_s():g} s not all {os.environ['WORLD_SIZE']} ranks have come to {address}: one "
        "was killed, or was not started; start all of them together"
    )
    leave_now(1)


def _exit_code_and_message(error: BaseException) -> tuple[int, str]:
    """The exit code for an exception that `main` raised, and the message for the user ("": print nothing)."""
    if isinstance(error, SystemExit) and this_process.num_heartbeats == 0:
        # Raised by the command line's parser: --help or a wrong flag. Later, SystemExit is an ordinary error.
        if error.code is None or isinstance(error.code, int):
            return int(error.code or 0), ""
        return 1, str(error.code)
    exit_code = getattr(error, "exit_code", 0)
    if exit_code:
        where = f" [rank {_rank()}, {this_process.phase}]" if this_process.phase else ""
        return exit_code, f"error: {error}{where}"
    if isinstance(error, OSError) and error.errno in FULL_DISK:
        return InputError.exit_code, f"error: {error.filename or 'a file'}: {error.strerror}"
    stack = "".join(traceback.format_exception(error)).rstrip()
    return 1, f"rank {_rank()} raised:\n{stack}"


def _is_broken_connection(error: BaseException) -> bool:
    """Return whether this is the error of a collective after another rank died."""
    if isinstance(error, dist.DistError):
        return True
    # gloo has no error type for this.
    return isinstance(error, RuntimeError) and "gloo" in str(error)


def _rank() -> int:
    """This process's rank. Does not need the process group, unlike `process_group.rank`."""
    return int(os.environ.get("RANK", 0))


def _print_error(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _restore_default_signals() -> None:
    """In a forked child, undo the watchdog's signal handling: signals to the child must not stop the run."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _find_main_thread() -> tuple[str, bool]:
    """The main thread's innermost line outside of torch, and whether it is in a call of torch.distributed."""
    distributed_folder = dist.__path__[0]
    torch_folder = os.path.dirname(distributed_folder)
    is_in_collective = False
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame.f_back is not None and frame.f_code.co_filename.startswith(torch_folder):
        if frame.f_code.co_filename.startswith(distributed_folder):
            is_in_collective = True
        frame = frame.f_back
    file_name = os.path.basename(frame.f_code.co_filename)
    return f"{file_name}:{frame.f_lineno} in {frame.f_code.co_name}", is_in_collective


@dataclass(frozen=True)
class _Status:
    """A rank's status: its watchdog thread last published this about its main thread."""

    published_at: float  # time.time(): the nodes' clocks should agree to within GONE_S
    silent_s: float  # seconds since the last heartbeat, when it was published; 0 before the first heartbeat
    activity: str  # step, phase and user function
    line: str  # FILE:LINE in FUNCTION
    is_in_collective: bool  # waits for other ranks

    def age_s(self) -> float:
        """Seconds since it was published."""
        return max(0.0, time.time() - self.published_at)

    def silent_now_s(self) -> float:
        """Seconds since the last heartbeat, assuming none since this was published."""
        return self.silent_s + self.age_s()

    def is_gone(self) -> bool:
        """Return whether the process is dead or stopped: a live watchdog thread publishes every POLL_S seconds."""
        return self.age_s() > GONE_S


def _read_statuses(store: Any) -> dict[int, _Status]:
    """The statuses of all ranks that have published one, by rank."""
    statuses = {}
    for rank in range(int(os.environ.get("WORLD_SIZE", 1))):
        key = f"status/{rank}"
        if store.check([key]):
            statuses[rank] = _Status(**json.loads(store.get(key)))
    return statuses


@dataclass(frozen=True)
class _Failure:
    """The exception that ended the main thread of this rank."""

    exit_code: int
    message: str
    is_broken_connection: bool
    claim_at: float  # time.monotonic() before which other ranks may claim first


class _Watchdog(threading.Thread):
    """The watchdog thread. Once `main` runs, only this thread ends the process before `main` has returned."""

    def __init__(self) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._rank = _rank()
        self._world_size = int(os.environ.get("WORLD_SIZE", 1))
        # The clone has its own connection: on a shared one, this thread would wait for the main thread's calls.
        self._store = dist.PrefixStore("watchdog", rendezvous().clone())
        self._failure: _Failure | None = None  # set by the main thread when it has failed
        self._num_heartbeats_seen = 0
        self._last_heartbeat_at = 0.0
        self._first_signal_at = 0.0
        # Python runs signal handlers on the main thread, which may be stuck in a collective. But its C code
        # writes a signal's number into this pipe at once, and the watchdog thread reads it there.
        self._signal_pipe, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        os.register_at_fork(after_in_child=_restore_default_signals)

    def report_failure(self, error: BaseException) -> NoReturn:
        """Pass the exception that ended `main` to the watchdog thread, which ends the process.

        A broken connection is only the consequence of another rank's death, so its claim waits
        BROKEN_CONNECTION_S. In that time the rank that failed first can claim, or its status grows so old
        that the message can name it as gone.
        """
        exit_code, message = _exit_code_and_message(error)
        is_broken_connection = _is_broken_connection(error)
        claim_at = time.monotonic() + (BROKEN_CONNECTION_S if is_broken_connection else 0)
        self._failure = _Failure(exit_code, message, is_broken_connection, claim_at)
        while True:
            time.sleep(60)

    def run(self) -> None:
        """Poll until the process ends."""
        try:
            while True:
                self._poll()
        except Exception as error:
            # Most often the store is gone. That is normal at the end of a run: the ranks do not end at the
            # same instant, rank 0 may host the store, and this rank is about to call `leave_now` itself.
            time.sleep(1)
            exit_code = 1
            if self._failure is not None:
                exit_code = self._failure.exit_code
                message = self._failure.message
            elif isinstance(error, dist.DistError):
                message = f"rank {self._rank}: torchrun or rank 0, which kept the rendezvous store, is gone"
            else:
                _, message = _exit_code_and_message(error)
            _print_error(message)
            leave_now(exit_code)

    def _poll(self) -> None:
        """Publish, follow, claim a failure, claim a hang, handle signals, as the module's docstring says."""
        now = time.monotonic()
        silent_s = self._measure_silence(now)
        self._publish_status(silent_s)
        if self._store.check(["claim"]):
            self._follow_claim(self._store.get("claim"))
        if self._failure is not None:
            if now >= self._failure.claim_at:
                self._claim_failure(self._failure)
        elif self._is_hung(silent_s):
            self._claim(HangError.exit_code, self._hang_report())
        readable, _, _ = select.select([self._signal_pipe], [], [], POLL_S)
        if readable:
            for number in os.read(self._signal_pipe, 64):
                if number in STOP_SIGNALS:
                    self._handle_stop_signal(number)

    def _measure_silence(self, now: float) -> float:
        """Seconds since the main thread's last heartbeat; 0 before the first one."""
        num_heartbeats = this_process.num_heartbeats
        if num_heartbeats != self._num_heartbeats_seen:
            self._num_heartbeats_seen = num_heartbeats
            self._last_heartbeat_at = now
        if num_heartbeats == 0:
            return 0.0
        return now - self._last_heartbeat_at

    def _publish_status(self, silent_s: float) -> None:
        activity = this_process.phase or "before the first step"
        if this_process.user_function:
            activity += f", {this_process.user_function}"
        line, is_in_collective = _find_main_thread()
        status = _Status(time.time(), silent_s, activity, line, is_in_collective)
        self._store.set(f"status/{self._rank}", json.dumps(dataclasses.asdict(status)))

    def _find_gone_ranks(self) -> list[str]:
        """One sentence for each rank whose process is dead or stopped."""
        return [
            f"rank {rank} is gone, killed or crashed (last seen: {status.activity})"
            for rank, status in _read_statuses(self._store).items()
            if status.is_gone()
        ]

    def _is_hung(self, silent_s: float) -> bool:
        """Return whether no rank has had a heartbeat for `hang_timeout` seconds."""
        limit = this_process.hang_timeout
        if limit == 0 or silent_s <= limit:
            return False
        return all(status.silent_now_s() > limit for status in _read_statuses(self._store).values())

    def _hang_report(self) -> str:
        """A line for each rank. The suspect is the longest silent rank that is not in a collective."""
        statuses = _read_statuses(self._store)
        not_waiting = {rank: status for rank, status in statuses.items() if not status.is_in_collective}
        suspects = not_waiting or statuses
        suspect = max(suspects, key=lambda rank: suspects[rank].silent_now_s())
        limit = this_process.hang_timeout
        lines = [f"error: no rank has moved for {limit:g} s (--hang-timeout); it looks like rank {suspect}"]
        for rank in range(self._world_size):
            status = statuses.get(rank)
            if status is None:
                lines.append(f"  rank {rank}: has never reported anything")
                continue
            line = f"  rank {rank}: {status.activity}, silent {status.silent_now_s():.0f} s, "
            if status.is_in_collective:
                line += "waiting for other ranks "
            line += f"at {status.line}"
            if status.is_gone():
                line += f", process gone or stopped for {status.age_s():.0f} s"
            lines.append(line)
        return "\n".join(lines)

    def _handle_stop_signal(self, number: int) -> None:
        """The first signal asks for a stop at the end of the step, a later one ends the run at once."""
        name = signal.Signals(number).name
        now = time.monotonic()
        if not this_process.phase:
            self._claim(128 + number, f"{name}: leaving, nothing to save before the first step")
        elif not this_process.stop_signal:
            this_process.stop_signal = number
            self._first_signal_at = now
            # torchrun sends the signal to every rank: only the first one to count itself prints the line.
            if self._failure is None and self._store.add("num_ranks_stopping", 1) == 1:
                _print_error(f"{name}: finishing this step, then saving; again to leave at once")
        elif now - self._first_signal_at > REPEATED_SIGNAL_S:
            self._claim(128 + number, f"{name} again: leaving at once")

    def _claim_failure(self, failure: _Failure) -> NoReturn:
        """Claim the end of the run for the main thread's exception."""
        message = failure.message
        if failure.is_broken_connection:
            gone = self._find_gone_ranks()
            if gone:
                message = f"{'; '.join(gone)}: rank {self._rank} lost its connection"
        self._claim(failure.exit_code, message)

    def _claim(self, exit_code: int, message: str) -> NoReturn:
        """End all ranks with this exit code and print the message, unless another rank has claimed first."""
        own_claim = json.dumps([self._rank, exit_code])
        # Writes own_claim if the key does not exist yet, and returns the value that the key has then.
        first_claim = self._store.compare_set("claim", "", own_claim)
        if first_claim.decode() == own_claim and message:
            _print_error(message)
        self._follow_claim(first_claim)

    def _follow_claim(self, claim: bytes) -> NoReturn:
        """End the process with a claim's exit code, once every live rank has seen the claim.

        The ranks wait for each other because torchrun kills the others as soon as one ends.
        """
        _claiming_rank, exit_code = json.loads(claim)
        with contextlib.suppress(dist.DistError):
            gone = self._find_gone_ranks()
            num_live = self._world_size - len(gone)
            deadline = time.monotonic() + FOLLOW_S
            self._store.add("num_ranks_following", 1)
            while self._store.add("num_ranks_following", 0) < num_live and time.monotonic() < deadline:
                time.sleep(0.05)
            checkpoint_thread = this_process.checkpoint_thread
            is_signal = exit_code >= 128  # ends the run at once
            # If a rank is gone, its files never come and the checkpoint cannot be completed.
            if checkpoint_thread is not None and not is_signal and not gone:
                checkpoint_thread.join(CHECKPOINT_S)
        if self._rank == 0:
            # This process may host the store: let the others finish the loop above.
            time.sleep(0.2)
        leave_now(exit_code)
