"""An episode that is running: its function, a task of the event loop, and the turn that it asks for."""

import asyncio
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from minirl.data.task import is_messages
from minirl.data.view import as_plain
from minirl.episodes.episode import REWARD, Branch, Episode, Generate, RolloutFunction, checked_reward
from minirl.episodes.event_loop import event_loop
from minirl.episodes.turn import Turn
from minirl.errors import InputError, refuse
from minirl.files.user_code import users_traceback
from minirl.rollouts import NO_TOKENS, Completion, EpisodeRecord, Rollout, TurnFacts, appended, rollout_of

NO_BUDGET = sys.maxsize

# A function asks for a turn; has ended, with these rewards by name, None for one that does not apply; or has failed: it
# made a request that is refused, raised, or took too long.
Reply = Generate | dict[str, float | None] | InputError


class RunningEpisode:
    """An episode between its beginning and the end of its last turn.

    task: its function, which replies when it asks for a turn, and once more when it ends. Ends after its `finally`.
    turn: the one that the function asks for; None before the first. branch: the turn's; None if a new branch has no
    room for its prompt. part_start: the number of tokens after the branch's prompt when the engine took up the turn in
    this round. budget: how many tokens the episode may sample in this round, from part_start on.
    """

    def __init__(self, episode: Episode, function: RolloutFunction, take_reply: "TakeReply"):
        self.episode = episode
        self.turn: Turn | None = None
        self.branch: Branch | None = None
        self.part_start = 0
        self.budget = NO_BUDGET
        self._take_reply = take_reply
        self._is_over = False
        # While the function waits for its turn.
        self._asked: asyncio.Future[Turn] | None = None
        episode.ask = self._ask
        self.task = event_loop().create_task(self._run(function))

    @property
    def present(self) -> tuple[Branch, Turn]:
        """The turn that the function asks for, and its branch."""
        assert self.branch is not None, "there is no room for it"
        assert self.turn is not None, "there is no room for it"
        return self.branch, self.turn

    def tokens_before(self) -> Completion:
        """All tokens after the prompt of the present turn's branch, with those appended before the turn."""
        branch, turn = self.present
        rollout = branch.engine_tokens.rollout
        tokens = NO_TOKENS if rollout is None else rollout.after_prompt
        return tokens if len(tokens) >= turn.start else tokens + appended(turn.appended)

    def send(self, turn: Turn) -> None:
        """Give the function the turn that it asked for; it replies."""
        future, self._asked = self._asked, None
        assert future is not None, "it asked for no turn"
        if not future.cancelled():  # else a failure follows
            future.set_result(turn)

    def cancel(self) -> None:
        """End the function where it waits, unless it cleans up already. It does not reply."""
        if not self._is_over:
            self._is_over = True
            self.task.cancel()

    def rollout(
        self, finish_reason: str, ends: Mapping[int, str], rewards: Mapping[str, float | None]
    ) -> Rollout:
        """Return the rollout up to the end of the last turn; it must have one.

        ends: the branches' finish reasons, by number. rewards: all rewards by name.
        """
        episode = self.episode
        *earlier, (last, seen) = [
            (branch, _seen(branch)) for branch in episode.branches.values() if branch.turns
        ]
        turns = sorted(map(plain_facts, episode.all_turns), key=lambda turn: turn.branch)
        record = EpisodeRecord(turns, rewards, episode.environment)
        if last.number > 0:  # others begin with the row's prompt and the run's tools
            prompt = as_plain(last.prompt) if is_messages(last.prompt) else last.prompt
            record = replace(record, prompt=prompt, tools=last.tools)
        return replace(
            seen,
            finish_reason=finish_reason,
            branch_end=ends[last.number],
            episode=record,
            earlier=tuple(replace(part, finish_reason=ends[branch.number]) for branch, part in earlier),
        )

    async def _run(self, function: RolloutFunction) -> None:
        reply: Reply
        try:
            returned = await function(self.episode)
            refuse(self._asked is not None, "ended while one of its turns was sampled; await all")
            reply = returned_rewards(returned)
        except InputError as error:
            reply = error
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            reply = InputError(f"raised\n{users_traceback(error)}")
        self.episode.is_closed = True
        self._reply(reply)
        for branch in self.episode.branches.values():
            # Only a garbage collection would free an episode that leads to itself.
            branch.ask = _ask_too_late

    async def _ask(self, asked: Generate) -> Turn:
        """Return the turn that the function asks for."""
        refuse(self._is_over, "generate(): the episode ended")
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
        if not self._is_over:
            self._is_over = not isinstance(reply, Generate)
            self._take_reply(self, reply)


TakeReply = Callable[[RunningEpisode, Reply], None]


async def _ask_too_late(asked: Generate) -> Turn:
    raise InputError("generate(): the episode ended")


def _seen(branch: Branch) -> Rollout:
    """Return the rollout up to the branch's last turn, of which it has one, without one that reached nobody."""
    rollout = branch.engine_tokens.rollout
    assert rollout is not None, "no turn has ended"
    if len(rollout.tokens) == rollout.num_prompt_tokens + branch.num_tokens:
        return rollout
    return rollout_of(
        rollout.rollout_id,
        rollout.tokens[: rollout.num_prompt_tokens],
        rollout.after_prompt[: branch.num_tokens],
        rollout.finish_reason,
        temperature=rollout.temperature,
    )


def plain_facts(turn: Turn) -> TurnFacts:
    """Return what is stored of a turn: of messages what JSON holds."""
    return TurnFacts(**{**turn.to_json(), "inserted": as_plain(turn.inserted)})


def returned_rewards(returned: Any) -> dict[str, float | None]:
    """Return the rewards, by name, that a function returned: a number is the one named "reward", None means none.

    Raises InputError with the reason if it cannot be one.
    """
    if returned is None:
        return {}
    if not isinstance(returned, dict):
        return {REWARD: checked_reward(returned, "returns")}
    rewards: dict[str, float | None] = {}
    for name, value in returned.items():
        rewards[name] = None if value is None else checked_reward(value, f"returns {name!r}:")
    return rewards
