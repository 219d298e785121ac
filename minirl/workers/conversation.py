"""The interface that an adapter gives a user's code, for the conversations of a worker (`child`).

Standard library only: a worker starts quickly.
"""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

Result = TypeVar("Result")


class Conversation:
    """One use of a user's code, such as an episode.

    Messages and replies are JSON values. Exceptions of user code pass through.

    has_ended: whether the latest reply was the last one; true of a conversation of one message.
    """

    has_ended = True

    async def reply(self, message: Any) -> Any:
        """Reply to a message. The first one, the opening, may repeat everything that an earlier process was told."""
        raise NotImplementedError

    async def close(self) -> None:
        """End a conversation early, without a reply."""

    def facts(self) -> Any:
        """Return facts that go with each reply, or with the exception that user code raised instead."""


@dataclass(frozen=True)
class Loaded:
    """A user's code.

    open: begins a conversation. is_async: whether user code ever waits; then conversations run concurrently.
    max_conversations: how many a process takes at a time; None: any number. describe: makes JSON for the trainer; may
    raise `user_code.UnusableError`.
    """

    open: Callable[[], Conversation]
    is_async: bool = False
    max_conversations: int | None = None
    describe: Callable[[], dict[str, Any]] = dict


def run_at_once(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine that never waits, without an event loop; return its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: Result = end.value
        return result
    raise RuntimeError("only an `async def` may wait")
