"""The rollouts of --tools and --environment: while a turn calls tools, call them and go on with their results.

The conventions are those of TRL's GRPOTrainer (`tools`, `environment_factory`): functions with type hints and
docstrings, and classes with `reset(**row) -> str | None`, `get_reward()` and public methods, which are the tools.

Standard library only: it runs in the workers of `rollout_workers`.
"""

import inspect
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minirl.collect.episode import Branch, Episode, Generate, Turn
from minirl.data.task import Messages, as_messages
from minirl.rewards.worker import find_function, find_functions

# Methods of an environment that the model cannot call.
OWN_METHODS = ("reset", "get_reward", "close")


@dataclass(frozen=True)
class Loaded:
    """What a worker runs: a rollout function, and the tools that it calls.

    is_async: whether it ever waits. If not, an `async def` runs in a process without an event loop.
    """

    function: Callable[[Episode], Any]
    is_async: bool
    tools: Sequence[Callable[..., Any]] = ()


def load(kind: str, source: str, name: str) -> Loaded | str:
    """What the flag --KIND names ("rollout", "tools" or "environment"), or why it cannot be used.

    Raises what the user's code raises.
    """
    if kind == "tools":
        found = find_functions(source, name.split(","))
        return found if isinstance(found, str) else of_tools(found)
    function = find_function(source, name)
    if isinstance(function, str):
        return function
    if kind == "environment":
        return of_environment(function, name)
    return Loaded(function, inspect.isasyncgenfunction(function))


def of_tools(tools: Sequence[Callable[..., Any]]) -> Loaded:
    """The rollout in which the model calls these functions, each `async` or not."""
    is_async = any(map(inspect.iscoroutinefunction, tools))
    return Loaded(_rollout(lambda: Session(tools, is_async)), is_async, tools)


def of_environment(factory: Callable[[], Any], name: str) -> Loaded | str:
    """The rollout in which the model calls the methods of an object of its own, or why there is none.

    A first object is made to see its methods.
    """
    probe = EnvironmentSession(factory())
    own_methods = [getattr(probe.environment, method, None) for method in OWN_METHODS]
    if own_methods[0] is None:
        return f"{name} has no method reset(**row)"
    probe.is_async = any(map(inspect.iscoroutinefunction, [*probe.tools.values(), *own_methods]))

    def start() -> Session:
        return EnvironmentSession(factory(), is_async=probe.is_async)

    return Loaded(_rollout(start), probe.is_async, list(probe.tools.values()))


def _rollout(start: Callable[[], "Session"]) -> Callable[[Episode], AsyncGenerator[Generate, Turn]]:
    """The rollout function of tools. start: begins an episode's session."""

    async def rollout(episode: Episode) -> AsyncGenerator[Generate, Turn]:
        session = start()
        try:
            branch = await session.begin(episode)
            turn = yield branch.generate()
            # Without tools it need not be known how the model writes calls.
            while session.tools and not turn.message.keys().isdisjoint(("tool_calls", "parse_error")):
                results = await session.results(turn.message)
                # Now: where there is no room for them, or no further turn is allowed, the episode has ended.
                await session.give_reward(episode)
                turn = yield branch.generate(after=results)
            if len(branch.turns) == 1:
                await session.give_reward(episode)
        finally:
            await session.close()

    return rollout


class Session:
    """The tools of one episode. is_async: whether calls may wait; then those of one turn run at the same time."""

    def __init__(self, tools: Sequence[Callable[..., Any]], is_async: bool):
        self.tools = {tool.__name__: tool for tool in tools}
        self.is_async = is_async

    async def begin(self, episode: Episode) -> Branch:
        """The branch that the episode is: the one behind the row's prompt, or behind another one."""
        return episode

    async def results(self, message: Mapping[str, Any]) -> Messages:
        """What the calls of a turn return, one message for each, in their order; a call that cannot be read is last."""
        calls = [self._result(call["function"]) for call in message.get("tool_calls", ())]
        if self.is_async:
            # Imported late: it takes longer than all other imports of this file together.
            import asyncio

            results = list(await asyncio.gather(*calls))
        else:
            results = [await call for call in calls]
        if "parse_error" in message:
            results.append(_message("unknown", {"error": message["parse_error"]}))
        return results

    async def give_reward(self, episode: Episode) -> None:
        """Give the reward that the episode has so far; what was given before is part of it."""

    async def close(self) -> None:
        """The episode has ended, in whatever way."""

    async def _result(self, call: Mapping[str, Any]) -> dict[str, str]:
        """The message of a call's result; what a tool raises is the result too."""
        name = str(call.get("name"))
        try:
            if name not in self.tools:
                raise ValueError(f"Tool {name} not found.")
            return _message(name, await _value(self.tools[name], **call["arguments"]))
        except Exception as error:
            return _message(name, {"error": str(error)})


class EnvironmentSession(Session):
    """The tools of one episode are the methods of an object that lives as long as the episode."""

    def __init__(self, environment: Any, *, is_async: bool = False):
        # Of the class: to look a property up on the object would run it.
        methods = inspect.getmembers(type(environment), predicate=inspect.isfunction)
        names = [name for name, _ in methods if name not in OWN_METHODS and not name.startswith("_")]
        super().__init__([getattr(environment, name) for name in names], is_async)
        self.environment = environment
        self._given = 0.0

    async def begin(self, episode: Episode) -> Branch:
        """As of `Session`: what `reset` returns is written behind the prompt's last message."""
        messages = as_messages(episode.row.prompt)
        observation = await _value(self.environment.reset, **{**episode.row.columns, "prompt": messages})
        if observation is None:
            return episode
        if not isinstance(observation, str):
            raise TypeError(f"reset returned {observation!r:.80}; expected text or None")
        *others, last = messages
        return episode.branch([*others, {**last, "content": last["content"] + observation}])

    async def give_reward(self, episode: Episode) -> None:
        """As of `Session`: what `get_reward` returns last is the reward; None adds nothing."""
        if not hasattr(self.environment, "get_reward"):
            return
        reward = await _value(self.environment.get_reward)
        if reward is not None:
            episode.reward(float(reward) - self._given)
            self._given = float(reward)

    async def close(self) -> None:
        """As of `Session`: close what has a `close`."""
        if hasattr(self.environment, "close"):
            await _value(self.environment.close)


async def _value(function: Callable[..., Any], **arguments: Any) -> Any:
    """What a function returns, `async` or not."""
    value = function(**arguments)
    return await value if inspect.iscoroutinefunction(function) else value


def _message(name: str, result: Any) -> dict[str, str]:
    """The message of a tool's result, as TRL writes it. What is no character (half a surrogate pair) becomes "?"."""
    content = str(result).encode("utf-8", "replace").decode()
    return {"role": "tool", "name": name, "content": content}
