"""The functions that write rollouts: each runs as a task of the event loop until its episode ends."""

import asyncio
import inspect
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minirl.data.task import Row
from minirl.episodes.episode import REWARD, Branch, Episode, Generate, RolloutFunction, Turn, checked_reward
from minirl.episodes.event_loop import event_loop
from minirl.errors import InputError, refuse
from minirl.files.json_files import json_text
from minirl.files.user_code import users_traceback
from minirl.ranks.time_account import spent_on
from minirl.rollouts import NO_TOKENS, TOKEN, EpisodeRecord, Rollout, Stream, TurnFacts, unsampled

NO_BUDGET = sys.maxsize
# Seconds for functions to clean up when the run ends.
CLOSE_S = 1.0

# A function asks for a turn; ended, with these rewards by name, None for one that does not apply; or failed: it
# made a request that is refused, raised, or took too long.
Reply = Generate | dict[str, float | None] | InputError


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


class RunningEpisode:
    """An episode between its beginning and the end of its last turn.

    task: its function, which replies when it asks for a turn, and once more when it ends. Ends after its `finally`.
    turn: the one that the function asks for; None before the first. branch: the turn's; None if a new branch has no
    room for its prompt. part_start: the number of tokens after the branch's prompt when the engine took up the turn in
    this round. budget: how many tokens the episode may sample in this round, from part_start on. rejected: why the
    function's last request was rejected, if one was. ended: its rollout, once it has ended. working_since: when the
    function began to work on its next reply; infinity while none is due.
    """

    def __init__(
        self, episode: Episode, function: RolloutFunction, replies: "list[tuple[RunningEpisode, Reply]]"
    ):
        """replies: gets those of the function."""
        self.episode = episode
        self.turn: Turn
        self.branch: Branch | None = None
        self.part_start = 0
        self.budget = NO_BUDGET
        self.rejected: InputError | None = None
        self.ended: Rollout | None = None
        self.working_since = time.monotonic()
        self._function = function
        self._replies = replies
        # While the function waits for its turn.
        self._asked: asyncio.Future[Turn] | None = None
        episode.ask = self._ask
        self.task = event_loop().create_task(self._run())

    @property
    def place(self) -> str:
        """How messages name it."""
        return f"{function_name(self._function)}(episode), for the row at {self.episode.row.place}"

    def tokens_before(self) -> Stream:
        """All tokens after the prompt of the present turn's branch, with those appended before the turn."""
        rollout = self.turn.tokens.rollout
        tokens = NO_TOKENS if rollout is None else rollout.after_prompt
        if len(tokens) < self.turn.start:
            tokens = np.concatenate([tokens, unsampled(self.turn.appended)], dtype=TOKEN)
        return tokens

    def send(self, turn: Turn | InputError) -> None:
        """Give the function the turn that it asked for, or raise the error in it; it replies."""
        self.working_since = time.monotonic()
        future, self._asked = self._asked, None
        assert future is not None, "it asked for no turn"
        if future.cancelled():  # a failure follows
            return
        if isinstance(turn, Turn):
            future.set_result(turn)
        else:
            self.rejected = turn
            future.set_exception(turn)

    def cancel(self) -> None:
        """End the function where it waits, unless it cleans up already: its `finally` runs in the next slice.

        It does not reply.
        """
        if not self.episode.is_closed:
            self.episode.is_closed = True
            self.working_since = math.inf
            self.task.cancel()

    def rollout(
        self, finish_reason: str, ends: Mapping[int, str], rewards: Mapping[str, float | None], row: Row
    ) -> Rollout:
        """Return the rollout up to the end of the last turn; it must have one.

        ends: the branches' finish reasons, by number. rewards: all rewards by name. row: as the data has it; the
        function may have changed the episode's.
        """
        episode = self.episode
        *earlier, last = [branch for branch in episode.branches if branch.turns]
        turns = sorted(map(plain_facts, episode.all_turns), key=lambda turn: turn.branch)
        return _seen(
            last,
            finish_reason,
            branch_end=ends[last.number],
            episode=EpisodeRecord(turns, rewards, episode.environment, last.prompt, last.tools, row),
            earlier=tuple(_seen(branch, ends[branch.number]) for branch in earlier),
        )

    async def _run(self) -> None:
        reply: Reply
        try:
            returned = await self._function(self.episode)
            refuse(self._asked is not None, "ended while one of its turns was sampled; await all")
            reply = returned_rewards(returned)
        except InputError as error:
            reply = error
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            reply = InputError(f"raised\n{users_traceback(error)}")
        self._reply(reply)
        for branch in self.episode.branches:
            # Only a garbage collection would free an episode that leads to itself.
            branch.ask = _ask_too_late

    async def _ask(self, asked: Generate) -> Turn:
        """Return the turn that the function asks for."""
        refuse(self.episode.is_closed, "generate(): the episode ended")
        refuse(self._asked is not None, "generate(): asks for two turns at a time; await one after the other")
        self._asked = event_loop().create_future()
        self._reply(asked)
        try:
            return await self._asked
        except asyncio.CancelledError:
            self._reply(
                InputError("generate(): was cancelled while its turn was sampled, which cannot be undone")
            )
            raise

    def _reply(self, reply: Reply) -> None:
        if not self.episode.is_closed:
            self.episode.is_closed = not isinstance(reply, Generate)
            self.working_since = math.inf
            self._replies.append((self, reply))
            event_loop().stop()


