"""The rollouts of --tools and --environment: while a turn calls tools, call them and append their results.

The conventions are those of TRL's GRPOTrainer (`tools`, `environment_factory`): functions with type hints and
docstrings, and classes with `reset(**row) -> str | None` and public methods, which are the tools. An object's reward
comes from its `get_reward()`, or from a reward function that sees it (`environments`).

All functions of an episode that are not `async def` run in one thread, in the order of the calls: a connection to a
database, or a browser, may belong to the thread that opened it.
"""

import asyncio
import contextlib
import copy
import functools
import inspect
import json
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from minirl.data.messages import Messages, as_messages, tool_schemas
from minirl.episodes.driver import UserRollout
from minirl.episodes.episode import Branch, Episode, RolloutFunction
from minirl.errors import refuse
from minirl.extras.agents.threads import run_in_thread

# Methods of an environment that the model cannot call.
OWN_METHODS = ("reset", "get_reward", "close")


def tools_rollout(tools: Sequence[Callable[..., Any]]) -> UserRollout:
    """Return the rollout of the functions of --tools. Raises InputError for one without a schema."""
    return UserRollout(make_rollout(tools), tool_schemas(tools))


def environment_rollout(factory: Callable[[], Any]) -> UserRollout:
    """Return the rollout of the class of --environment, of which it makes an object to see the methods.

    Raises InputError. Exceptions of the class pass through.
    """
    environment = factory()
    refuse(not hasattr(environment, "reset"), f"{factory.__name__} has no method reset(**row)")
    return UserRollout(
        make_rollout((), factory),
        tool_schemas(public_methods(environment)),
        gives_reward=hasattr(environment, "get_reward"),
    )


def make_rollout(
    functions: Sequence[Callable[..., Any]], factory: Callable[[], Any] | None = None
) -> RolloutFunction:
    """The rollout function of tools: functions, or methods of the object that a factory makes for each episode."""

    async def rollout(episode: Episode) -> None:
        tools = EpisodeTools(functions, factory)
        try:
            branch = await tools.begin(episode)
            turn = await branch.generate()
            # Without tools the format of calls need not be known.
            while tools.by_name and not turn.message.keys().isdisjoint(("tool_calls", "parse_error")):
                results = await tools.results(turn.message)
                # Now: if they do not fit, or no further turn is allowed, the episode ends.
                await tools.give_reward(episode)
                turn = await branch.generate(after=results)
            if len(branch.turns) == 1:
                await tools.give_reward(episode)
        finally:
            await tools.close()

    return rollout


def public_methods(environment: Any) -> list[Callable[..., Any]]:
    """Return the methods of an environment that the model can call."""
    # From the class: looking up a property on the object would run it.
    methods = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    names = [name for name, _ in methods if name not in OWN_METHODS and not name.startswith("_")]
    return [getattr(environment, name) for name in names]


class EpisodeTools:
    """The tools of one episode: functions, or the methods of an object that lives as long as the episode.

    by_name: the functions that the model calls.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], factory: Callable[[], Any] | None):
        """functions: the tools; or factory: makes the object."""
        self.by_name = {tool.__name__: tool for tool in functions}
        self._factory = factory
        self._environment: Any = None
        # The reward so far.
        self._given = 0.0
        self._thread = ThreadPoolExecutor(1)

    async def begin(self, episode: Episode) -> Branch:
        """Make the object, and append the text that its `reset` returns to the prompt's last message.

        Returns the branch to continue.
        """
        if self._factory is None:
            return episode.branches[0]
        self._environment = episode.environment = await self.value(self._factory)
        self.by_name = {method.__name__: method for method in public_methods(self._environment)}
        messages = as_messages(episode.row.prompt)
        row = copy.deepcopy({**episode.row.columns, "prompt": messages})
        observation = await self.value(self._environment.reset, **row)
        if observation is None:
            return episode.branches[0]
        if not isinstance(observation, str):
            raise TypeError(f"reset returned {observation!r:.80}; expected text or None")
        *others, last = messages
        return episode.branch([*others, {**last, "content": last["content"] + observation}])

    async def results(self, message: Mapping[str, Any]) -> Messages:
        """Call a turn's tools; returns the results as messages, in order of the calls, one that cannot be read last."""
        calls = [self._result(call["function"]) for call in message.get("tool_calls", ())]
        results = list(await asyncio.gather(*calls))
        if "parse_error" in message:
            results.append(_message("unknown", {"error": message["parse_error"]}))
        return results

    async def give_reward(self, episode: Episode) -> None:
        """Give the object's reward: the last result of `get_reward` counts; None adds nothing."""
        if not hasattr(self._environment, "get_reward"):
            return
        reward = await self.value(self._environment.get_reward)
        if reward is not None:
            episode.reward(float(reward) - self._given)
            self._given = float(reward)

    async def close(self) -> None:
        """Close an object that has a `close`, however the episode ended."""
        if hasattr(self._environment, "close"):
            await self.value(self._environment.close)
        self._thread.shutdown(wait=False)

    async def value(self, function: Callable[..., Any], /, **arguments: Any) -> Any:
        """Return a function's result, `async` or not. Its arguments may have any name."""
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        call = functools.partial(function, **arguments)
        # Only the main thread may install a signal handler, such as an alarm that ends a slow query.
        value = call() if _uses_signals(function) else await run_in_thread(self._thread, call)
        return await value if inspect.isawaitable(value) else value

    async def _result(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return `_message` of a call's result; a tool's exception is a result too."""
        name = str(call.get("name"))
        try:
            if name not in self.by_name:
                raise ValueError(f"Tool {name} not found.")
            return _message(name, await self.value(self.by_name[name], **call["arguments"]))
        except (Exception, SystemExit) as error:
            return _message(name, {"error": str(error)})


def _message(name: str, result: Any) -> dict[str, Any]:
    """The message of a tool's result, which is text, or a list: reward functions get it as TRL does.

    Half a surrogate pair becomes "?". Values that JSON lacks become text, in the list too.
    """
    content: Any = str(result)
    if isinstance(result, list):
        # It may have keys of another type, or be in itself.
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            content = json.loads(
                json.dumps(result, default=str, ensure_ascii=False).encode("utf-8", "replace")
            )
    if isinstance(content, str):
        content = content.encode("utf-8", "replace").decode()
    return {"role": "tool", "name": name, "content": content}


def _uses_signals(function: Any) -> bool:
    """Return whether a function names the module `signal`, or another function that does."""
    waiting = [getattr(function, "__func__", function)]
    seen = set()
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if inspect.isfunction(function) and function not in seen:
            seen.add(function)
            named = [function.__globals__.get(name) for name in function.__code__.co_names]
            if any(value is signal or value is signal.signal for value in named):
                return True
            waiting += filter(inspect.isfunction, named)
    return False
