"""Conversations with a user's code in worker processes: open one, send to it, close it.

An episode is a conversation of several messages (`child` is the program that a worker runs). If a process dies, takes
too long or sends nonsense, another one takes over its conversations and is told everything that the first was told.
Conversations still without a reply are suspects: they are opened one at a time, and if a process dies with one of them,
that one has failed.
"""

import contextlib
import functools
import itertools
import json
import secrets
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minirl.errors import InputError, escaped
from minirl.ranks.process_group import print_here, rank
from minirl.workers.process import UserProcess
from minirl.workers.user_code import source_and_name

# For the imports of the user's file, in addition to the time limit of a reply.
LOAD_TIMEOUT_S = 60.0
# An event loop reports which conversation takes too long, unless the loop itself hangs.
GRACE_S = 3.0
# The most bytes of an answer.
MAX_ANSWER = 1 << 26
NO_ANSWER = (
    "its process sent something other than an answer; does its code write to files that it did not open?"
)
PROGRAM = "import sys; sys.path.insert(0, sys.argv.pop(1)); from minirl.workers.child import main; main()"
PACKAGE_ROOT = str(Path(__file__).parents[2])


class WorkerError(RuntimeError):
    """A worker process could not be started, or did not load its code.

    number: the conversation that it was started for, if any.
    """

    def __init__(self, message: str, number: int | None = None):
        super().__init__(message)
        self.number = number


@dataclass(frozen=True)
class Reply:
    """The code's reply to a message, or the error with which it failed.

    is_last: whether this ends the conversation. facts: `Conversation.facts`; None if the process died or took too long.
    """

    content: Any = None
    error: str | None = None
    is_last: bool = True
    facts: Any = None


@dataclass(frozen=True)
class Kind:
    """The kind of code in a pool, for its workers and for messages.

    flag: the flag that names the code. expected: the form of the flag's value, in messages. called: precedes the name
    of the code. adapter: loads the code (`child`). describes_apart: another process describes the code, since that
    imports much. too_long: the end of the message about a late reply.
    """

    flag: str
    called: str
    adapter: str
    too_long: str
    expected: str = "function"
    describes_apart: bool = False