class Programs:
    """Runs one function for many episodes. Nothing here is collective.

    name: the function's.
    """

    def __init__(self, function: RolloutFunction, timeout_s: float | None):
        """timeout_s: limit from the start or a turn to the next reply; None: no limit. Raises InputError."""
        self.name = function_name(function)
        check_form(function, f"rollout {self.name}")
        self._function = function
        self._timeout_s = timeout_s
        # Also those that clean up after their episode's end.
        self._open: set[RunningEpisode] = set()
        self._replies: list[tuple[RunningEpisode, Reply]] = []

    def begin(self, episode: Episode) -> RunningEpisode:
        """Call the function for an episode; it replies."""
        running = RunningEpisode(episode, self._function, self._replies)
        self._open.add(running)
        running.task.add_done_callback(lambda _: self._forget(running))
        return running

    def close_all(self) -> None:
        """End all functions where they wait, and give them CLOSE_S to clean up."""
        for running in self._open:
            running.cancel()
        until = time.monotonic() + CLOSE_S
        while self._open and (left_s := until - time.monotonic()) > 0:
            event_loop().run_slice(left_s)

    @spent_on("wait_replies")
    def replies(self, wait_s: float) -> list[tuple[RunningEpisode, Reply]]:
        """Let the functions run until all wait; return their replies, in any order.

        Without any it waits up to `wait_s` seconds for the first. The function that has worked longest fails if it
        exceeds its time.
        """
        event_loop().run_slice(0.0 if self._replies else wait_s)
        if self._timeout_s is not None and self._open:
            # After the slice: what came in time is a reply by then.
            slowest = min(self._open, key=lambda running: running.working_since)
            if time.monotonic() - slowest.working_since > self._timeout_s:
                slowest.cancel()
                late = InputError(f"took more than {self._timeout_s:g} s; see --call-timeout")
                self._replies.append((slowest, late))
        replies = self._replies.copy()
        self._replies.clear()
        return replies

    def _forget(self, running: RunningEpisode) -> None:
        self._open.discard(running)
        if not self._open:
            event_loop().stop()


async def _ask_too_late(asked: Generate) -> Turn:
    raise InputError("generate(): the episode ended")


def _seen(branch: Branch, finish_reason: str, **facts: Any) -> Rollout:
    """Return the rollout of a branch up to its last turn, of which it has one, without one that reached nobody.

    facts: further fields of it.
    """
    rollout = branch.engine_tokens.rollout
    assert rollout is not None, "no turn has ended"
    num_tokens = rollout.num_prompt_tokens + branch.num_tokens
    return replace(rollout, stream=rollout.stream[:num_tokens], finish_reason=finish_reason, **facts)


def plain_facts(turn: Turn) -> TurnFacts:
    """Return what is stored of a turn. Raises InputError for what JSON cannot hold."""
    facts = TurnFacts(**turn.numbers(), inserted=turn.inserted)
    try:
        json_text([turn.extra, turn.inserted])
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"turn.extra, or a message appended before the turn, is not JSON: {error}") from None
    return facts


def returned_rewards(returned: Any) -> dict[str, float | None]:
    """Return the rewards, by name, that a function returned: a number is the one named "reward", None means none.

    Raises InputError with the reason if it cannot be one.
    """
    if returned is None:
        return {}
    if not isinstance(returned, dict):
        return {REWARD: checked_reward(returned, "returns")}
    return {
        name: None if value is None else checked_reward(value, f"returns {name!r}:")
        for name, value in returned.items()
    }
