"""The rollouts of --tools and --environment: while a turn calls tools, call them and append their results.

The conventions are those of TRL's GRPOTrainer (`tools`, `environment_factory`): functions with type hints and
docstrings, and classes with `reset(**row) -> str | None` and public methods, which are the tools. An object's reward
comes from its `get_reward()`, or from a reward function that sees its attributes (`environments`).

Standard library only: it runs in workers.
"""

import contextlib
import inspect
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from minirl.data.task import Messages, as_messages
from minirl.episodes.episode import Branch, Episode
from minirl.episodes.generate import Generate
from minirl.episodes.remote import RemoteEpisode
from minirl.episodes.turn import Turn
from minirl.errors import InputError, refuse
from minirl.workers.conversation import Loaded
from minirl.workers.user_code import UnusableError, find_functions

# Methods of an environment that the model cannot call.
OWN_METHODS = ("reset", "get_reward", "close")
# The most characters of an environment's attributes as JSON.
MAX_SHOWN = 1 << 20


def load_tools(source: str, names: str) -> Loaded:
    """Load the functions of --tools, each `async` or not, for a worker (`workers.child`)."""
    tools = find_functions(source, *names.split(","))
    is_async = any(map(inspect.iscoroutinefunction, tools))
    return _loaded(lambda: EpisodeTools(tools, is_async), is_async, tools)


def load_environment(source: str, name: str) -> Loaded:
    """Load the class of --environment for a worker (`workers.child`). It makes a first object to see the methods."""
    (factory,) = find_functions(source, name)
    probe = EnvironmentTools(factory())
    tools = list(probe.by_name.values())
    reset, get_reward, close = (getattr(probe.environment, method, None) for method in OWN_METHODS)
    if reset is None:
        raise UnusableError(f"{name} has no method reset(**row)")
    is_async = any(map(inspect.iscoroutinefunction, [*tools, reset, get_reward, close]))
    return _loaded(
        lambda: EnvironmentTools(factory(), is_async=is_async),
        is_async,
        tools,
        gives_reward=get_reward is not None,
    )


def _loaded(
    start: Callable[[], "EpisodeTools"],
    is_async: bool,
    tools: Sequence[Callable[..., Any]],
    *,
    gives_reward: bool = False,
) -> Loaded:
    """Return the rollout of tools. Its description is {"tools": JSON schemas, "gives_reward"}."""
    function = rollout_of(start)

    def describe() -> dict[str, Any]:
        # It imports transformers.
        from minirl.data.tools import tool_schemas

        try:
            return {"tools": tool_schemas(tools), "gives_reward": gives_reward}
        except InputError as error:
            raise UnusableError(str(error)) from None

    return Loaded(lambda: RemoteEpisode(function), is_async=is_async, describe=describe)


def rollout_of(start: Callable[[], "EpisodeTools"]) -> Callable[[Episode], AsyncGenerator[Generate, Turn]]:
    """The rollout function of tools. start: makes an episode's tools."""

    async def rollout(episode: Episode) -> AsyncGenerator[Generate, Turn]:
        tools = start()
        try:
            branch = await tools.begin(episode)
            turn = yield branch.generate()
            # Without tools the format of calls need not be known.
            while tools.by_name and not turn.message.keys().isdisjoint(("tool_calls", "parse_error")):
                messages, contents = await tools.results(turn.message)
                # Now: if they do not fit, or no further turn is allowed, the episode ends.
                await tools.give_reward(episode)
                turn = yield replace(branch.generate(after=messages), contents=contents)
            if len(branch.turns) == 1:
                await tools.give_reward(episode)
        finally:
            await tools.close()

    return rollout


