"""A process that runs a user's code, and the lines to and from it. Nothing here waits for it.

Nothing is pickled. The process has the user's rights: this limits accidents, not attacks.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence

# Bytes to read at a time.
READ_SIZE = 1 << 16


class UserProcess:
    """`python -P` with these arguments, in its own session, which is killed as a whole. Not collective.

    received: bytes from the process that no reader has taken yet.
    """

    def __init__(self, arguments: Sequence[str]):
        """Raises OSError if the system cannot start a process."""
        self.received = bytearray()
        self._unsent = memoryview(b"")
        self._process = subprocess.Popen(
            # -P: modules beside a program must not hide those of the user.
            [sys.executable, "-P", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            # With a fixed hash seed, sets keep their order after a resume.
            env={"PYTHONHASHSEED": "0", **os.environ},
        )
        # Kills once: when called, when this object is deleted, or when this process exits.
        self.kill = weakref.finalize(self, _kill_session, self._process)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin.fileno()
        self._stdout = self._process.stdout.fileno()
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stdout, False)

    @property
    def pid(self) -> int:
        """The process, which may be dead."""
        return self._process.pid

    def write(self, data: bytes) -> None:
        """Send data after the unsent data."""
        self._unsent = memoryview(bytes(self._unsent) + data)
        self.flush()

    def flush(self) -> bool:
        """Send as much as the pipe takes, since a line may exceed its size. Returns whether the process took any."""
        if not self._unsent:
            return False
        try:
            num_sent = os.write(self._stdin, self._unsent)
        except BlockingIOError:
            return False
        except BrokenPipeError:
            # The process will not read the rest, but may have written an answer.
            num_sent = len(self._unsent)
        self._unsent = self._unsent[num_sent:]
        return True

    def read(self) -> bool:
        """Read some bytes into `received`; returns whether no more will come."""
        # Checked before the read, which then gets everything that a dead process wrote.
        has_exited = self._process.poll() is not None
        received = None
        with contextlib.suppress(BlockingIOError):
            received = os.read(self._stdout, READ_SIZE)
        self.received += received or b""
        # When the process dies its pipe closes, unless a process that it forked holds it open.
        return received == b"" or (has_exited and received is None)

    def register(self, poller: select.poll) -> None:
        """Register the pipes to wait for."""
        poller.register(self._stdout, select.POLLIN)
        if self._unsent:
            poller.register(self._stdin, select.POLLOUT)

    def how_it_ended(self) -> str:
        """Return how the process, which will send no more, ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        code = self._process.returncode
        if code is None:
            return "closed the pipes of its process"
        if code < 0:
            return f"ended its process, {_signal_name(-code)}"
        return f"ended its process, exit code {code}"


def _signal_name(number: int) -> str:
    """SIGKILL, for example; most real-time signals have no name."""
    names = {known.value: known.name for known in signal.Signals}
    return names.get(number, f"signal {number}")


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all those that it started, unless they have left its session."""
    # Leaving the block closes the pipes and reaps the process.
    with process, contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
