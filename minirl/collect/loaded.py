"""What a worker runs for --rollout, --tools or --environment."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minirl.episodes.episode import Episode


@dataclass(frozen=True)
class Loaded:
    """A rollout function, and the tools that it calls.

    is_async: whether it ever waits. If not, an `async def` runs in a process without an event loop. gives_reward:
    whether it is of an environment with `get_reward`.
    """

    function: Callable[[Episode], Any]
    is_async: bool
    tools: Sequence[Callable[..., Any]] = ()
    gives_reward: bool = False
