"""Where the function runs that writes rollouts: in this process, or in others (`rollout_workers`)."""

import inspect
import itertools
from dataclasses import dataclass, field
from typing import Any, Protocol

from minirl.collect.episode import End, Episode, Generate, RolloutFunction, Turn, Turns, returned_rewards
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
    """A function has raised, hung, died or sent nonsense: `why`. Only in a process of its own; it runs no more."""

    why: str


Reply = Generate | Ended | Failed


class Host(Protocol):
    """Runs one function for many episodes. Nothing here is collective, and only `replies` waits.

    With a reply the episode has the rewards that were given before it.

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

    def seconds(self, number: int) -> float:
        """How long a function that asks for a turn has worked and waited by itself so far."""

    def replies(self, timeout_s: float = 0.0) -> list[tuple[int, Reply]]:
        """The replies that are there, in any order. If there are none, wait for some, for at most so many seconds."""


class InProcess:
    """Runs a function in this process, where it replies at once and what it raises is raised."""

    on_error: str | None = None

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
        refuse(
            not inspect.isgenerator(turns),
            f"{self.name}(episode): is no generator; write `turn = yield episode.generate()`",
        )
        number = next(self._numbers)
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
        reply: Any
        episode, turns = self._running[number]
        try:
            reply = next(turns) if turn is None else turns.send(turn)
        except StopIteration as end:
            episode.is_closed = True
            del self._running[number]
            reply = Ended(self._returned(episode, end.value), episode.end_reason)
        if isinstance(reply, End):
            self.close(number)
            reply = Ended(reason=episode.end_reason)
        self._replies.append((number, reply))

    def _returned(self, episode: Episode, value: Any) -> dict[str, float | None]:
        try:
            return returned_rewards(value)
        except InputError as error:
            raise InputError(f"{self.name}(episode), for the row at {episode.row.place}: {error}") from None
