"""The functions that write rollouts: each runs as a task of the event loop until its episode ends."""

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minirl.episodes.episode import Episode, RolloutFunction
from minirl.episodes.event_loop import event_loop
from minirl.episodes.running import Reply, RunningEpisode
from minirl.episodes.turn import Turn
from minirl.errors import InputError, refuse
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
        self._open: set[RunningEpisode] = set()
        # Those at work, with the time since when; the longest first.
        self._since: dict[RunningEpisode, float] = {}
        self._replies: list[tuple[RunningEpisode, Reply]] = []

    def begin(self, episode: Episode) -> RunningEpisode:
        """Call the function for an episode; it replies."""
        running = RunningEpisode(episode, self._function, self._take_reply)
        self._since[running] = time.monotonic()
        self._open.add(running)
        running.task.add_done_callback(lambda _: self._forget(running))
        return running

    def send(self, running: RunningEpisode, turn: Turn) -> None:
        """Give a function the turn that it asked for; it replies."""
        self._since[running] = time.monotonic()
        running.send(turn)

    def close(self, running: RunningEpisode) -> None:
        """End a function where it waits: its `finally` runs in the next slice. It does not reply."""
        self._since.pop(running, None)
        running.cancel()

    def close_all(self) -> None:
        """End all functions where they wait, and give them CLOSE_S to clean up."""
        for running in list(self._open):
            self.close(running)
        until = time.monotonic() + CLOSE_S
        while self._open and (left_s := until - time.monotonic()) > 0:
            event_loop().run_slice(left_s)

    @spent_on("wait_replies")
    def replies(self, wait_s: float = 0.0) -> list[tuple[RunningEpisode, Reply]]:
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
        while self._since and (running := next(iter(self._since))) and self._since[running] < limit:
            running.cancel()
            self._take_reply(running, InputError(f"took more than {self._timeout_s:g} s; see --call-timeout"))

    def _forget(self, running: RunningEpisode) -> None:
        self._open.discard(running)
        if not self._open:
            event_loop().stop_waiting()

    def _take_reply(self, running: RunningEpisode, reply: Reply) -> None:
        self._since.pop(running, None)
        self._replies.append((running, reply))
        event_loop().stop_waiting()
