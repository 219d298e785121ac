"""A reward function in a worker (`minirl.workers.child`), and how the worker and the trainer call it.

Standard library only: a worker starts quickly.
"""

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from minirl.rewards.values import validate_rewards
from minirl.workers.conversation import Loaded
from minirl.workers.user_code import find_function

# The adapter for the workers' program.
ADAPTER = "minirl.rewards.reward_adapter:load"


def load(source: str, name: str) -> Loaded | str:
    """Return the function `name` of a file or module, or why it cannot be used.

    Exceptions of the user's code pass through. The description has the arguments that it takes:
    {"required", "optional", "takes_all"}.
    """
    function = find_function(source, name)
    if isinstance(function, str):
        return function
    description = _described(function, name)
    if isinstance(description, str):
        return description
    return Loaded(lambda: _CallConversation(function), description=description)


class _CallConversation:
    """A call of the function: a conversation of one message."""

    has_ended = True

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    async def reply(self, message: Mapping[str, Any]) -> list[float | str | None] | str:
        """Return the rewards, see `validate_rewards`. message: {"arguments", "count"}."""
        values = call_reward(self._function, message["arguments"])
        return validate_rewards(values, message["count"])

    async def close(self) -> None:
        """Do nothing: a call ends with its reply."""

    def facts(self) -> None:
        """Return nothing: a reply needs no facts."""


def call_reward(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a reward function and wait for its result if it is an `async def`.

    One that names `episodes` or `environments` gets them as objects.
    """
    objects = {"episodes": _as_object, "environments": Environment}
    for name in objects.keys() & arguments.keys() & inspect.signature(function).parameters.keys():
        arguments = {**arguments, name: list(map(objects[name], arguments[name]))}
    values = function(**arguments)
    if not inspect.isawaitable(values):
        return values
    # Imported late: it takes longer than all other imports of this file together.
    import asyncio

    async def wait() -> Any:
        return await values

    return asyncio.run(wait())


class Environment:
    """The attributes that an object of --environment had at its episode's end; the object was in another process."""

    def __init__(self, attributes: Mapping[str, Any]):
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        there = ", ".join(vars(self)) or "none"
        raise AttributeError(
            f"{name!r} is not an attribute of the environment that can be seen here; there are: {there}. Reward "
            "functions see those that are numbers, texts, or lists and dicts of them: set one in `reset` or in a "
            "tool, or write `get_reward(self)` and add --reward episode"
        )


def _as_object(episode: Mapping[str, Any]) -> types.SimpleNamespace:
    """An episode of `minirl.rewards.functions.episode_facts`, with attributes."""
    turns = [types.SimpleNamespace(**turn) for turn in episode["turns"]]
    row = types.SimpleNamespace(**episode["row"])
    return types.SimpleNamespace(**{**episode, "turns": turns, "row": row})


def _described(function: Callable[..., Any], name: str) -> dict[str, Any] | str:
    """Return the names of the function's arguments, or why they cannot come by name."""
    required: list[str] = []
    optional: list[str] = []
    takes_all = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            return f"{name} takes {parameter.name!r} by position only; arguments come by name"
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_all = True
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            names = required if parameter.default is parameter.empty else optional
            names.append(parameter.name)
    return {"required": required, "optional": optional, "takes_all": takes_all}
