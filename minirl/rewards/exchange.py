"""One process that runs a user's reward function (`worker`), and one exchange with it at a time that never blocks.

Nothing is pickled. The worker has the user's rights: this limits accidents, not attacks.
"""

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Any

from minirl.errors import RewardError
from minirl.ranks import watchdog
from minirl.rewards import worker

# For the imports of the user's file, in addition to the time limit of a call.
LOAD_TIMEOUT_S = 60.0
# A rank waiting for its workers sends a heartbeat at least this often.
POLL_S = 0.5
# Bytes of an answer, and of what is read of it at a time.
MAX_ANSWER = 1 << 26
READ_SIZE = 1 << 16
NO_ANSWER = "its process sent something that is no answer; does its code write to files that it did not open?"


class Worker:
    """A process that has loaded a user's file, and the request to it that is under way, if any.

    `call` begins an exchange; `receive` carries it on and returns the answer once it is there. Neither waits for the
    process, except for the end of one that has closed its pipes. Not collective.
    """

    def __init__(self, source: str, name: str, *, timeout_s: float):
        """Start the process, which says first which arguments the function takes: that is to be received.

        source: a Python file, or a module's name. name: of its function. timeout_s: limit of one call. Raises
        RewardError if the system starts no process.
        """
        self._source = source
        self._name = name
        self._timeout_s = timeout_s
        # Whether an exchange is under way.
        self.is_busy = False
        # The call that is sent once a new process has started.
        self._next_call: dict[str, Any] | None = None
        self._start()

    @property
    def pid(self) -> int:
        """The process that was started last; it may have ended."""
        return self._process.pid

    def call(self, request: dict[str, Any]) -> None:
        """Send a request; a process that has ended is replaced first. Raises RewardError if it cannot be."""
        if self._kill_process.alive and self._process.poll() is None:
            self._send(request, self._timeout_s)
            return
        self.kill()
        self._next_call = request
        self._start()

    def receive(self) -> dict[str, Any] | str | None:
        """Carry the exchange on. Returns None while it is under way, then the answer, or an error string.

        With an error string, the process has taken too long, died or sent no answer, and is killed.
        """
        answer = self._receive()
        if answer is None:
            return None
        self.is_busy = False
        call, self._next_call = self._next_call, None
        if isinstance(answer, str) or (call is not None and "error" in answer):
            self.kill()
        elif call is not None:
            self._send(call, self._timeout_s)
            return None
        return answer

    def kill(self) -> None:
        """Kill the process and all others of its session; the next call starts a new one."""
        self.is_busy = False
        self._next_call = None
        self._kill_process()

    def register(self, poller: select.poll) -> float:
        """Register what the exchange waits for. Returns the seconds until it has taken too long."""
        poller.register(self._answer_fd, select.POLLIN)
        if self._unsent:
            poller.register(self._request_fd, select.POLLOUT)
        return self._deadline - time.monotonic()

    def _start(self) -> None:
        """Start a process and ask it which arguments the function takes."""
        try:
            self._process = subprocess.Popen(
                # -P: modules beside worker.py must not hide those of the user.
                [sys.executable, "-P", worker.__file__, self._source, self._name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                # With a fixed hash seed, sets are in the same order again after a resume.
                env={"PYTHONHASHSEED": "0", **os.environ},
            )
        except OSError as error:
            raise RewardError(f"no process can be started for it: {error}; see --reward-workers") from None
        # Kills once: when called, when this object is deleted, or at the latest when this process exits.
        self._kill_process = weakref.finalize(self, _kill_session, self._process)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._request_fd = self._process.stdin.fileno()
        self._answer_fd = self._process.stdout.fileno()
        os.set_blocking(self._request_fd, False)
        os.set_blocking(self._answer_fd, False)
        self._send({"path": sys.path}, self._timeout_s + LOAD_TIMEOUT_S)

    def _send(self, request: dict[str, Any], timeout_s: float) -> None:
        """Begin an exchange."""
        self.is_busy = True
        self._request_id = secrets.token_hex(8)
        self._unsent = memoryview(json.dumps({"id": self._request_id, **request}).encode() + b"\n")
        self._answer = bytearray()
        self._limit_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._write()

    def _write(self) -> None:
        """Send what the pipe takes: a request may be larger than a pipe holds, and the worker may not read."""
        try:
            num_sent = os.write(self._request_fd, self._unsent)
        except BlockingIOError:
            return
        except BrokenPipeError:
            # The worker will not read the rest, but may have written an answer.
            num_sent = len(self._unsent)
        self._unsent = self._unsent[num_sent:]
        # The worker's time begins when it has got its request: this process may be late in sending the rest of it.
        self._deadline = time.monotonic() + self._limit_s

    def _receive(self) -> dict[str, Any] | str | None:
        """Send and read what can be. Returns None, the answer, or an error string."""
        if self._unsent:
            self._write()
        # Looked up before the read: what the worker wrote before its death is then read.
        has_exited = self._process.poll() is not None
        received = None
        with contextlib.suppress(BlockingIOError):
            received = os.read(self._answer_fd, READ_SIZE)
        self._answer += received or b""
        if self._answer.endswith(b"\n"):
            return self._parsed() or NO_ANSWER
        if len(self._answer) > MAX_ANSWER:
            return NO_ANSWER
        # When the worker dies its pipe is closed, unless a process that it forked holds it open.
        if received == b"" or (has_exited and received is None):
            return self._end()
        # After the read: this process may have been busy with something else when the answer came.
        if time.monotonic() > self._deadline:
            return f"took more than {self._limit_s:g} s and was killed; see --reward-timeout"
        return None

    def _parsed(self) -> dict[str, Any] | None:
        """The answer; None if the worker's own code has not sent it in answer to this request."""
        try:
            answer = json.loads(self._answer)
        except (ValueError, RecursionError):
            return None
        is_answer = isinstance(answer, dict) and answer.get("id") == self._request_id
        return answer if is_answer and isinstance(answer.get("printed"), str) else None

    def _end(self) -> str:
        """How the process ended that has closed its pipes."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        code = self._process.returncode
        if code is None:
            return "closed the pipes of its process"
        if code < 0:
            return f"ended its process, {_signal_name(-code)}"
        return f"ended its process, exit code {code}"


def wait_for_any(workers: Sequence[Worker], timeout_s: float) -> None:
    """Wait until a busy worker can go on or is over its time, for at most `timeout_s` and POLL_S seconds."""
    # This wait is limited by the deadlines, not by --hang-timeout.
    watchdog.heartbeat()
    poller = select.poll()
    limits = [worker.register(poller) for worker in workers]
    poller.poll(1000 * max(0.0, min(timeout_s, POLL_S, *limits)))


def escaped(text: str) -> str:
    """Return the text with control characters (a terminal's escape codes, for example) spelt out."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _signal_name(number: int) -> str:
    """SIGKILL, for example; most real-time signals have no name."""
    names = {known.value: known.name for known in signal.Signals}
    return names.get(number, f"signal {number}")


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all those that it started, unless they have left its session."""
    # Leaving the block closes the pipes and reaps the process.
    with process, contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