class Pool:
    """Workers that have loaded a user's code. Nothing here is collective, and only the constructor waits.

    Each worker runs the user's file separately, and so has its own state, which is lost when it is killed.

    what: the code's name in messages. description: the adapter's.
    """

    def __init__(self, kind: Kind, spec: str, *, timeout_s: float, num_workers: int = 1):
        """Start the workers and wait until they have loaded the code. spec: "file.py:name" or "module:name".

        timeout_s: limit of one reply. Raises InputError if the code is missing or cannot be loaded.
        """
        source, self.name = source_and_name(kind.flag, spec, kind.expected)
        self.what = f"{kind.called} {self.name}"
        self._start_worker = functools.partial(
            _Worker, kind, source, self.name, note=self._note, timeout_s=timeout_s
        )
        self._numbers = itertools.count()
        self._worker_of: dict[int, _Worker] = {}
        # Replies that nobody has taken, by conversation.
        self._replies: dict[int, Reply] = {}
        # The kinds of notes printed so far: each is printed once.
        self._printed_notes: set[str] = set()
        self.workers: list[_Worker] = []
        try:
            # All workers load the file at the same time.
            for _ in range(num_workers):
                self.workers.append(self._start_worker())
            if kind.describes_apart:
                self.workers.append(self._start_worker(describes=True))
            self._wait_until_ready()
        except WorkerError as error:
            self.stop()
            raise InputError(f"{kind.flag} {source}:{self.name}: {error}") from None
        self.description = self.workers[-1].description
        if kind.describes_apart:
            self.workers.pop().kill()
        self._max_conversations = self.workers[0].max_conversations

    def resize(self, num_workers: int) -> None:
        """Change the number of workers, and wait until all have loaded the code; none may have a conversation.

        Raises WorkerError if one cannot be started.
        """
        for worker in self.workers[num_workers:]:
            worker.kill()
        del self.workers[num_workers:]
        for _ in range(num_workers - len(self.workers)):
            self.workers.append(self._start_worker())
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        while not all(worker.is_ready for worker in self.workers):
            wait_for_any([self], 1.0)
            self.poll()

    def open(self, seed: int, opening: Callable[[], Any]) -> int:
        """Open a conversation with the worker that has the fewest; returns its number.

        seed: for the random generators. opening: returns the first message, as JSON; called again when the process is
        replaced, it returns everything that its successor must be told. Raises the errors of `json.dumps`, and
        WorkerError if no process starts.
        """
        worker = min(self.workers, key=lambda worker: len(worker.held))
        if len(worker.held) >= self._max_conversations:
            # A conversation that waited for another's end could wait forever: a group's episodes begin together.
            worker = self._start_worker()
            self.workers.append(worker)
        number = next(self._numbers)
        worker.open(number, _OpenConversation(seed, opening, json.dumps(opening())))
        self._worker_of[number] = worker
        return number

    def send(self, number: int, message: Any) -> None:
        """Reply to the code's last reply; the code replies again."""
        self._worker_of[number].send(number, message)

    def close(self, number: int) -> None:
        """End a conversation that waits for a message, without a reply."""
        self._worker_of.pop(number).close(number)

    def seconds(self, number: int) -> float:
        """Return how long the code has taken for a conversation in its present process."""
        return self._worker_of[number].held[number].seconds

    def flush(self) -> None:
        """Send all messages of `open`, `send` and `close` in one piece. Raises WorkerError."""
        for worker in self.workers:
            worker.flush()

    def poll(self, numbers: Collection[int] = ()) -> list[tuple[int, Reply]]:
        """Return the replies of these conversations so far, in any order; send, and replace processes as needed.

        Replies of other conversations are kept for later calls. Raises WorkerError if no replacement starts.
        """
        for worker in self.workers:
            self._replies.update(worker.poll())
        taken = [(number, self._replies.pop(number)) for number in list(self._replies) if number in numbers]
        for number, reply in taken:
            if reply.is_last:
                del self._worker_of[number]
        return taken

    def _note(self, kind: str, text: str | None) -> None:
        # User code prints nearly the same on all ranks.
        if text and (kind != "printed" or rank() == 0):
            self.print_once(kind, f"{self.what} {kind} (said once):\n{escaped(text)}")

    def print_once(self, kind: str, text: str) -> None:
        """Print a note on this rank unless one of this kind was printed before."""
        if kind not in self._printed_notes:
            self._printed_notes.add(kind)
            print_here(f"note: {text}")

    def stop(self) -> None:
        """Kill the workers and the other processes of their sessions."""
        for worker in self.workers:
            worker.kill()


def wait_for_any(pools: Sequence[Pool], timeout_s: float) -> None:
    """Wait until a process of some pool has sent something or has exceeded its time, up to `timeout_s` seconds.

    Returns at once if no process owes an answer. Raises WorkerError.
    """
    poller = select.poll()
    limits = []
    for pool in pools:
        pool.flush()
        limits += [worker.register(poller) for worker in pool.workers if worker.is_busy]
    if limits:
        poller.poll(1000 * max(0.0, min(timeout_s, *limits)))


@dataclass
class _OpenConversation:
    """A worker's record of a conversation; see `Pool.open` for the first fields.

    message: the next one for the process, as JSON; None: `opening` has yet to make it, since the process is new.
    num_replies: those so far, which a new process repeats, each with its own time limit. is_there: whether the process
    has the conversation. seconds: the code's time in this process.
    """

    seed: int
    opening: Callable[[], Any]
    message: str | None
    num_replies: int = 0
    is_there: bool = False
    is_closing: bool = False
    seconds: float = 0.0


