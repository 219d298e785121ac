"""A reward function in a worker (`minirl.workers.child`), and how the worker and the trainer call it.

Standard library only: a worker starts quickly.
"""

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from minirl.rewards.values import validate_rewards
from minirl.workers.conversation import Conversation, Loaded
from minirl.workers.user_code import UnusableError, find_functions

# The adapter for the workers' program.
ADAPTER = "minirl.rewards.reward_adapter:load"


def load(source: str, name: str) -> Loaded:
    """Return the function `name` of a file or module. Raises UnusableError; exceptions of its code pass through.

    The description has "parameters", for each its name and kind, and whether it is required.
    """
    (function,) = find_functions(source, name)
    parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise UnusableError(f"{name} takes {parameter.name!r} by position only; arguments come by name")
    described = [(one.name, one.kind.name, one.default is one.empty) for one in parameters]
    return Loaded(lambda: _CallConversation(function), describe=lambda: {"parameters": described})


class _CallConversation(Conversation):
    """A call of the function: a conversation of one message."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    async def reply(self, message: Mapping[str, Any]) -> list[float | str | None] | str:
        """Return the rewards, see `validate_rewards`. message: {"arguments", "count"}."""
        values = call_reward(self._function, message["arguments"])
        return validate_rewards(values, message["count"])


def call_reward(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a reward function and wait for its result if it is an `async def`.

    One that names `episodes` gets them as objects.
    """
    if "episodes" in arguments and "episodes" in inspect.signature(function).parameters:
        arguments = {**arguments, "episodes": list(map(_as_object, arguments["episodes"]))}
    values = function(**arguments)
    if not inspect.iscoroutine(values):
        return values
    # Imported late: it takes longer than all other imports of this file together.
    import asyncio

    return asyncio.run(values)


def _as_object(episode: Mapping[str, Any]) -> types.SimpleNamespace:
    """An episode of `minirl.rewards.functions.episode_facts`, with attributes."""
    turns = [types.SimpleNamespace(**turn) for turn in episode["turns"]]
    row = types.SimpleNamespace(**episode["row"])
    return types.SimpleNamespace(**{**episode, "turns": turns, "row": row})
