"""Where the function runs that writes rollouts: in this process, or in others (`rollout_workers`)."""

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from minirl.collect.episode import Episode, Generate, RolloutFunction, Turn, Turns
from minirl.errors import refuse


@dataclass(frozen=True)
class Ended:
    """A function has ended. returned: the beginning of the repr of what it returned; None if it returned nothing."""

    returned: str | None = None


@dataclass(frozen=True)
class Failed:
    """A function has raised, hung, died or sent nonsense: `why`. Only in a process of its own; it runs no more."""

    why: str


Reply = Generate | Ended | Failed


class Host(Protocol):
    """Runs one function for many episodes. Nothing here is collective, and only `replies` waits.

    name: of the function. on_error: what is done about failures, "stop" or "end"; None where it never replies `Failed`.
    """

    name: str
    on_error: str | None

    def begin(self, episode: Episode) -> int:
        """Call the function for an episode, which is replied to; returns the number that replies have."""

    def send(self, number: int, turn: Turn) -> None:
        """Give the newest turn of its episode to the function, which is replied to."""

    def close(self, number: int) -> None:
        """End a function that has asked for a turn which it does not get. There is no reply."""

    def replies(self, timeout_s: float = 0.0) -> list[tuple[int, Reply]]:
        """The replies that are there, in any order. If there are none, wait for some, for at most so many seconds."""


class InProcess:
    """Runs a function in this process, where it replies at once and what it raises is raised."""

    on_error: str | None = None

    def __init__(self, function: RolloutFunction):
        self.name = getattr(function, "__name__", "rollout")
        self._function = function
        self._numbers = itertools.count()
        self._running: dict[int, Turns] = {}
        self._replies: list[tuple[int, Reply]] = []

    def begin(self, episode: Episode) -> int:
        turns = self._function(episode)
        refuse(
            inspect.isasyncgen(turns),
            f"{self.name}(episode): is `async def`; such a function runs in a worker process, with --rollout",
        )
        refuse(
            not inspect.isgenerator(turns),
            f"{self.name}(episode): is no generator; write `turn = yield episode.generate()`",
        )
        number = next(self._numbers)
        self._running[number] = turns
        self._advance(number, turns.__next__)
        return number

    def send(self, number: int, turn: Turn) -> None:
        turns = self._running[number]
        self._advance(number, lambda: turns.send(turn))

    def close(self, number: int) -> None:
        self._running.pop(number).close()

    def replies(self, timeout_s: float = 0.0) -> list[tuple[int, Reply]]:
        replies, self._replies = self._replies, []
        return replies

    def _advance(self, number: int, next_turn: Callable[[], Any]) -> None:
        reply: Any
        try:
            reply = next_turn()
        except StopIteration as end:
            del self._running[number]
            reply = Ended(None if end.value is None else f"{end.value!r:.80}")
        self._replies.append((number, reply))
