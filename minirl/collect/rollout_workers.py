"""Run a user's rollout function in worker processes (`rollout_worker`), beside decoding.

A process that dies, or takes too long, is replaced. The episodes that it had are run again there, with the turns that
they had got, and must ask for the same again. Those that had not been replied to are suspects: they are run again one
at a time, and the one that a process dies with has failed.
"""

import itertools
import json
import secrets
import select
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minirl.episodes.asked import Generate
from minirl.episodes.episode import Episode, Turn
from minirl.episodes.program import Failed, Reply
from minirl.episodes.remote import opening, read_reply, take_facts, turns_message
from minirl.errors import InputError, RolloutError
from minirl.files.redaction import escaped
from minirl.ranks import watchdog
from minirl.ranks.process_group import print_here, rank
from minirl.ranks.time_account import spent_on
from minirl.workers.pool import LOAD_TIMEOUT_S, MAX_ANSWER, NO_ANSWER, Kind
from minirl.workers.process import UserProcess

# A process that runs an `async def` sees itself which episode takes too long, unless it hangs.
GRACE_S = 3.0
PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from minirl.collect.rollout_worker import main; main()"
)
PACKAGE_ROOT = str(Path(__file__).parents[2])


def load_rollout(
    spec: str,
    *,
    kind: str = "rollout",
    timeout_s: float = 60.0,
    on_error: str = "stop",
    num_workers: int = 1,
) -> "RolloutWorkers":
    """Start workers for what the flag --KIND names, "file.py:name" or "module:name". Raises InputError if it cannot be.

    kind: "rollout", a rollout function; "tools" (several names, with commas between them) or "environment", of which
    `tool_loop` makes one.
    """
    expected = {"rollout": "function", "tools": "function,function", "environment": "Class"}[kind]
    flag = Kind(flag=f"--{kind}", called="rollout", adapter="", too_long="", expected=expected)
    source, name = flag.source_and_name(spec)
    return RolloutWorkers(
        source, name, kind=kind, timeout_s=timeout_s, on_error=on_error, num_workers=num_workers
    )


