"""Run a function that writes one episode, in this process or in others.

Standard library only: a process that runs such a function starts quickly.
"""

import inspect
import itertools
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from minirl.episodes.episode import Episode, RolloutFunction
from minirl.episodes.generate import End, Generate
from minirl.episodes.refusals import checked_turn, returned_rewards
from minirl.episodes.turn import Turn
from minirl.errors import InputError, refuse
from minirl.workers.conversation import run_at_once

CHANGED = "given the same turns again, it asks for something else; make it a function of its turns and of episode.seed"


@dataclass(frozen=True)
class Ended:
    """A function ended.

    returned: the rewards that it returned, by name; None for one that does not apply. reason: its finish reason
    (`Episode.end`).
    """

    returned: dict[str, float | None] = field(default_factory=dict)
    reason: str | None = None


@dataclass(frozen=True)
class Failed:
    """A function made a nonsensical request or, in another process, raised, hung or died: `why`. It has stopped."""

    why: str


Reply = Generate | Ended | Failed


class Program:
    """A function that writes one episode, from its call to its end: the same here and in another process.

    Exceptions of the function pass through.
    """

    def __init__(self, function: Callable[[Episode], Any], episode: Episode):
        self.episode = episode
        self._turns: Any = function(episode)
        self.is_async = inspect.isasyncgen(self._turns)

    async def replay(self, turns: Iterable[Turn]) -> Reply:
        """Run the function until it has replayed these turns, or asks for another turn than the next of these.

        turns: those of the episode before its process died. The function gets each if its request equals that of then.
        """
        if not self.is_async and not inspect.isgenerator(self._turns):
            return Failed("is not a generator; write `turn = yield episode.generate()`")
        reply = await self._advance(None)
        for turn in turns:
            if isinstance(reply, Failed):
                return reply
            if not isinstance(reply, Generate):
                return Failed(CHANGED)
            if reply.digest != turn.asked:
                await self.close()
                return Failed(CHANGED)
            reply = await self.reply(turn)
        return reply

    async def reply(self, turn: Turn) -> Reply:
        """Give the function the turn that it asked for."""
        self.episode.take(turn)
        return await self._advance(turn)

    async def close(self) -> None:
        """Run the function's `finally`."""
        self.episode.is_closed = True
        if self.is_async:
            await self._turns.aclose()
        else:
            self._turns.close()

    async def _advance(self, turn: Turn | None) -> Reply:
        """Resume the function until its next `yield` or its end; without a turn, start it."""
        has_ended, value = True, None
        try:
            value = await self._turns.asend(turn) if self.is_async else self._turns.send(turn)
            has_ended = False
        except StopAsyncIteration:
            pass
        except StopIteration as end:
            value = end.value
        try:
            if has_ended:
                return self._ended(value)
            if not isinstance(value, End):
                return checked_turn(value)
            self.episode.end(value.reason)
            await self.close()
            return self._ended(None)
        except InputError as error:
            return Failed(str(error))

    def _ended(self, returned: Any) -> Ended:
        """Raises InputError if a function cannot return this."""
        episode = self.episode
        if episode.end_reason is not None:
            episode.end(episode.end_reason)  # it may be an attribute that was set
        ended = Ended(returned_rewards(returned), episode.end_reason)
        episode.is_closed = True
        return ended


class InProcess:
    """Runs one function for many episodes in this process, where it replies at once, like `RolloutWorkers` in others.

    It adds turns to their episode. When a reply arrives, the episode has the rewards that were given before it. An
    InputError that the function raises is a failure. Nothing here is collective.

    name: the function's. on_error: whether a failure stops the run ("stop") or ends its episode ("end").
    """

    on_error = "stop"

    def __init__(self, function: RolloutFunction):
        self.name = getattr(function, "__name__", "rollout")
        self._function = function
        self._numbers = itertools.count()
        self._running: dict[int, Program] = {}
        self._replies: list[tuple[int, Reply]] = []

    def begin(self, episode: Episode) -> int:
        """Call the function for an episode; returns the number that identifies its replies.

        Raises InputError for an `async def`.
        """
        program = Program(self._function, episode)
        refuse(
            program.is_async,
            f"{self.name}(episode): is `async def`; such a function runs in a worker process, with --rollout",
        )
        number = next(self._numbers)
        self._running[number] = program
        self._take_reply(number, program.replay([]))
        return number

    def send(self, number: int, turn: Turn) -> None:
        """Give a function the turn that it asked for; it replies."""
        self._take_reply(number, self._running[number].reply(turn))

    def close(self, number: int) -> None:
        """End a function instead of giving it the turn that it asked for. It does not reply."""
        program = self._running.pop(number)
        run_at_once(program.close())

    def seconds(self, number: int) -> float:
        """How long a function worked and waited until its last request, without the time of its turns: not counted."""
        return 0.0

    def replies(self, timeout_s: float = 0.0) -> list[tuple[int, Reply]]:
        """Return the replies so far, in any order. Only in other processes it waits, up to `timeout_s` seconds."""
        replies, self._replies = self._replies, []
        return replies

    def _take_reply(self, number: int, replying: Coroutine[Any, Any, Reply]) -> None:
        reply: Reply
        try:
            reply = run_at_once(replying)
        except InputError as error:
            reply = Failed(str(error))
        if not isinstance(reply, Generate):
            del self._running[number]
        self._replies.append((number, reply))
