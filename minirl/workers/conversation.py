"""What an adapter makes of a user's code, so that the program of a worker (`child`) can hold conversations with it.

Standard library only: a worker starts quickly.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class Conversation(Protocol):
    """One use of a user's code: a call of a reward function is one of a single message, an episode one of several.

    Messages and replies are what JSON holds. What user code raises passes through.

    has_ended: whether the last reply was the last one.
    """

    has_ended: bool

    async def reply(self, message: Any) -> Any:
        """Reply to a message. The first one, the opening, may also bring back what an earlier process was told."""

    async def close(self) -> None:
        """End a conversation that has not ended. There is no reply."""

    def facts(self) -> Any:
        """Return what goes with each reply, also where user code raised instead of replying."""


@dataclass(frozen=True)
class Loaded:
    """A user's code.

    open: begins a conversation. is_async: whether user code ever waits; then conversations go on at the same time.
    max_conversations: how many a process takes at a time; None for any number. description: for the trainer, as JSON.
    """

    open: Callable[[], Conversation]
    is_async: bool = False
    max_conversations: int | None = None
    description: Mapping[str, Any] = field(default_factory=dict)