class RolloutWorkers:
    """A rollout function that runs in worker processes: a `program.Host`."""

    def __init__(
        self,
        source: str,
        name: str,
        *,
        kind: str = "rollout",
        timeout_s: float,
        on_error: str = "stop",
        num_workers: int = 1,
    ):
        """Start the workers. source: a Python file, or a module's name. kind: as for `load_rollout`.

        timeout_s: limit of one reply. on_error: "end" ends a few failed episodes where they are, "stop" none. Raises
        InputError if the function cannot be loaded.
        """
        self.name = name
        self.kind = kind
        self.on_error = on_error
        # JSON schemas of the tools that the function calls; whether it is of an environment with `get_reward`.
        self.tools: list[dict[str, Any]] = []
        self.gives_reward = False
        self._numbers = itertools.count()
        self._of_episode: dict[int, _Worker] = {}
        # The kinds of notes that were printed: each is printed once.
        self._printed_notes: set[str] = set()
        self.workers: list[_Worker] = []
        self._arguments = [kind, source, name]
        self._timeout_s = timeout_s
        try:
            # All load the file at the same time.
            for _ in range(num_workers):
                self.workers.append(_Worker(self._arguments, timeout_s=timeout_s))
            if kind != "rollout":
                self.workers.append(_Worker([*self._arguments, "describe"], timeout_s=timeout_s))
            while not all(worker.is_ready for worker in self.workers):
                self._wait(1.0)
                for worker in self.workers:
                    worker.poll()
                    self._show_notes(worker)
        except RolloutError as error:
            self.stop()
            raise InputError(f"--{kind} {source}:{name}: {error}") from None
        if kind != "rollout":
            describer = self.workers.pop()
            describer.kill()
            self.tools = describer.tools
            self.gives_reward = describer.gives_reward
        # That a process takes at a time.
        self._max_episodes = self.workers[0].max_episodes

    def begin(self, episode: Episode, turns: Sequence[Turn] = ()) -> int:
        """See `Host`. Raises InputError for a row that cannot be sent as JSON, RolloutError if no process starts."""
        number = next(self._numbers)
        for turn in turns:
            episode.take(turn)
        try:
            worker = min(self.workers, key=lambda worker: worker.num_episodes)
            if worker.num_episodes >= self._max_episodes:
                # An episode that waited for another to end might wait for ever: those of a group begin together.
                worker = _Worker(self._arguments, timeout_s=self._timeout_s)
                self.workers.append(worker)
            worker.begin(number, episode)
        except (TypeError, ValueError, RecursionError) as error:
            message = f"--{self.kind}: the row at {episode.row.place} cannot be sent to it: {error}"
            raise InputError(message) from None
        except RolloutError as error:
            raise RolloutError(f"rollout {self.name}: {error}") from None
        self._of_episode[number] = worker
        return number

    def send(self, number: int, turn: Turn) -> None:
        """See `Host`."""
        self._of_episode[number].take(number, turn)

    def close(self, number: int) -> None:
        """As `Host`."""
        self._of_episode.pop(number).end(number)

    def seconds(self, number: int) -> float:
        """As `Host`. In the process that it has: one that died does not count."""
        return self._of_episode[number].seconds(number)

    def replies(self, timeout_s: float = 0.0) -> list[tuple[int, Reply]]:
        """As `Host`. Raises RolloutError if a process that is to be replaced does not start."""
        if timeout_s > 0:
            self._wait(timeout_s)
        found = []
        try:
            for worker in self.workers:
                found += worker.poll()
                self._show_notes(worker)
        except RolloutError as error:
            raise RolloutError(f"rollout {self.name}: {error}") from None
        for number, reply in found:
            if not isinstance(reply, Generate):
                self._of_episode.pop(number, None)
        return found

    def stop(self) -> None:
        """Kill the workers and the other processes of their sessions."""
        for worker in self.workers:
            worker.kill()

    @spent_on("wait_replies")
    def _wait(self, timeout_s: float) -> None:
        """Wait until something is to be read from a worker that has to reply, or one is over its time."""
        # This wait is limited by the deadlines, not by --hang-timeout.
        watchdog.heartbeat(f"rollout {self.name}")
        poller = select.poll()
        limits = [worker.register(poller) for worker in self.workers if worker.is_busy]
        if limits:
            poller.poll(1000 * max(0.0, min(timeout_s, *limits)))
        watchdog.heartbeat("")

    def _show_notes(self, worker: "_Worker") -> None:
        """Print once what the user's code has printed, on rank 0: it is much the same on all; and what it raised."""
        for kind, text in worker.take_notes().items():
            if kind not in self._printed_notes and (rank() == 0 or kind != "printed"):
                self._printed_notes.add(kind)
                print_here(f"note: rollout {self.name} {kind} (said once):\n{escaped(text)}")


@dataclass
class _Hosted:
    """An episode as its worker has it.

    is_there: whether the process has it. is_closing: whether it is to end without a reply. seconds: that its function
    has taken in this process.
    """

    episode: Episode
    is_there: bool = False
    is_closing: bool = False
    seconds: float = 0.0


