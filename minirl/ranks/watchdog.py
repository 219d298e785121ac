"""Ranks that leave together: one rank's error, a hang or a second Ctrl-C ends all, said once, with one exit code.

A rank may be stuck in a collective or in user code when another fails, so each has a thread that talks to the others
over the rendezvous store: it publishes the rank's pulse, looks for a claim, and handles signals. A claim is a rank and
an exit code; the first one counts and its rank prints why. Errors with an `exit_code` (`errors`) are a message, others
a traceback. `this_process`, this process's own pulse, is the module's one piece of state.
"""

import contextlib
import ctypes
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

from minirl.errors import HangError

STOPS = (signal.SIGINT, signal.SIGTERM)
POLL_S = 0.25  # between looks at the store
GONE_S = 2.0  # without a word from a rank's thread its process counts as dead
LINK_S = 3.0  # from a broken connection to the report: the rank that caused it speaks first, or is known to be gone
LEAVE_S = 5.0  # for all ranks to have seen a claim
SAVE_S = 8.0  # for a checkpoint that is being written
TWICE_S = 0.5  # torchrun may deliver one signal twice


@dataclass
class _ProcessState:
    """What this process's main thread does, and what it was asked to do."""

    phase: str = ""
    call: str = ""
    count: int = 0
    stop_signal: int = 0  # by which this rank was asked to stop
    hang_timeout: float = 0.0  # seconds; 0: never
    saving: threading.Thread | None = None  # which an error gives time to end


this_process = _ProcessState()


def heartbeat(call: str | None = None, *, phase: str | None = None) -> None:
    """Say that this rank goes on, and from now on in this phase or call (one of user code; "": in none).

    Under a microsecond, not collective. Silence is counted from the first one on: a model may take long to arrive.
    """
    if phase is not None:
        this_process.phase, this_process.call = phase, ""
    if call is not None:
        this_process.call = call
    this_process.count += 1


