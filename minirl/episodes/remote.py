"""An episode whose function runs in another process: the messages of the two processes, as JSON values.

The trainer has the tokens and the tokenizer, the other process runs the `Program`; each has an `Episode`.

- The first message is {"begin": `Episode.header`, "turns"}, with the turns of an episode that ran before in another
  process. A later one is {"turns"} with one turn. A turn has the fields of a `ToldTurn`.
- A reply is {"asked": `Generate.to_json`}, {"returned", "reason"} of `Ended`, or {"failed": why}.
- Each reply comes with the facts {"given", "unseen", "environment"}: the result of `Episode.take_given`, the branches
  whose last turn reached nobody, and the attributes of the environment.

Standard library only: a process that runs such a function starts quickly.
"""

# A cached property stands for an attribute that can be written, which mypy does not know.
# mypy: disable-error-code="override"

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from minirl.episodes.episode import Branch, Episode
from minirl.episodes.generate import Generate
from minirl.episodes.program import Ended, Failed, Program, Reply
from minirl.episodes.refusals import checked_reward, returned_rewards
from minirl.episodes.turn import Turn
from minirl.errors import InputError, refuse
from minirl.workers.conversation import Conversation, Loaded
from minirl.workers.user_code import find_functions


def opening(episode: Episode) -> dict[str, Any]:
    """Return the first message, with all turns so far."""
    return {"begin": episode.header, **turns_message(episode, episode.all_turns)}


def turns_message(episode: Episode, turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the message with these turns, which the episode already has."""
    branches = episode.branches
    return {"turns": [_told(turn, branches[turn.branch]) for turn in turns]}


def _told(turn: Turn, branch: Branch) -> dict[str, Any]:
    """Return the fields of a `ToldTurn`."""
    # From a copy: the turn would keep parts that only the message needs.
    read = copy.copy(turn)
    names = ("appended", "ids", "logprobs", "versions", "text", "answer")
    parts = {name: getattr(read, name) for name in names}
    try:
        parts["said"] = read.message
    except InputError as error:  # raised there if the function asks for the message
        parts["error"] = str(error)
    turn.parse_error = read.parse_error
    if branch.turns[0] is turn:
        parts["begun"] = (branch.prompt_ids, branch.max_tokens)
    return {**turn.to_json(), "rewards": {}, **parts}


def read_reply(content: Mapping[str, Any]) -> Reply:
    """Return the function's reply. A reply of no function raises some error."""
    if "asked" in content:
        return Generate.read(content["asked"])
    if "failed" in content:
        return Failed(content["failed"])
    return Ended(returned_rewards(content["returned"]), content["reason"])


def take_facts(episode: Episode, facts: Mapping[str, Any]) -> None:
    """Put a reply's facts into the trainer's episode. Facts that no episode sends raise some error."""
    places = episode.rewards
    for place, given in facts["given"]:
        places[place].update({name: checked_reward(value, name) for name, value in given.items()})
    episode.environment = facts["environment"]
    branches = episode.branches
    for number in facts["unseen"]:
        branches[number].drops_last = True


class RemoteEpisode(Conversation):
    """An episode in the process that runs its function."""

    def __init__(self, function: Callable[[Episode], Any]):
        self._function = function
        self._program: Program | None = None

    async def reply(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Give the function the turns of a message; return its reply. Exceptions of the function pass through."""
        if "begin" in message:
            row: Any = SimpleNamespace(**message["begin"]["row"])
            self._program = Program(self._function, Episode(**{**message["begin"], "row": row}))
        assert self._program is not None
        turns = [ToldTurn(**told) for told in message["turns"]]
        if "begin" in message:
            reply = await self._program.replay(turns)
        else:
            reply = await self._program.reply(*turns)
        content = _reply_content(reply)
        self.has_ended = "asked" not in content
        return content

    async def close(self) -> None:
        """Run the function's `finally`."""
        if self._program is not None:
            await self._program.close()

    def facts(self) -> dict[str, Any] | None:
        """Return a reply's facts; None if the function was not called."""
        if self._program is None:
            return None
        episode = self._program.episode
        unseen = [number for number, branch in episode.branches.items() if branch.drops_last]
        return {"given": episode.take_given(), "unseen": unseen, "environment": episode.environment}


def load_rollout(source: str, name: str) -> Loaded:
    """Return the function of --rollout for a worker (`workers.child`). Exceptions of the user's code pass through.

    Only an `async def` that ever waits needs an event loop.
    """
    (function,) = find_functions(source, name)
    return Loaded(
        lambda: RemoteEpisode(function),
        is_async=inspect.isasyncgenfunction(function),
        max_conversations=getattr(function, "max_episodes", None),
    )


def _reply_content(reply: Reply) -> dict[str, Any]:
    if isinstance(reply, Ended):
        return vars(reply)
    try:
        return {"asked": reply.to_json()} if isinstance(reply, Generate) else {"failed": reply.why}
    except InputError as error:
        return {"failed": str(error)}


@dataclass(eq=False, kw_only=True)
class ToldTurn(Turn):
    """A turn that the trainer has sent whole, without rewards. said: the message, or `error`: why it is unknown."""

    appended: list[int]
    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    text: str
    answer: str
    said: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    begun: Sequence[Any] | None = None

    @functools.cached_property
    def message(self) -> dict[str, Any]:
        refuse(bool(self.error), self.error)
        return self.said