class _Worker:
    """One process after another that runs episodes. Nothing here waits."""

    def __init__(self, arguments: Sequence[str], *, timeout_s: float):
        """arguments: of the program. Raises RolloutError if the system starts no process."""
        self._arguments = arguments
        # What the first answer says.
        self.tools: list[dict[str, Any]] = []
        self.gives_reward = False
        self.max_episodes = sys.maxsize
        self._timeout_s = timeout_s
        self._hosted: dict[int, _Hosted] = {}
        # Episodes to be sent; those to be sent before them, one at a time.
        self._waiting: deque[int] = deque()
        self._suspects: deque[int] = deque()
        # Replies that are awaited, in the order of sending: when each was asked for, and for how long it may take.
        self._awaited: dict[int, tuple[float, float]] = {}
        self._replied_at = 0.0
        self._notes: dict[str, str] = {}
        self._is_async = False
        self._start()

    @property
    def pid(self) -> int:
        """The process that was started last; it may have ended."""
        return self._process.pid

    @property
    def is_busy(self) -> bool:
        """Whether the process has to send something."""
        return not self.is_ready or bool(self._awaited)

    @property
    def num_episodes(self) -> int:
        """How many episodes have begun and not ended."""
        return len(self._hosted)

    def begin(self, number: int, episode: Episode) -> None:
        """Call the function for a new episode. Raises what `json.dumps` raises of its row."""
        json.dumps(episode.header)
        self._hosted[number] = _Hosted(episode)
        self.ask(number)

    def take(self, number: int, turn: Turn) -> None:
        """Give an episode the turn that it asked for, which is replied to."""
        self._hosted[number].episode.take(turn)
        self.ask(number)

    def ask(self, number: int) -> None:
        """Ask for the reply to an episode's beginning, its newest turn or its end."""
        self._waiting.append(number)
        self._feed()

    def end(self, number: int) -> None:
        """End an episode that has replied."""
        hosted = self._hosted[number]
        hosted.is_closing = True
        if hosted.is_there:
            self.ask(number)
        else:
            del self._hosted[number]

    def seconds(self, number: int) -> float:
        """How long the function of an episode has taken in this process."""
        return self._hosted[number].seconds

    def register(self, poller: select.poll) -> float:
        """Register what there is to wait for. Returns the seconds until it has taken too long."""
        self._process.register(poller)
        return min(self._deadlines().values()) - time.monotonic()

    def poll(self) -> list[tuple[int, Reply]]:
        """Send and read what can be; replace a process that has died or takes too long. Returns the replies.

        Raises RolloutError if the function cannot be loaded.
        """
        replies: list[tuple[int, Reply]] = []
        if not self.is_busy:
            return replies
        if self._process.has_unsent:
            self._process.flush()
        lines, has_ended = self._read()
        for line in lines:
            answer = self._parsed(line)
            if answer is None:
                return replies + self._replace(NO_ANSWER)
            if answer["printed"]:
                self._notes["printed"] = answer["printed"]
            if not self.is_ready:
                self._begin_serving(answer)
            else:
                replies += self._received(answer)
        if has_ended:
            return replies + self._replace(self._process.how_it_ended())
        # After the read: this process may have been busy with something else when the answer came.
        late = [number for number, deadline in self._deadlines().items() if time.monotonic() > deadline]
        if late:
            return replies + self._replace(self._lateness(), late[0])
        self._feed()
        return replies

    def take_notes(self) -> dict[str, str]:
        """What to tell the user, by its kind."""
        notes, self._notes = self._notes, {}
        return notes

    def kill(self) -> None:
        """Kill the process and all others of its session."""
        self._process.kill()

    def _start(self) -> None:
        """Start a process, which says first whether the function is async."""
        self.is_ready = False
        self._key = secrets.token_hex(8)
        self._started_at = time.monotonic()
        try:
            self._process = UserProcess(["-c", PROGRAM, PACKAGE_ROOT, *self._arguments])
        except OSError as error:
            raise RolloutError(f"no process can be started for it: {error}; see --rollout-workers") from None
        self._write({"path": sys.path})

    def _begin_serving(self, answer: Mapping[str, Any]) -> None:
        """Take the first answer of a process. Raises RolloutError."""
        if "error" in answer:
            raise RolloutError(escaped(f"{answer['error']}{self._started_for()}"))
        self.is_ready = True
        self._is_async = answer.get("is_async") is True
        self.tools = answer.get("tools", [])
        self.gives_reward = answer.get("gives_reward") is True
        self.max_episodes = answer.get("max_episodes") or sys.maxsize

    def _replace(self, why: str, late: int | None = None) -> list[tuple[int, Reply]]:
        """Start another process in place of one that is no good; returns the reply of the episode that has failed.

        late: the number of the episode that takes too long; of an `async def` it is one of those that may be to blame.
        Raises RolloutError if the process was just being started.
        """
        self.kill()
        if not self.is_ready:
            raise RolloutError(escaped(f"{why}{self._started_for()}"))
        culprit = None
        if self._suspects:
            culprit = self._suspects.popleft()
        elif late is not None and not self._is_async:
            culprit = late
        self._suspects += [number for number in self._awaited if number != culprit]
        self._awaited.clear()
        closing = {number for number, hosted in self._hosted.items() if hosted.is_closing}
        for number in closing:
            del self._hosted[number]
        self._suspects = deque(number for number in self._suspects if number not in closing)
        self._waiting = deque(number for number in self._waiting if number not in closing)
        for hosted in self._hosted.values():
            hosted.is_there = False
        self._start()
        if culprit is None or culprit in closing:
            return []
        del self._hosted[culprit]
        return [(culprit, Failed(why))]

    def _started_for(self) -> str:
        """For an error of a process that is being started in place of another: the row that it is for."""
        numbers = [*self._suspects, *self._hosted]
        if not numbers:
            return ""
        place = self._hosted[numbers[0]].episode.row.place
        return f"\nThe process was started in place of one that had ended, for the row at {place}"

    def _feed(self) -> None:
        """Send what may be sent."""
        if not self.is_ready:
            return
        if self._suspects:
            if not self._awaited:
                self._send(self._suspects[0])
            return
        while self._waiting:
            self._send(self._waiting.popleft())

    def _send(self, number: int) -> None:
        """Send an episode's newest turn, with all that is before it where the process does not have the episode."""
        hosted = self._hosted[number]
        turns = hosted.episode.all_turns
        request: dict[str, Any] = {"episode": number}
        num_pieces = 1
        if hosted.is_closing:
            request |= {"close": True}
        elif hosted.is_there:
            request |= turns_message(hosted.episode, turns[-1:])
        else:
            request |= opening(hosted.episode)
            num_pieces = 1 + len(turns)
            hosted.seconds = 0.0
        limit_s = self._timeout_s * num_pieces
        hosted.is_there = True
        self._write({**request, "limit_s": limit_s})
        self._awaited[number] = (time.monotonic(), limit_s)

    def _write(self, request: Mapping[str, Any]) -> None:
        self._process.write(json.dumps({"id": self._key, **request}).encode() + b"\n")

    def _deadlines(self) -> dict[int, float]:
        """When the process has taken too long, by the episode that is to blame; -1 for the loading of the file."""
        if not self.is_ready:
            return {-1: self._started_at + self._timeout_s + LOAD_TIMEOUT_S}
        if self._is_async:
            return {number: sent + limit + GRACE_S for number, (sent, limit) in self._awaited.items()}
        # The first of them runs, since it was sent or the one before has ended; the others wait for it.
        first = itertools.islice(self._awaited.items(), 1)
        return {number: max(sent, self._replied_at) + limit for number, (sent, limit) in first}

    def _lateness(self) -> str:
        return f"took more than {self._timeout_s:g} s for a reply; see --reply-timeout"

    def _read(self) -> tuple[list[bytes], bool]:
        """The lines that have come, and whether no more will come."""
        received = self._process.received
        has_ended = False
        size = -1
        while not has_ended and size < len(received) <= MAX_ANSWER:
            size = len(received)
            has_ended = self._process.read()
        *lines, rest = bytes(received).split(b"\n")
        received[:] = rest
        if len(rest) > MAX_ANSWER:
            lines.append(b"")  # no answer
        return lines, has_ended

    def _parsed(self, line: bytes) -> dict[str, Any] | None:
        """The answer in a line; None if it is not what the worker's own code sends."""
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(answer, dict) or answer.get("id") != self._key or "printed" not in answer:
            return None
        if not self.is_ready:
            return answer
        number = answer.get("episode")
        if number not in self._awaited or "facts" not in answer:
            return None
        try:
            if answer["facts"] is not None:
                take_facts(self._hosted[number].episode, answer["facts"])
            if answer.get("reply") is not None:
                answer["reply"] = read_reply(answer["reply"])
        except (InputError, KeyError, TypeError):
            return None
        return answer

    def _received(self, answer: Mapping[str, Any]) -> list[tuple[int, Reply]]:
        """Take an answer; returns the reply in it."""
        number = answer["episode"]
        del self._awaited[number]
        self._replied_at = time.monotonic()
        if self._suspects:
            self._suspects.popleft()
        hosted = self._hosted[number]
        hosted.seconds += answer["seconds"]
        reply = answer.get("reply")
        if isinstance(reply, Generate):
            return [(number, reply)]
        del self._hosted[number]
        error = self._lateness() if "is_late" in answer else answer.get("error")
        if hosted.is_closing:
            if error:
                self._notes["failed at its end"] = error
            return []
        failed_or_ended: Reply = Failed(error) if error else answer["reply"]
        return [(number, failed_or_ended)]
