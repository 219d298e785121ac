"""The tool loop for --tools and --environment: while turns call tools, run the tools and append the results.

The conventions follow TRL's GRPOTrainer (`tools`, `environment_factory`). Tools are functions with type hints and
docstrings. An environment is a class with `reset(**row) -> str | None`; its other public methods are the tools. An
environment's reward comes from its `get_reward()`, or from a reward function with the argument `environments`.

An episode's synchronous functions all run in one thread, in call order, because a database connection or a browser may
be bound to the thread that opened it.
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

# Public methods of an environment that are not tools.
RESERVED_METHODS = ("reset", "get_reward", "close")


def tools_rollout(tools: Sequence[Callable[..., Any]]) -> UserRollout:
    """Return the rollout function for --tools. Raises InputError for a tool without a schema."""
    return UserRollout(make_rollout(tools), tool_schemas(tools))


def environment_rollout(factory: Callable[[], Any]) -> UserRollout:
    """Return the rollout function for --environment. Creates one environment to inspect its methods.

    Raises InputError for a class without `reset` and for invalid tools. Propagates the class's exceptions.
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
    """Return a rollout function whose tools are `functions`, or the methods of each episode's `factory()` object."""

    async def rollout(episode: Episode) -> None:
        tools = EpisodeTools(functions, factory)
        try:
            branch = await tools.begin(episode)
            turn = await branch.generate()
            # Without tools, turns are not parsed, so the tool-call format need not be known.
            while tools.by_name and not turn.message.keys().isdisjoint(("tool_calls", "parse_error")):
                results = await tools.call_tools(turn.message)
                # Give the reward first, because `generate` may reach a limit and end the episode.
                await tools.give_reward(episode)
                turn = await branch.generate(after=results)
            if len(branch.turns) == 1:
                await tools.give_reward(episode)
        finally:
            await tools.close()

    return rollout


def public_methods(environment: Any) -> list[Callable[..., Any]]:
    """Return the environment's tools: all public methods outside RESERVED_METHODS."""
    # Inspect the class, because reading a property from the object would run it.
    methods = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    names = [name for name, _ in methods if name not in RESERVED_METHODS and not name.startswith("_")]
    return [getattr(environment, name) for name in names]


class EpisodeTools:
    """The tools of one episode: functions, or the methods of an environment object.

    by_name: the tools, keyed by name.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], factory: Callable[[], Any] | None):
        """functions: the tools, if there is no `factory`. factory: function that creates the environment."""
        self.by_name = {tool.__name__: tool for tool in functions}
        self._factory = factory
        self._environment: Any = None
        self._total_reward = 0.0
        self._thread = ThreadPoolExecutor(1)

    async def begin(self, episode: Episode) -> Branch:
        """Create and reset the environment, if any; return the branch to sample from.

        Text that `reset` returns is appended to the prompt's last message.
        """
        if self._factory is None:
            return episode.branches[0]
        self._environment = episode.environment = await self.run(self._factory)
        self.by_name = {method.__name__: method for method in public_methods(self._environment)}
        messages = as_messages(episode.row.prompt)
        row = copy.deepcopy({**episode.row.columns, "prompt": messages})
        observation = await self.run(self._environment.reset, **row)
        if observation is None:
            return episode.branches[0]
        if not isinstance(observation, str):
            raise TypeError(f"reset returned {observation!r:.80}; expected text or None")
        *others, last = messages
        return episode.branch([*others, {**last, "content": last["content"] + observation}])

    async def call_tools(self, message: Mapping[str, Any]) -> Messages:
        """Run a message's tool calls; return the result messages in call order, and any parse error last."""
        calls = [self._call_tool(call["function"]) for call in message.get("tool_calls", ())]
        results = list(await asyncio.gather(*calls))
        if "parse_error" in message:
            results.append(_tool_message("unknown", {"error": message["parse_error"]}))
        return results

    async def give_reward(self, episode: Episode) -> None:
        """Set the episode's reward to the current result of `get_reward`; a result of None leaves it unchanged."""
        if not hasattr(self._environment, "get_reward"):
            return
        reward = await self.run(self._environment.get_reward)
        if reward is not None:
            episode.reward(float(reward) - self._total_reward)
            self._total_reward = float(reward)

    async def close(self) -> None:
        """Call the environment's `close`, if it has one."""
        if hasattr(self._environment, "close"):
            await self.run(self._environment.close)
        self._thread.shutdown(wait=False)

    async def run(self, function: Callable[..., Any], /, **arguments: Any) -> Any:
        """Run a synchronous or `async` function and return its result. Arguments may have any name."""
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        call = functools.partial(function, **arguments)
        # Only the main thread may install a signal handler, such as an alarm that ends a slow query.
        value = call() if _uses_signals(function) else await run_in_thread(self._thread, call)
        return await value if inspect.isawaitable(value) else value

    async def _call_tool(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Run a tool call; return its result, or its exception, as a message."""
        name = str(call.get("name"))
        try:
            if name not in self.by_name:
                raise ValueError(f"Tool {name} not found.")
            return _tool_message(name, await self.run(self.by_name[name], **call["arguments"]))
        except (Exception, SystemExit) as error:
            return _tool_message(name, {"error": str(error)})


def _tool_message(name: str, result: Any) -> dict[str, Any]:
    """Return a tool's result as a message. The content is text or a list, as in TRL.

    A lone surrogate becomes "?". Values that JSON cannot represent become text, even in a list.
    """
    content: Any = str(result)
    if isinstance(result, list):
        # The content stays text if the list is cyclic or contains dicts with keys that JSON does not allow.
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            content = json.loads(
                json.dumps(result, default=str, ensure_ascii=False).encode("utf-8", "replace")
            )
    if isinstance(content, str):
        content = content.encode("utf-8", "replace").decode()
    return {"role": "tool", "name": name, "content": content}


def _uses_signals(function: Any) -> bool:
    """Return whether a function uses the `signal` module, directly or through the functions that it references."""
    unvisited = [getattr(function, "__func__", function)]
    visited = set()
    while unvisited:
        function = inspect.unwrap(unvisited.pop())
        if inspect.isfunction(function) and function not in visited:
            visited.add(function)
            globals_used = [function.__globals__.get(name) for name in function.__code__.co_names]
            if any(value is signal or value is signal.signal for value in globals_used):
                return True
            unvisited += filter(inspect.isfunction, globals_used)
    return False
