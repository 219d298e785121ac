"""The functions that write rollouts: each runs as a task of the event loop until its episode ends."""

import asyncio
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from minirl.episodes.episode import Episode, RolloutFunction
from minirl.episodes.event_loop import event_loop
from minirl.episodes.generate import Generate
from minirl.episodes.refusals import returned_rewards
from minirl.episodes.turn import Turn
from minirl.errors import InputError, refuse
from minirl.files.user_code import users_traceback
from minirl.ranks.time_account import spent_on

# Seconds for functions to clean up when the run ends.
CLOSE_S = 1.0


@dataclass(frozen=True)
class UserRollout:
    """The function that --rollout, --tools or --environment names or makes.

    tools: JSON schemas of the tools that it calls. gives_reward: whether an environment has `get_reward`.
    """

    function: RolloutFunction
    tools: Sequence[dict[str, Any]] = ()
    gives_reward: bool = False


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
    """A function made a request that is refused, raised, or took too long: `why`. It has stopped."""

    why: str


Reply = Generate | Ended | Failed


def check_form(function: Callable[..., Any], what: str) -> None:
    """Raise InputError, beginning with `what`, unless the function is an `async def` that yields nothing."""
    refuse(
        not inspect.iscoroutinefunction(function),
        f"{what}: expected `async def {function_name(function)}(episode)` with `turn = await episode.generate()`, and "
        "no `yield`; blocking calls go into `await asyncio.to_thread(call)`",
    )


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function in messages."""
    return getattr(function, "__name__", "rollout")


class Program:
    """A function that writes one episode. It replies when it asks for a turn, and once more when it ends.

    task: ends after its `finally`.
    """

    def __init__(self, function: RolloutFunction, episode: Episode, take_reply: "TakeReply"):
        self._take_reply = take_reply
        self._is_over = False
        # The turn that it waits for.
        self._turn: asyncio.Future[Turn] | None = None
        episode.ask = self._ask
        self.task = event_loop().create_task(self._run(function, episode))

    def send(self, turn: Turn) -> None:
        """Give the function the turn that it asked for; it replies."""
        future, self._turn = self._turn, None
        assert future is not None, "it asked for no turn"
        if not future.cancelled():  # else a failure follows
            future.set_result(turn)

    def cancel(self) -> None:
        """End the function where it waits, unless it cleans up already. It does not reply."""
        if not self._is_over:
            self._is_over = True
            self.task.cancel()

    async def _run(self, function: RolloutFunction, episode: Episode) -> None:
        reply: Reply
        try:
            returned = await function(episode)
            refuse(self._turn is not None, "ended while one of its turns was sampled; await all")
            reply = Ended(returned_rewards(returned), episode.end_reason)
        except InputError as error:
            reply = Failed(str(error))
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            reply = Failed(f"raised\n{users_traceback(error)}")
        episode.is_closed = True
        self._reply(reply)

    async def _ask(self, asked: Generate) -> Turn:
        """Return the turn that the function asks for."""
        refuse(self._is_over, "generate(): the episode ended")
        refuse(self._turn is not None, "generate(): asks for two turns at a time; await one after the other")
        self._turn = event_loop().create_future()
        self._reply(asked)
        try:
            return await self._turn
        except asyncio.CancelledError:
            self._reply(
                Failed("generate(): was cancelled while its turn was sampled, which cannot be undone")
            )
            raise

    def _reply(self, reply: Reply) -> None:
        if not self._is_over:
            self._is_over = not isinstance(reply, Generate)
            self._take_reply(self, reply)


TakeReply = Callable[[Program, Reply], None]


class Programs:
    """Runs one function for many episodes. Nothing here is collective.

    name: the function's.
    """

    def __init__(self, function: RolloutFunction, *, timeout_s: float | None = None):
        """timeout_s: limit from the start or a turn to the next reply; None: no limit. Raises InputError."""
        self.name = function_name(function)
        check_form(function, f"rollout {self.name}")
        self._function = function
        self._timeout_s = timeout_s
        # Also those that clean up after their episode's end.
        self._open: set[Program] = set()
        # Those at work, with the time since when; the longest first.
        self._since: dict[Program, float] = {}
        self._replies: list[tuple[Program, Reply]] = []

    def begin(self, episode: Episode) -> Program:
        """Call the function for an episode; it replies."""
        program = Program(self._function, episode, self._take_reply)
        self._since[program] = time.monotonic()
        self._open.add(program)
        program.task.add_done_callback(lambda _: self._forget(program))
        return program

    def send(self, program: Program, turn: Turn) -> None:
        """Give a function the turn that it asked for; it replies."""
        self._since[program] = time.monotonic()
        program.send(turn)

    def close(self, program: Program) -> None:
        """End a function where it waits: its `finally` runs in the next slice. It does not reply."""
        self._since.pop(program, None)
        program.cancel()

    def close_all(self) -> None:
        """End all functions where they wait, and give them CLOSE_S to clean up."""
        for program in list(self._open):
            self.close(program)
        until = time.monotonic() + CLOSE_S
        while self._open and (left_s := until - time.monotonic()) > 0:
            event_loop().run_slice(left_s)

    @spent_on("wait_replies")
    def replies(self, wait_s: float = 0.0) -> list[tuple[Program, Reply]]:
        """Let the functions run until all wait; return their replies, in any order.

        Without any it waits up to `wait_s` seconds for the first.
        """
        event_loop().run_slice(0.0 if self._replies else wait_s)
        self._fail_late()
        replies, self._replies = self._replies, []
        return replies

    def _fail_late(self) -> None:
        """Fail functions that exceed their time. After a slice: what has come in time is a reply by then."""
        if self._timeout_s is None:
            return
        limit = time.monotonic() - self._timeout_s
        while self._since and (program := next(iter(self._since))) and self._since[program] < limit:
            program.cancel()
            self._take_reply(program, Failed(f"took more than {self._timeout_s:g} s; see --call-timeout"))

    def _forget(self, program: Program) -> None:
        self._open.discard(program)
        if not self._open:
            event_loop().stop_waiting()

    def _take_reply(self, program: Program, reply: Reply) -> None:
        self._since.pop(program, None)
        self._replies.append((program, reply))
        event_loop().stop_waiting()
