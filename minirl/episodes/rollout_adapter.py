"""A user's rollout function in a worker (`minirl.workers.child`). Standard library only: a worker starts quickly."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minirl.episodes.episode import Episode
from minirl.episodes.remote import RemoteEpisode
from minirl.workers.conversation import Loaded
from minirl.workers.user_code import find_function


@dataclass(frozen=True)
class RolloutCode:
    """A rollout function, and the tools that it calls.

    is_async: whether it ever waits; if not, even an `async def` runs in a process without an event loop. gives_reward:
    whether an environment has `get_reward`.
    """

    function: Callable[[Episode], Any]
    is_async: bool
    tools: Sequence[Callable[..., Any]] = ()
    gives_reward: bool = False


def load_rollout(source: str, name: str) -> Loaded | str:
    """Return the function of --rollout, or why it cannot be used. Exceptions of the user's code pass through."""
    found = find_function(source, name)
    if isinstance(found, str):
        return found
    return loaded(RolloutCode(found, inspect.isasyncgenfunction(found)))


def loaded(code: RolloutCode | str) -> Loaded | str:
    """Return the code for the workers' program, or why it cannot be used."""
    if isinstance(code, str):
        return code
    function = code.function
    max_episodes = getattr(function, "max_episodes", None)
    return Loaded(lambda: RemoteEpisode(function), is_async=code.is_async, max_conversations=max_episodes)