class _Worker:
    """One worker: a process, and its successors if it fails. Nothing here waits.

    held: the conversations. is_ready: whether the process has loaded the code.
    """

    def __init__(
        self,
        kind: Kind,
        source: str,
        name: str,
        *,
        note: Callable[[str, str | None], None],
        timeout_s: float,
        describes: bool = False,
    ):
        """Start a process. note: tells the user a text, if there is one. Raises WorkerError if the start fails."""
        self._kind = kind
        self._arguments = [kind.adapter, source, name]
        if describes or not kind.describes_apart:
            self._arguments.append("describe")
        self._timeout_s = timeout_s
        self.held: dict[int, _OpenConversation] = {}
        # Conversations with messages to send; before them suspects, to open one at a time.
        self._waiting: deque[int] = deque()
        self._suspects: deque[int] = deque()
        # Awaited replies in the order of sending: when each was requested, and its time limit.
        self._awaited: dict[int, tuple[float, float]] = {}
        self._note = note
        self.description: Mapping[str, Any] = {}
        self.max_conversations = sys.maxsize
        self._is_async = False
        self._is_running = False
        self._start()

    @property
    def pid(self) -> int:
        """The latest process; it may be dead."""
        return self._process.pid

    @property
    def is_busy(self) -> bool:
        """Return whether the process owes an answer."""
        return self._is_running and (not self.is_ready or bool(self._awaited))

    def open(self, number: int, conversation: _OpenConversation) -> None:
        """Add a new conversation, which awaits a reply."""
        self.held[number] = conversation
        self._waiting.append(number)

    def send(self, number: int, message: Any) -> None:
        """Add a message of a conversation, which awaits a reply."""
        if self.held[number].is_there:
            self.held[number].message = json.dumps(message)
        self._waiting.append(number)

    def close(self, number: int) -> None:
        """Let the code end a conversation that the process has; forget another one."""
        if self.held[number].is_there:
            self.held[number].is_closing = True
            self._waiting.append(number)
        else:
            del self.held[number]

    def kill(self) -> None:
        """Kill the process and all others of its session; the next message starts another."""
        self._is_running = False
        self._process.kill()

    def register(self, poller: select.poll) -> float:
        """Register the events to wait for. Returns the seconds until the process exceeds its time."""
        self._process.register(poller)
        return min(self._deadlines().values()) - time.monotonic()

    def flush(self) -> None:
        """Send all waiting messages, or a suspect's alone. Raises WorkerError."""
        if not self._waiting and not self._suspects:
            return
        if not self._is_running:
            self._start()
        if not self.is_ready or (self._suspects and self._awaited):
            return
        if self._suspects:
            requests = [self._request(self._suspects[0])]
        else:
            requests = [self._request(number) for number in self._waiting]
            self._waiting.clear()
        self._process.write(b"".join(requests))

    def poll(self) -> list[tuple[int, Reply]]:
        """Send and read as much as possible; replace a process that died or takes too long. Returns the replies.

        Raises WorkerError.
        """
        self.flush()
        if not self.is_busy:
            return []
        if self._process.flush():
            # A request's time begins when the process has it, since this process may send the rest late.
            self._since = time.monotonic()
        replies: list[tuple[int, Reply]] = []
        lines, has_ended = self._read()
        for line in lines:
            answer = self._parsed(line)
            if answer is None:
                return replies + self._replace(NO_ANSWER)
            self._note("printed", answer["printed"])
            if self.is_ready:
                replies += self._received(answer)
            else:
                self._begin_serving(answer)
        if has_ended:
            return replies + self._replace(self._process.how_it_ended())
        # After the read: this process may have been busy with something else when the answer came.
        late = [number for number, deadline in self._deadlines().items() if time.monotonic() > deadline]
        if late:
            return replies + self._replace(self._too_long(), late[0])
        self.flush()
        return replies

    def _start(self) -> None:
        """Start a process; its first answer says that it loaded the code."""
        self.is_ready = False
        self._key = secrets.token_hex(8)
        # When the process could start its current work, or last sent something.
        self._since = time.monotonic()
        try:
            self._process: UserProcess = UserProcess(["-c", PROGRAM, PACKAGE_ROOT, *self._arguments])
        except OSError as error:
            workers_flag = f"--{self._kind.called}-workers"
            message = f"no process can be started for it: {error}; see {workers_flag}"
            raise WorkerError(message, self._started_for()) from None
        self._is_running = True
        self._process.write(json.dumps({"id": self._key, "path": sys.path}).encode() + b"\n")

    def _started_for(self) -> int | None:
        """Return the number of a conversation that needs a process."""
        return next(itertools.chain(self._suspects, self.held), None)

    def _begin_serving(self, answer: Mapping[str, Any]) -> None:
        """Take the first answer of a process. Raises WorkerError."""
        if "error" in answer:
            self.kill()
            raise WorkerError(escaped(str(answer["error"])), self._started_for())
        self.is_ready = True
        self._is_async = answer["is_async"]
        self.max_conversations = answer["max_conversations"] or sys.maxsize
        self.description = answer["description"]

    def _replace(self, why: str, late: int | None = None) -> list[tuple[int, Reply]]:
        """Kill a process that died, hangs or sends nonsense; returns the reply of the conversation that failed.

        late: the number of the conversation that takes too long; with an `async def`, one of the possible culprits.
        Raises WorkerError if the process was just starting.
        """
        self.kill()
        if not self.is_ready:
            raise WorkerError(escaped(why), self._started_for())
        culprit = None
        if self._suspects:
            culprit = self._suspects.popleft()
        elif not self._is_async:
            culprit = late
        self._suspects += [number for number in self._awaited if number != culprit]
        self._awaited.clear()
        self.held = {
            number: replace(conversation, message=None, is_there=False)
            for number, conversation in self.held.items()
            if not conversation.is_closing
        }
        self._suspects = deque(number for number in self._suspects if number in self.held)
        self._waiting = deque(number for number in self._waiting if number in self.held)
        if culprit is None or self.held.pop(culprit, None) is None:
            return []
        return [(culprit, Reply(error=why))]

    def _request(self, number: int) -> bytes:
        """Return the line that sends a conversation's message, and start to await the answer."""
        conversation = self.held[number]
        limit_s = self._timeout_s
        request: dict[str, Any] = {"number": number}
        message = conversation.message
        if conversation.is_closing:
            request["closes"] = True
        elif not conversation.is_there:
            request["seed"] = conversation.seed
            limit_s *= conversation.num_replies + 1
            message = message or json.dumps(conversation.opening())
            conversation.seconds = 0.0
        conversation.is_there = True
        conversation.message = None
        self._awaited[number] = (time.monotonic(), limit_s)
        head = json.dumps({**request, "limit_s": limit_s})
        # The message is JSON already, made once when it was known.
        return f'{head[:-1]}, "message": {message or "null"}}}\n'.encode()

    def _deadlines(self) -> dict[int, float]:
        """Return when the process exceeds its time, by the conversation to blame; -1 for its start."""
        if not self.is_ready:
            return {-1: self._since + self._timeout_s + LOAD_TIMEOUT_S}
        # A full pipe may have held the other process up while this one was busy: its time begins after the last bytes.
        awaited = self._awaited.items()
        if self._is_async:
            return {number: max(sent + limit, self._since) + GRACE_S for number, (sent, limit) in awaited}
        # The first one runs, since it was sent or its predecessor ended; the others wait for it.
        first = itertools.islice(awaited, 1)
        return {number: max(sent, self._since) + limit for number, (sent, limit) in first}

    def _too_long(self) -> str:
        return f"took more than {self._timeout_s:g} s {self._kind.too_long}"

    def _read(self) -> tuple[list[bytes], bool]:
        """Return the complete lines, and whether no more will come."""
        received = self._process.received
        num_searched = len(received)  # bytes without an end of a line
        has_ended = False
        size = -1
        while not has_ended and size < len(received) <= MAX_ANSWER:
            size = len(received)
            has_ended = self._process.read()
            if len(received) > size:
                self._since = time.monotonic()
        end = received.rfind(b"\n", num_searched) + 1
        *lines, _ = bytes(received[:end]).split(b"\n")
        del received[:end]
        if len(received) > MAX_ANSWER:
            lines.append(b"")  # no answer
        return lines, has_ended

    def _parsed(self, line: bytes) -> dict[str, Any] | None:
        """Return the answer in a line; None if the worker's own code did not send it."""
        answer = None
        with contextlib.suppress(ValueError, RecursionError):
            answer = json.loads(line)
        if not isinstance(answer, dict) or answer.get("id") != self._key:
            return None
        if not isinstance(answer.get("printed"), str) or not isinstance(answer.get("error", ""), str):
            return None
        if not self.is_ready:
            return answer
        is_awaited = answer.get("number") in self._awaited and "facts" in answer and "seconds" in answer
        return answer if is_awaited and answer.keys() & {"reply", "error", "is_late"} else None

    def _received(self, answer: Mapping[str, Any]) -> list[tuple[int, Reply]]:
        """Take an answer; returns its reply, unless its conversation was closed."""
        number = answer["number"]
        del self._awaited[number]
        if self._suspects:
            self._suspects.popleft()
        conversation = self.held[number]
        conversation.seconds += answer["seconds"]
        conversation.num_replies += 1
        error = self._too_long() if "is_late" in answer else answer.get("error")
        is_last = answer.get("is_last", True)
        if is_last:
            del self.held[number]
        if not conversation.is_closing:
            return [(number, Reply(answer.get("reply"), error, is_last, answer["facts"]))]
        self._note("failed at its end", error)
        return []