@functools.cache
def rendezvous() -> Any:
    """The store where the ranks meet: torchrun's, one that rank 0 hosts, or of this process alone. Waits for it."""
    if "RANK" not in os.environ:
        return dist.HashStore()
    return next(dist.rendezvous("env://", timeout=timedelta(seconds=300)))[0]


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run a script's `main` on this rank and leave, all ranks with one exit code: 0, or what `main` returns.

    All ranks call it (collective at the end). When `main` raises on one, the others leave wherever they are.
    SIGTERM and SIGINT ask for a stop at the end of the step (`distributed.stop_requested`); a second one, or one before
    the first step, leaves at once. SIGUSR1 prints all stacks. Under torchrun this process dies with its launcher.
    """
    _prepare_process()
    thread = _Watch()
    thread.start()
    try:
        code = main() or 0
        if dist.is_initialized():
            dist.barrier()
    except BaseException as error:
        thread.leave(*_verdict(error), is_link=_is_broken_link(error))
    leave_now(code)


def leave_now(code: int) -> NoReturn:
    """End the process with this exit code. Not collective.

    Not by the interpreter's teardown: there gloo's threads abort a finished run now and then ("terminate called without
    an active exception", torch 2.13), and torchrun would report it as failed.
    """
    threading.Timer(2.0, os._exit, [code]).start()  # in case nobody reads the pipe that is flushed
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _prepare_process() -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # it listens before it starts a rank
        try:
            socket.create_connection(
                (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=30
            ).close()
        except OSError:
            _say(f"rank {_rank()}: torchrun is gone, it does not answer")
            leave_now(1)
    faulthandler.register(signal.SIGUSR1)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # no character that the locale lacks stops a run


def _verdict(error: BaseException) -> tuple[int, str]:
    """Exit code, and what the user reads."""
    if (
        isinstance(error, SystemExit) and not this_process.count
    ):  # --help, a wrong flag; later it is an accident
        is_code = error.code is None or isinstance(error.code, int)
        return (int(error.code or 0), "") if is_code else (1, str(error.code))
    if code := getattr(error, "exit_code", 0):
        where = f" [rank {_rank()}, {this_process.phase}]" if this_process.phase else ""
        return code, f"error: {error}{where}"
    return 1, f"rank {_rank()} raised:\n" + "".join(traceback.format_exception(error)).rstrip()


def _is_broken_link(error: BaseException) -> bool:
    """Whether this is what the death of another rank looks like: gloo has no error type of its own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _forget_signals() -> None:
    """In a forked child: its signals are its own."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _place() -> str:
    """The main thread's innermost line outside torch, and whether it waits in torch.distributed."""
    frame, waits, torch_distributed = (
        sys._current_frames()[threading.main_thread().ident or 0],
        "",
        dist.__path__[0],
    )
    while frame.f_back is not None and frame.f_code.co_filename.startswith(
        os.path.dirname(torch_distributed)
    ):
        if frame.f_code.co_filename.startswith(torch_distributed):
            waits = "waiting for other ranks "
        frame = frame.f_back
    return (
        f"{waits}at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
    )


class _Watch(threading.Thread):
    """The thread. It alone decides that the process leaves early, and does it."""

    def __init__(self) -> None:
        super().__init__(name="watch", daemon=True)
        self._rank, self._world_size = _rank(), int(os.environ.get("WORLD_SIZE", 1))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = dist.PrefixStore(f"watch/{attempt}", rendezvous().clone())  # a connection of its own
        self._verdict: tuple[int, str] | None = None  # of the main thread, which has ended
        self._is_link, self._speak_at = False, 0.0
        self._seen, self._moved_at, self._signalled_at = 0, 0.0, 0.0
        # C code writes a signal's number here at once, also while the main thread is stuck in a collective.
        self._pipe, end = os.pipe()
        os.set_blocking(end, False)
        signal.set_wakeup_fd(end, warn_on_full_buffer=False)
        for number in STOPS:
            signal.signal(number, lambda *_: None)
        os.register_at_fork(after_in_child=_forget_signals)

    def leave(self, code: int, text: str, *, is_link: bool) -> NoReturn:
        """Give the main thread's verdict to this thread, which ends the process."""
        self._is_link, self._speak_at = is_link, time.monotonic() + (LINK_S if is_link else 0)
        self._verdict = code, text
        while True:
            time.sleep(60)

    def run(self) -> None:
        """Look until the process ends."""
        try:
            while True:
                self._look()
        except Exception as error:
            time.sleep(1)  # the main thread may be about to leave: the ranks do not end in one instant
            is_lost = isinstance(error, dist.DistError)
            lost = f"rank {self._rank}: torchrun or rank 0, which kept the rendezvous store, is gone"
            code, text = self._verdict or (1, lost if is_lost else _verdict(error)[1])
            _say(text)
            leave_now(code)

    def _look(self) -> None:
        now = time.monotonic()
        if this_process.count != self._seen:
            self._seen, self._moved_at = this_process.count, now
        silent = now - self._moved_at if self._seen else 0.0
        where = ", ".join(filter(None, (this_process.phase or "before the first step", this_process.call)))
        self._store.set(f"pulse/{self._rank}", json.dumps([time.time(), silent, where, _place()]))
        if self._store.check(["claim"]):
            self._follow(json.loads(self._store.get("claim"))[1])
        limit = this_process.hang_timeout
        if self._verdict is not None:
            if now >= self._speak_at:
                code, text = self._verdict
                gone = "; ".join(self._gone()) if self._is_link else ""
                self._claim(code, f"{gone}: rank {self._rank} lost its connection" if gone else text)
        elif limit and silent > limit and all(age > limit for age, _, _, _ in self._pulses().values()):
            self._claim(HangError.exit_code, self._hang_report(limit))
        if select.select([self._pipe], [], [], POLL_S)[0]:
            for number in os.read(self._pipe, 64):
                if number in STOPS:
                    self._on_signal(number)

    def _on_signal(self, number: int) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if not this_process.phase:
            self._claim(128 + number, f"{name}: leaving, nothing to save before the first step")
        elif not this_process.stop_signal:
            this_process.stop_signal, self._signalled_at = number, now
            if self._verdict is None and self._store.add("stopping", 1) == 1:
                _say(f"{name}: finishing this step, then saving; again to leave at once")
        elif now - self._signalled_at > TWICE_S:
            self._claim(128 + number, f"{name} again: leaving at once")

    def _claim(self, code: int, text: str) -> NoReturn:
        """Print and end all ranks with this code; but follow a rank that was first."""
        mine = json.dumps([self._rank, code])
        first = self._store.compare_set("claim", "", mine).decode()
        if first == mine and text:
            _say(text)
        self._follow(json.loads(first)[1])

    def _follow(self, code: int) -> NoReturn:
        """Leave, when all ranks that live have seen the claim: once one has left, torchrun ends the others."""
        with contextlib.suppress(dist.DistError):
            gone = self._gone()
            self._store.add("seen", 1)
            until, num_left = time.monotonic() + LEAVE_S, self._world_size - len(gone)
            while self._store.add("seen", 0) < num_left and time.monotonic() < until:
                time.sleep(0.05)
            if (
                this_process.saving is not None and code < 128 and not gone
            ):  # else it would wait for files that never come
                this_process.saving.join(SAVE_S)
        time.sleep(0.2 if self._rank == 0 else 0)  # it may keep the store
        leave_now(code)

    def _pulses(self) -> dict[int, tuple[float, float, str, str]]:
        """By rank: seconds without a beat, seconds without a word from its thread, phase, place in the code."""
        out = {}
        for rank in range(self._world_size):
            if self._store.check([f"pulse/{rank}"]):
                written, silent, where, place = json.loads(self._store.get(f"pulse/{rank}"))
                stale = max(0.0, time.time() - written)
                out[rank] = (silent + stale, stale, where, place)
        return out

    def _gone(self) -> list[str]:
        """Of each rank whose process is gone a sentence."""
        gone = {rank: where for rank, (_, stale, where, _) in self._pulses().items() if stale > GONE_S}
        return [
            f"rank {rank} is gone, killed or crashed (last seen: {where})" for rank, where in gone.items()
        ]

    def _hang_report(self, limit: float) -> str:
        """Every rank's silence and place; to blame is the longest silent one that does not wait for others."""
        pulses = self._pulses()
        free = {rank: pulse for rank, pulse in pulses.items() if not pulse[3].startswith("waiting")} or pulses
        guilty = max(free, key=lambda rank: free[rank][0])
        lines = [f"error: no rank has moved for {limit:g} s (--hang-timeout); it looks like rank {guilty}"]
        for rank in range(self._world_size):
            age, stale, where, place = pulses.get(rank, (0.0, 0.0, "never heard from", "place unknown"))
            gone = f", process gone or stopped for {stale:.0f} s" if stale > GONE_S else ""
            lines.append(f"  rank {rank}: {where}, silent {age:.0f} s, {place}{gone}")
        return "\n".join(lines)