class EpisodeTools:
    """The tools of one episode.

    by_name: the functions that the model calls. is_async: whether calls may wait; then a turn's calls run concurrently.
    """

    def __init__(self, tools: Sequence[Callable[..., Any]], is_async: bool):
        self.by_name = {tool.__name__: tool for tool in tools}
        self.is_async = is_async

    async def begin(self, episode: Episode) -> Branch:
        """Return the branch to continue: the one after the row's prompt, or after another one."""
        return episode

    async def results(self, message: Mapping[str, Any]) -> tuple[Messages, list[list[Any] | None]]:
        """Call a turn's tools; returns the results in order of the calls. A call that cannot be read is last.

        Each is a message, and the content that reward functions get if that is not its text.
        """
        calls = [self._result(call["function"]) for call in message.get("tool_calls", ())]
        if self.is_async:
            # Imported late: it takes longer than all other imports of this file together.
            import asyncio

            results = list(await asyncio.gather(*calls))
        else:
            results = [await call for call in calls]
        if "parse_error" in message:
            results.append(_message("unknown", {"error": message["parse_error"]}))
        return [message for message, _ in results], [content for _, content in results]

    async def give_reward(self, episode: Episode) -> None:
        """Give the episode's reward so far, earlier rewards included."""

    async def close(self) -> None:
        """Clean up after the episode, however it ended."""

    async def _result(self, call: Mapping[str, Any]) -> tuple[dict[str, str], list[Any] | None]:
        """Return `_message` of a call's result; a tool's exception is a result too."""
        name = str(call.get("name"))
        try:
            if name not in self.by_name:
                raise ValueError(f"Tool {name} not found.")
            return _message(name, await _value(self.by_name[name], **call["arguments"]))
        except Exception as error:
            return _message(name, {"error": str(error)})


class EnvironmentTools(EpisodeTools):
    """The tools of one episode are the methods of an object that lives as long as the episode."""

    def __init__(self, environment: Any, *, is_async: bool = False):
        # From the class: looking up a property on the object would run it.
        methods = inspect.getmembers(type(environment), predicate=inspect.isfunction)
        names = [name for name, _ in methods if name not in OWN_METHODS and not name.startswith("_")]
        super().__init__([getattr(environment, name) for name in names], is_async)
        self.environment = environment
        self._given = 0.0

    async def begin(self, episode: Episode) -> Branch:
        """Append the text that `reset` returns to the prompt's last message."""
        messages = as_messages(episode.row.prompt)
        observation = await _value(self.environment.reset, **{**episode.row.columns, "prompt": messages})
        self._show(episode)
        if observation is None:
            return episode
        if not isinstance(observation, str):
            raise TypeError(f"reset returned {observation!r:.80}; expected text or None")
        *others, last = messages
        return episode.branch([*others, {**last, "content": last["content"] + observation}])

    async def give_reward(self, episode: Episode) -> None:
        """Give the reward: the last result of `get_reward` counts; None adds nothing."""
        self._show(episode)
        if not hasattr(self.environment, "get_reward"):
            return
        reward = await _value(self.environment.get_reward)
        if reward is not None:
            episode.reward(float(reward) - self._given)
            self._given = float(reward)

    def _show(self, episode: Episode) -> None:
        """Give the episode the object's current attributes, if a reward function asks for them."""
        if episode.environment is None:
            return
        shown = episode.environment = {}
        for name, value in getattr(self.environment, "__dict__", {}).items():
            with contextlib.suppress(TypeError, ValueError, RecursionError):
                as_json = json.loads(json.dumps(value, default=_number))
                if as_json == value:
                    shown[name] = as_json
        size = len(json.dumps(shown))
        what = "the attributes of the environment, for reward functions that ask for `environments`"
        refuse(
            size > MAX_SHOWN,
            f"{what}, are {size} characters as JSON; at most {MAX_SHOWN}: keep large values elsewhere",
        )

    async def close(self) -> None:
        """Close an object that has a `close`."""
        if hasattr(self.environment, "close"):
            await _value(self.environment.close)


async def _value(function: Callable[..., Any], /, **arguments: Any) -> Any:
    """Return a function's result, `async` or not. Its arguments may have any name."""
    value = function(**arguments)
    return await value if inspect.iscoroutinefunction(function) else value


def _number(value: Any) -> Any:
    """Return a number of NumPy or PyTorch as Python's. Raises TypeError for any other value."""
    if getattr(value, "ndim", None) != 0:
        raise TypeError(f"{type(value).__name__}: JSON has no such value")
    return value.item()


def _message(name: str, result: Any) -> tuple[dict[str, str], list[Any] | None]:
    """The message of a tool's result, and a list unchanged, for reward functions: TRL does not make text of lists.

    Half a surrogate pair becomes "?". Values that JSON lacks become text, in the list too.
    """
    content = str(result).encode("utf-8", "replace").decode()
    message = {"role": "tool", "name": name, "content": content}
    if not isinstance(result, list):
        return message, None
    try:
        as_json = json.dumps(result, default=str, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # keys of another type, or a list that is in itself
        return message, None
    return message, json.loads(as_json.encode("utf-8", "replace"))
