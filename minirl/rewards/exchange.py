"""One process that runs a user's reward function (`worker`), and one exchange with it at a time that never blocks."""

import json
import secrets
import select
import sys
import time
from collections.abc import Sequence
from typing import Any

from minirl.errors import RewardError
from minirl.ranks import watchdog
from minirl.rewards import worker
from minirl.rewards.user_process import UserProcess, checked_answer

# For the imports of the user's file, in addition to the time limit of a call.
LOAD_TIMEOUT_S = 60.0
# A rank waiting for its workers sends a heartbeat at least this often.
POLL_S = 0.5
# Bytes of an answer.
MAX_ANSWER = 1 << 26
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
        if self._process.is_alive:
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
        self._process.kill()

    def register(self, poller: select.poll) -> float:
        """Register what the exchange waits for. Returns the seconds until it has taken too long."""
        self._process.register(poller)
        return self._deadline - time.monotonic()

    def _start(self) -> None:
        """Start a process and ask it which arguments the function takes."""
        try:
            self._process = UserProcess([worker.__file__, self._source, self._name])
        except OSError as error:
            raise RewardError(f"no process can be started for it: {error}; see --reward-workers") from None
        self._send({"path": sys.path}, self._timeout_s + LOAD_TIMEOUT_S)

    def _send(self, request: dict[str, Any], timeout_s: float) -> None:
        """Begin an exchange."""
        self.is_busy = True
        self._request_id = secrets.token_hex(8)
        self._process.received.clear()
        self._limit_s = timeout_s
        self._process.write(json.dumps({"id": self._request_id, **request}).encode() + b"\n")
        self._deadline = time.monotonic() + timeout_s

    def _receive(self) -> dict[str, Any] | str | None:
        """Send and read what can be. Returns None, the answer, or an error string."""
        if self._process.has_unsent and self._process.flush():
            # The worker's time begins when it has got its request: this process may be late in sending the rest of it.
            self._deadline = time.monotonic() + self._limit_s
        has_ended = self._process.read()
        if self._process.received.endswith(b"\n"):
            return checked_answer(self._process.received, self._request_id) or NO_ANSWER
        if len(self._process.received) > MAX_ANSWER:
            return NO_ANSWER
        if has_ended:
            return self._process.how_it_ended()
        # After the read: this process may have been busy with something else when the answer came.
        if time.monotonic() > self._deadline:
            return f"took more than {self._limit_s:g} s and was killed; see --reward-timeout"
        return None


def wait_for_any(workers: Sequence[Worker], timeout_s: float) -> None:
    """Wait until a busy worker can go on or is over its time, for at most `timeout_s` and POLL_S seconds."""
    # This wait is limited by the deadlines, not by --hang-timeout.
    watchdog.heartbeat()
    poller = select.poll()
    limits = [worker.register(poller) for worker in workers]
    poller.poll(1000 * max(0.0, min(timeout_s, POLL_S, *limits)))
