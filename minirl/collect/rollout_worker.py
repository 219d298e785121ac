"""The program that runs a user's rollout function: `main` with the arguments KIND SOURCE NAME (see `rollout_workers`).

KIND is the flag: "rollout" for a rollout function, "tools" or "environment" for what `tool_loop` makes one of.

One process runs many episodes. An `async def` runs them at the same time. Others run in turn, one piece after another:
a piece is what a function does from a turn to the next `yield`.

Protocol: as of `minirl.workers.child`, with these messages.

- The first request is {"id", "path"}; the answer is {"is_async", "max_episodes"} or {"error"}: how many episodes of the
  function a process takes at a time, if it says so. With a fourth argument the answer has "tools" in place of the
  latter, the JSON schemas, and "gives_reward", and is the only one.
- Every later request is {"episode": number, "limit_s"} with a message of `episodes.remote`, or {"episode", "close"}.
- Every answer has "episode", the "seconds" that it took, its "facts", and {"reply"} or {"error"}.

Standard library only, so that the process starts quickly.
"""

import concurrent.futures
import contextvars
import inspect
import sys
import time
from collections.abc import Callable, Coroutine
from json import loads
from typing import Any

from minirl.collect.loaded import Loaded
from minirl.data.tools import tool_schemas
from minirl.episodes.episode import Episode
from minirl.episodes.remote import RemoteEpisode
from minirl.errors import InputError
from minirl.workers.containment import OwnRandom, Trainer, connect, isolated, run_user_code, working_directory
from minirl.workers.user_code import find_function, find_functions, users_traceback


def main() -> None:
    """Load the function, then run its episodes until stdin is closed."""
    kind, source, name, *describes = sys.argv[1:]
    trainer = connect(source)
    if trainer is None:
        return
    loaded, error = run_user_code(load, kind, source, name)
    if isinstance(loaded, str):
        error = loaded
    if error is not None:
        trainer.send({"error": error})
        return
    if describes:
        trainer.send(describe(loaded))
        trainer.requests.readline()  # until the trainer ends this process
        return
    max_episodes = getattr(loaded.function, "max_episodes", None)
    trainer.send({"is_async": loaded.is_async, "max_episodes": max_episodes})
    server = Server(trainer, loaded.function)
    if not loaded.is_async:
        for line in trainer.requests:
            run_at_once(server.answer(loads(line)))
        return
    # Imported late: it takes longer than all other imports of this file together.
    import asyncio

    asyncio.run(server.serve())


def load(kind: str, source: str, name: str) -> Loaded | str:
    """What the flag --KIND names ("rollout", "tools" or "environment"), or why it cannot be used.

    Raises what the user's code raises.
    """
    if kind == "tools":
        from minirl.agents.tool_loop import of_tools

        found = find_functions(source, name.split(","))
        return found if isinstance(found, str) else of_tools(found)
    function = find_function(source, name)
    if isinstance(function, str):
        return function
    if kind == "environment":
        from minirl.agents.tool_loop import of_environment

        return of_environment(function, name)
    return Loaded(function, inspect.isasyncgenfunction(function))


def describe(loaded: Loaded) -> dict[str, Any]:
    """The answer that has the schemas of the tools. It needs transformers, which other workers do not import."""
    try:
        return {
            "is_async": loaded.is_async,
            "tools": tool_schemas(loaded.tools),
            "gives_reward": loaded.gives_reward,
        }
    except InputError as error:
        return {"error": str(error)}


def run_at_once(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise RuntimeError("only an `async def` may wait")


# Of the episode whose code runs, in an `async def`; tasks that it begins have it too.
episodes_random: contextvars.ContextVar[OwnRandom] = contextvars.ContextVar("episodes_random")


class Server:
    """Runs episodes as the trainer's requests say."""

    def __init__(self, trainer: Trainer, function: Callable[[Episode], Any]):
        self._trainer = trainer
        self._function = function
        self._hosted: dict[int, tuple[RemoteEpisode, OwnRandom]] = {}
        self._folder = working_directory()

    async def answer(self, request: dict[str, Any], limit: Any = None) -> None:
        """Answer a request. limit: an `asyncio.timeout`, for an `async def`."""
        number = request["episode"]
        if "begin" in request:
            self._hosted[number] = (RemoteEpisode(self._function), OwnRandom(request["begin"]["seed"]))
        episode, own_random = self._hosted[number]
        episodes_random.set(own_random)
        began = time.monotonic()
        answer = await isolated(answer_within(limit, episode, request), own_random, self._folder)
        seconds = time.monotonic() - began
        if episode.has_ended or "reply" not in answer:
            del self._hosted[number]
        self._trainer.send({"episode": number, "seconds": seconds, "facts": episode.facts(), **answer})

    async def serve(self) -> None:
        """Answer requests, each as soon as it can be."""
        import asyncio

        def make_task(loop: Any, coroutine: Any, **options: Any) -> Any:
            own_random = episodes_random.get(None)
            if own_random is not None:
                coroutine = self._isolated_task(coroutine, own_random)
            return asyncio.Task(coroutine, loop=loop, **options)

        loop = asyncio.get_running_loop()
        loop.set_task_factory(make_task)
        tasks = set()
        # A thread of its own to read: user code may use up those of the loop.
        with concurrent.futures.ThreadPoolExecutor(1) as reader:
            while line := await loop.run_in_executor(reader, self._trainer.requests.readline):
                request = loads(line)
                task = loop.create_task(self.answer(request, asyncio.timeout(request["limit_s"])))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    async def _isolated_task(self, coroutine: Any, own_random: OwnRandom) -> Any:
        """A task that an episode begins."""
        return await isolated(coroutine, own_random, self._folder)


async def answer_within(limit: Any, episode: RemoteEpisode, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request, also where user code raises. limit: an `asyncio.timeout`, or None for none."""
    try:
        if limit is None:
            return await answer_of(episode, request)
        async with limit:
            return await answer_of(episode, request)
    except BaseException as error:
        # User code may raise anything, including SystemExit and KeyboardInterrupt.
        if limit is not None and limit.expired():
            return {"is_late": True}
        return {"error": f"raised\n{users_traceback(error)}"}


async def answer_of(episode: RemoteEpisode, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request. Raises what user code raises."""
    if "close" in request:
        await episode.close()
        episode.has_ended = True
        return {"reply": None}
    return {"reply": await episode.reply(request)}
