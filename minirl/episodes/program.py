"""Where the function runs that writes rollouts: in this process, or in others."""

import inspect
import itertools
from dataclasses import dataclass, field
from typing import Any, Protocol

from minirl.episodes.episode import (
    End,
    Episode,
    Generate,
    RolloutFunction,
    Turn,
    Turns,
    checked_turn,
    given_at_end,
)
from minirl.errors import InputError, refuse


@dataclass(frozen=True)
class Ended:
    """A function has ended.

    returned: the rewards that it returned, by name; None for one that does not apply. reason: the finish reason that it
    gave (`Episode.end`).
    """

    returned: dict[str, float | None] = field(default_factory=dict)
    reason: str | None = None


@dataclass(frozen=True)
class Failed:
    """A function asks for nonsense or, in a process of its own, has raised, hung or died: `why`. It runs no more."""

    why: str


Reply = Generate | Ended | Failed


class Host(Protocol):
    """Runs one function for many episodes. Nothing here is collective, and only `replies` waits.

    With a reply the episode has the rewards that were given before it.

    name: of the function. on_error: what is done about failures, "stop" or "end".
    """

    name: str
    on_error: str

    def begin(self, episode: Episode) -> int:
        """Call the function for an episode, which is replied to; returns the number that replies have."""

    def send(self, number: int, turn: Turn) -> None:
        """Give the newest turn of its episode to the function, which is replied to."""

    def close(self, number: int) -> None:
        """End a function that has asked for a turn which it does not get. There is no reply."""

    def seconds(self, number: int) -> float:
        """How long a function that asks for a turn has worked and waited by itself so far."""

    def replies(self, timeout_s: float = 0.0) -> list[tuple[int, Reply]]:
        """The replies that are there, in any order. If there are none, wait for some, for at most so many seconds."""


class InProcess:
    """Runs a function in this process, where it replies at once. What it raises is raised, but for InputErrors."""

    on_error = "stop"

    def __init__(self, function: RolloutFunction):
        self.name = getattr(function, "__name__", "rollout")
        self._function = function
        self._numbers = itertools.count()
        self._running: dict[int, tuple[Episode, Turns]] = {}
        self._replies: list[tuple[int, Reply]] = []

    def begin(self, episode: Episode) -> int:
        turns = self._function(episode)
        refuse(
            inspect.isasyncgen(turns),
            f"{self.name}(episode): is `async def`; such a function runs in a worker process, with --rollout",
        )
        number = next(self._numbers)
        is_generator = inspect.isgenerator(turns)
        if not is_generator:
            self._replies.append((number, Failed("is no generator; write `turn = yield episode.generate()`")))
            return number
        self._running[number] = (episode, turns)
        self._advance(number, None)
        return number

    def send(self, number: int, turn: Turn) -> None:
        self._advance(number, turn)

    def close(self, number: int) -> None:
        episode, turns = self._running.pop(number)
        episode.is_closed = True
        turns.close()

    def seconds(self, number: int) -> float:
        return 0.0

    def replies(self, timeout_s: float = 0.0) -> list[tuple[int, Reply]]:
        replies, self._replies = self._replies, []
        return replies

    def _advance(self, number: int, turn: Turn | None) -> None:
        """Let the function go on; without a turn it begins."""
        episode, turns = self._running[number]
        reply: Reply
        try:
            reply = self._next(episode, turns, turn)
            if not isinstance(reply, Generate):
                self.close(number)
        except InputError as error:
            self._running.pop(number, None)
            reply = Failed(str(error))
        self._replies.append((number, reply))

    def _next(self, episode: Episode, turns: Turns, turn: Turn | None) -> Reply:
        """What a function replies. Raises InputError for what means nothing."""
        try:
            yielded: Any = next(turns) if turn is None else turns.send(turn)
        except StopIteration as end:
            return Ended(*given_at_end(episode, end.value))
        if not isinstance(yielded, End):
            return checked_turn(yielded)
        episode.end(yielded.reason)
        return Ended(*given_at_end(episode, None))
