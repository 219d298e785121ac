"""Keeps accidents of user code inside its process, and apart from other user code there.

User code cannot write into the protocol by accident: both pipes move to high file descriptors, fds 0, 1 and 2 become
/dev/null, and sys.stdout and sys.stderr become a buffer of limited size. Each conversation has its own working
directory and random generators. This guards against accidents and is not a security boundary: the trainer checks all
answers.

Standard library only: a worker starts quickly.
"""

import fcntl
import io
import os
import random
import resource
import select
import signal
import sys
import types
from collections.abc import Callable, Coroutine, Generator, Mapping

# Bound before user code runs, which may replace functions of the module.
from json import dumps, loads
from typing import Any, BinaryIO

# Characters of user code's output that the trainer receives.
MAX_OUTPUT = 2000
# Lower if this process has a lower limit.
MAX_FILE_DESCRIPTOR = 4096


class TrainerPipes:
    """The process that sends requests and receives answers, both as lines of JSON."""

    def __init__(self, requests: BinaryIO, answers: BinaryIO, key: str, printed: "_PrintBuffer"):
        """key: part of each answer; the trainer ignores lines without it."""
        self.requests = requests
        self._answers = answers
        self._key = key
        self._printed = printed

    def send(self, answer: Mapping[str, Any]) -> None:
        """Send an answer, with the output of user code."""
        line = dumps({"id": self._key, **answer, "printed": self._printed.take_text()})
        self._answers.write(line.encode() + b"\n")
        self._answers.flush()


def connect(source: str) -> TrainerPipes | None:
    """Make this process ready for user code and take the first request, {"id", "path"}: the trainer's sys.path.

    Returns None if the trainer ended before it sent one.
    """
    _start_guard()
    requests, answers = _take_pipes()
    printed = _PrintBuffer()
    sys.stdout = io.TextIOWrapper(printed, "utf-8", errors="backslashreplace", write_through=True)
    sys.stderr = sys.stdout
    first_line = requests.readline()
    if not first_line:
        return None
    first = loads(first_line)
    own_folder = os.path.dirname(os.path.abspath(source)) if source.endswith(".py") else os.getcwd()
    sys.path[:] = [*first["path"], own_folder]
    return TrainerPipes(requests, answers, first["id"], printed)


def _start_guard() -> None:
    """Fork a guard that kills this process's group as soon as the trainer is gone, however it ended.

    The group holds this process and all that user code forks or starts. Stdin tells the guard that the trainer is gone:
    only the trainer holds the pipe's other end. The guard is not a child of this process, since user code may wait
    for all of its children.
    """
    child = os.fork()
    if child != 0:
        os.waitpid(child, 0)
        return
    if os.fork() != 0:
        os._exit(0)
    # The trainer must see the answers' pipe closed when the worker ends.
    os.closerange(1, 3)
    hangup = select.poll()
    # Without a mask, poll reports only the hangup: the guard ignores requests.
    hangup.register(0, 0)
    hangup.poll()
    os.killpg(0, signal.SIGKILL)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return stdin and stdout under high file descriptors, and open /dev/null as fds 0, 1 and 2.

    User code that closes all low descriptors, or writes to some, misses them; programs that it starts do not inherit
    them.
    """
    requests = os.fdopen(_high_descriptor(0), "rb", 1 << 20)
    answers = os.fdopen(_high_descriptor(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    return requests, answers


def _high_descriptor(fd: int) -> int:
    """Return another descriptor of the same file, in the upper half of this process's range."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit > MAX_FILE_DESCRIPTOR:
        limit = MAX_FILE_DESCRIPTOR
    lowest = random.SystemRandom().randrange(limit // 2, limit - 10)
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)


def working_directory() -> int:
    """Return a high file descriptor of the current working directory."""
    opened = os.open(".", os.O_RDONLY)
    folder = _high_descriptor(opened)
    os.close(opened)
    return folder


class _PrintBuffer(io.RawIOBase):
    """A file that keeps the beginning of the text written to it and drops the rest."""

    def __init__(self) -> None:
        super().__init__()
        self._kept = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        # A character takes at most 4 bytes in UTF-8.
        num_free = 4 * MAX_OUTPUT - len(self._kept)
        self._kept += bytes(data)[:num_free]
        return len(data)

    def take_text(self) -> str:
        """Return the kept text and empty the buffer."""
        text = self._kept.decode("utf-8", "replace")
        self._kept = b""
        return text[:MAX_OUTPUT]


class OwnRandom:
    """One conversation's state of the global random generators; each is seeded when the conversation first meets it."""

    def __init__(self, seed: int):
        self._seed = seed
        self._states: dict[str, Any] = {}

    def restore(self) -> None:
        """Give the generators this state."""
        for name, (_, set_state, seed) in _generators().items():
            if name in self._states:
                set_state(self._states[name])
            else:
                seed(self._seed)

    def save(self) -> None:
        """Take over the generators' state."""
        self._states = {name: get_state() for name, (get_state, _, _) in _generators().items()}


def _generators() -> dict[str, tuple[Any, Any, Any]]:
    """Return how to get, set and seed each global generator that is loaded."""
    found: dict[str, tuple[Any, Any, Any]] = {"random": (random.getstate, random.setstate, random.seed)}
    if "numpy" in sys.modules:
        # As an attribute: NumPy imports its generators when they are first used.
        numpy = sys.modules["numpy"].random
        found["numpy"] = (numpy.get_state, numpy.set_state, lambda seed: numpy.seed(seed % 2**32))
    if "torch" in sys.modules:
        torch = sys.modules["torch"].random
        found["torch"] = (torch.get_rng_state, torch.set_rng_state, torch.manual_seed)
    return found


@types.coroutine
def isolated(
    coroutine: Coroutine[Any, Any, Any], own_random: OwnRandom, folder: int
) -> Generator[Any, Any, Any]:
    """Run a coroutine and return its result. It always finds its own random state, and this working directory.

    folder: a file descriptor. In a process that user code forked and let return, does not return.
    """
    pid = os.getpid()
    send: Callable[[Any], Any] = coroutine.send
    value = None
    while True:
        os.fchdir(folder)
        own_random.restore()
        try:
            waits_for = send(value)
        except StopIteration as end:
            return end.value
        finally:
            own_random.save()
            if os.getpid() != pid:
                os._exit(0)
        try:
            value = yield waits_for
            send = coroutine.send
        except BaseException as error:
            value = error
            send = coroutine.throw
