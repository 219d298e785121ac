"""The function that writes a rollout, and the driver that runs it for one episode."""

import asyncio
import inspect
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minirl.data.task import Row
from minirl.episodes.episode import REWARD, Branch, Episode, Generate, RolloutFunction, Turn, checked_reward
from minirl.episodes.event_loop import event_loop
from minirl.errors import InputError, refuse
from minirl.files.json_files import json_text
from minirl.files.user_code import users_traceback
from minirl.rollouts import (
    NO_TOKENS,
    EpisodeRecord,
    Rollout,
    Stream,
    TurnFacts,
    join_streams,
    unsampled,
)

NO_BUDGET = sys.maxsize

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


class Driver:
    """Runs the function of one episode, as a task of the event loop, until its `finally` has run.

    The function replies when it asks for a turn, and once more when it ends.

    turn: the one that it asks for; None before the first. branch: the turn's; None if a new branch has no room for its
    prompt. part_start: the number of tokens after the branch's prompt when the engine took up the turn in this round.
    budget: how many tokens the episode may sample in this round, from part_start on. rejected: why the function's last
    request was rejected, if one was. ended: its rollout, once it has ended.
    """

    def __init__(
        self,
        episode: Episode,
        function: RolloutFunction,
        replies: "list[tuple[Driver, Reply]]",
        working: "dict[Driver, float]",
    ):
        """replies: gets those of the function. working: when each function began to work on its next reply, if it does.

        Other drivers share both.
        """
        self.episode = episode
        self.turn: Turn
        self.branch: Branch | None = None
        self.part_start = 0
        self.budget = NO_BUDGET
        self.rejected: InputError | None = None
        self.ended: Rollout | None = None
        self._function = function
        self._replies = replies
        self._working = working
        self._working[self] = time.monotonic()
        # While the function waits for its turn.
        self._asked: asyncio.Future[Turn] | None = None
        episode.ask = self._ask
        self.task = event_loop().create_task(self._run())

    @property
    def place(self) -> str:
        """How messages name it."""
        return f"{function_name(self._function)}(episode), for the row at {self.episode.row.place}"

    @property
    def worked_s(self) -> float:
        """How many seconds its function, which is at work, has worked on its next reply."""
        return time.monotonic() - self._working[self]

    def tokens_before(self) -> Stream:
        """All tokens after the prompt of the present turn's branch, with those appended before the turn."""
        rollout = self.turn.tokens.rollout
        tokens = NO_TOKENS if rollout is None else rollout.after_prompt
        if len(tokens) < self.turn.start:
            tokens = join_streams(tokens, unsampled(self.turn.appended))
        return tokens

    def send(self, turn: Turn | InputError) -> None:
        """Give the function the turn that it asked for, or raise the error in it; it replies."""
        self._working[self] = time.monotonic()
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
            self._working.pop(self, None)
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
            self._working.pop(self, None)
            self._replies.append((self, reply))
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
