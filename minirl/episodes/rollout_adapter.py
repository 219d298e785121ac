"""A user's rollout function in a worker (`minirl.workers.child`). Standard library only: a worker starts quickly."""

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from json import dumps, loads
from typing import Any

from minirl.episodes.episode import End, Episode, Turn, TurnReader, checked_turn, given_at_end
from minirl.errors import InputError, refuse
from minirl.workers.conversation import Loaded
from minirl.workers.user_code import find_function

# Characters of what a function asks for, as JSON.
MAX_ASKED = 1 << 22
CHANGED = "given the same turns again, it asks for something else; make it a function of its turns and of episode.seed"


@dataclass(frozen=True)
class RolloutCode:
    """A rollout function, and the tools that it calls.

    is_async: whether it ever waits. If not, an `async def` runs in a process without an event loop. gives_reward:
    whether it is of an environment with `get_reward`.
    """

    function: Callable[[Episode], Any]
    is_async: bool
    tools: Sequence[Callable[..., Any]] = ()
    gives_reward: bool = False


def load_rollout(source: str, name: str) -> Loaded | str:
    """Return what --rollout names, or why it cannot be used. Raises what the user's code raises."""
    found = find_function(source, name)
    if isinstance(found, str):
        return found
    return loaded(RolloutCode(found, inspect.isasyncgenfunction(found)))


def loaded(code: RolloutCode | str) -> Loaded | str:
    """Return the code for the workers' program, or why there is none."""
    if isinstance(code, str):
        return code
    function = code.function
    max_episodes = getattr(function, "max_episodes", None)
    return Loaded(lambda: _RunningEpisode(function), is_async=code.is_async, max_conversations=max_episodes)


class _RunningEpisode:
    """An episode of the function: a conversation of one message for each turn.

    The opening is {"episode", "turns", "asked"}: the arguments of `Episode`, and if the episode was run before, in a
    process that ended, its turns, and what it asked for before each of them and has to ask for again. Other messages
    are turns. The replies are {"asked": the fields of `Generate`}, {"returned", "reason"} of a function that ended,
    and {"failed": why}.
    """

    def __init__(self, function: Callable[[Episode], Any]):
        self.has_ended = False
        self._function = function
        self._episode: Any = None
        self._turns: Any = None

    async def reply(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Let the function go on to what it asks for next. Raises what the user's code raises."""
        reply = await (self._begin(message) if self._episode is None else self._take(message))
        self.has_ended = "asked" not in reply
        self._episode.is_closed = "returned" in reply
        return reply

    async def close(self) -> None:
        """Run the function's `finally`."""
        self._episode.is_closed = True
        if inspect.isasyncgen(self._turns):
            await self._turns.aclose()
        else:
            self._turns.close()

    def facts(self) -> dict[str, Any]:
        """Return what the episode has by now.

        rewards: those of `Episode.rewards` that were given something since the last turn, each as [place, rewards].
        unseen: the branches whose last turn nobody saw. environment: `Episode.environment`.
        """
        episode = self._episode
        return {
            "rewards": [(index, episode.rewards[index]) for index in sorted(episode.rewarded)],
            "unseen": [number for number, branch in episode.branches.items() if branch.drops_last],
            "environment": episode.environment,
        }

    async def _begin(self, opening: Mapping[str, Any]) -> dict[str, Any]:
        """Call the function, and give it the turns that it had."""
        episode = opening["episode"]
        row: Any = types.SimpleNamespace(**episode["row"])
        self._episode = Episode(**{**episode, "row": row})
        self._turns = self._function(self._episode)
        if not inspect.isgenerator(self._turns) and not inspect.isasyncgen(self._turns):
            return {"failed": "is no generator; write `turn = yield episode.generate()`"}
        reply = await self._advance(None)
        for turn, asked in zip(opening["turns"], opening["asked"], strict=True):
            if reply != {"asked": asked}:
                return {"failed": CHANGED}
            reply = await self._take(turn)
        return reply

    async def _take(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        """Give the function a turn."""

        def message() -> dict[str, Any]:
            refuse(turn["message_error"] is not None, turn["message_error"])
            answer: dict[str, Any] = turn["message"]
            return answer

        added = Turn(
            turn["ids"],
            turn["logprobs"],
            turn["versions"],
            turn["finish_reason"],
            branch=turn["branch"],
            start=turn["start"],
            limit=turn["limit"],
            prompt_ids=turn["prompt_ids"],
            appended=turn["appended"],
            inserted=turn["inserted"],
            reader=TurnReader(text=lambda: turn["text"], message=message, answer=lambda: turn["answer"]),
        )
        self._episode.take(added)
        return await self._advance(added)

    async def _advance(self, turn: Turn | None) -> dict[str, Any]:
        """Let the function go on to its next `yield`, or to its end; returns the reply."""
        has_ended, value = True, None
        try:
            is_async = inspect.isasyncgen(self._turns)
            value = self._turns.send(turn) if not is_async else await self._turns.asend(turn)
            has_ended = False
        except StopAsyncIteration:
            pass
        except StopIteration as end:
            value = end.value
        try:
            if not has_ended and isinstance(value, End):
                self._episode.end(value.reason)
                await self.close()
                has_ended, value = True, None
            return self._ended(value) if has_ended else _asked(value)
        except InputError as error:
            return {"failed": str(error)}

    def _ended(self, returned: Any) -> dict[str, Any]:
        """Return the reply of a function that ended. Raises InputError."""
        rewards, reason = given_at_end(self._episode, returned)
        return {"returned": rewards, "reason": reason}


def _asked(yielded: Any) -> dict[str, Any]:
    """Return the reply for what a function yielded, as it will be read from JSON. Raises InputError."""
    asked = checked_turn(yielded)
    after = asked.after if isinstance(asked.after, str) else list(asked.after)
    try:
        text = dumps({**vars(asked), "after": after})
    except (TypeError, ValueError, RecursionError):
        raise InputError(f"yields {asked!r:.80}; expected text, numbers and lists of them") from None
    refuse(len(text) > MAX_ASKED, f"asks for a turn with {len(text)} characters; at most {MAX_ASKED}")
    return {"asked": loads(text)}
