"""The program that runs a user's rollout function: `main` with the arguments KIND SOURCE NAME (see `rollout_workers`).

KIND is the flag: "rollout" for a rollout function, "tools" or "environment" for what `tool_loop` makes one of.

One process runs many episodes. An `async def` runs them at the same time. Others run in turn, one piece after another:
a piece is what a function does from a turn to the next `yield`.

Protocol: as of `minirl.workers.child`, with these messages.

- The first request is {"id", "path"}; the answer is {"is_async", "max_episodes"} or {"error"}: how many episodes of the
  function a process takes at a time, if it says so. With a fourth argument the answer has "tools" in place of the
  latter, the JSON schemas, and "gives_reward", and is the only one.
- Every later request is {"episode": number, "turns": [...]}. The first one of an episode has "begin" too, the arguments
  of `Episode`. If it has turns, the episode was run before, in a process that has ended: then "asked" is what it asked
  for before each of these turns, and has to ask for again. {"episode", "close"} ends one.
- Every answer has "episode", its "environment", the "seconds" that it took, "rewards", those of `Episode.rewards` that
  were given something since the last turn, each as [place, rewards], "unseen", the branches whose last turn nobody saw,
  and {"asked": the fields of `Generate`}, {"ended", "returned", "reason"} or {"error"}.

Standard library only, so that the process starts quickly.
"""

import concurrent.futures
import contextvars
import inspect
import sys
import time
import types
from collections.abc import Callable, Coroutine
from json import dumps, loads
from typing import Any

from minirl.collect.loaded import Loaded
from minirl.data.tools import tool_schemas
from minirl.episodes.episode import End, Episode, Turn, TurnReader, checked_turn, given_at_end
from minirl.errors import InputError, refuse
from minirl.workers.containment import OwnRandom, Trainer, connect, isolated, run_user_code, working_directory
from minirl.workers.user_code import find_function, find_functions, users_traceback

# Characters of what a function asks for, as JSON.
MAX_ASKED = 1 << 22
CHANGED = "given the same turns again, it asks for something else; make it a function of its turns and of episode.seed"


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


class Hosted:
    """An episode that runs here."""

    def __init__(self, function: Callable[[Episode], Any], begin: dict[str, Any]):
        row: Any = types.SimpleNamespace(**begin["row"])
        self.own_random = OwnRandom(begin["seed"])
        self._episode = Episode(**{**begin, "row": row})
        self._function = function
        self._turns: Any = None

    def since_last_turn(self) -> dict[str, Any]:
        """The rewards that were given since the last turn, the branches whose last turn nobody saw, the environment."""
        episode = self._episode
        return {
            "rewards": [(index, episode.rewards[index]) for index in sorted(episode.rewarded)],
            "unseen": [number for number, branch in episode.branches.items() if branch.drops_last],
            "environment": episode.environment,
        }

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Give the function the turns of a request; returns the answer. Raises what the user's code raises."""
        if "close" in request:
            await self._close()
            return {"ended": True, "returned": {}, "reason": None}
        answer = None
        if self._turns is None:
            self._turns = self._function(self._episode)
            if not inspect.isgenerator(self._turns) and not inspect.isasyncgen(self._turns):
                return {"error": "is no generator; write `turn = yield episode.generate()`"}
            answer = await self._advance(None)
        for i, turn in enumerate(request["turns"]):
            if answer is not None and answer != {"asked": request["asked"][i]}:
                return {"error": CHANGED}
            answer = await self._advance(self._add(turn))
        assert answer is not None
        self._episode.is_closed = "ended" in answer
        return answer

    async def _close(self) -> None:
        """Run the function's `finally`."""
        self._episode.is_closed = True
        if inspect.isasyncgen(self._turns):
            await self._turns.aclose()
        else:
            self._turns.close()

    def _add(self, turn: dict[str, Any]) -> Turn:
        """Add a turn to the episode."""

        def message() -> dict[str, Any]:
            refuse(turn["message_error"] is not None, turn["message_error"])
            answer: dict[str, Any] = turn["message"]
            return answer

        added = Turn(
            turn["ids"],
            turn["logprobs"],
            turn["versions"],
            turn["finish_reason"],
            branch=turn["branch"],
            start=turn["start"],
            limit=turn["limit"],
            prompt_ids=turn["prompt_ids"],
            appended=turn["appended"],
            inserted=turn["inserted"],
            reader=TurnReader(text=lambda: turn["text"], message=message, answer=lambda: turn["answer"]),
        )
        self._episode.take(added)
        return added

    async def _advance(self, turn: Turn | None) -> dict[str, Any]:
        """Let the function go on to its next `yield`, or to its end; returns the answer."""
        has_ended, value = True, None
        try:
            is_async = inspect.isasyncgen(self._turns)
            value = self._turns.send(turn) if not is_async else await self._turns.asend(turn)
            has_ended = False
        except StopAsyncIteration:
            pass
        except StopIteration as end:
            value = end.value
        try:
            if not has_ended and isinstance(value, End):
                self._episode.end(value.reason)
                await self._close()
                has_ended, value = True, None
            return self._ended(value) if has_ended else _asked(value)
        except InputError as error:
            return {"error": str(error)}

    def _ended(self, returned: Any) -> dict[str, Any]:
        """The answer of a function that has ended. Raises InputError."""
        rewards, reason = given_at_end(self._episode, returned)
        return {"ended": True, "returned": rewards, "reason": reason}


def _asked(yielded: Any) -> dict[str, Any]:
    """The answer for what a function has yielded, as it will be read from JSON. Raises InputError."""
    asked = checked_turn(yielded)
    after = asked.after if isinstance(asked.after, str) else list(asked.after)
    try:
        text = dumps({**vars(asked), "after": after})
    except (TypeError, ValueError, RecursionError):
        raise InputError(f"yields {asked!r:.80}; expected text, numbers and lists of them") from None
    refuse(len(text) > MAX_ASKED, f"asks for a turn with {len(text)} characters; at most {MAX_ASKED}")
    return {"asked": loads(text)}


class Server:
    """Runs episodes as the trainer's requests say."""

    def __init__(self, trainer: Trainer, function: Callable[[Episode], Any]):
        self._trainer = trainer
        self._function = function
        self._hosted: dict[int, Hosted] = {}
        self._folder = working_directory()

    async def answer(self, request: dict[str, Any], limit: Any = None) -> None:
        """Answer a request. limit: an `asyncio.timeout`, for an `async def`."""
        number = request["episode"]
        if "begin" in request:
            self._hosted[number] = Hosted(self._function, request["begin"])
        hosted = self._hosted[number]
        episodes_random.set(hosted.own_random)
        began = time.monotonic()
        answer = await isolated(answer_within(limit, hosted, request), hosted.own_random, self._folder)
        seconds = time.monotonic() - began
        if "asked" not in answer:
            del self._hosted[number]
        self._trainer.send({"episode": number, "seconds": seconds, **answer, **hosted.since_last_turn()})

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


async def answer_within(limit: Any, hosted: Hosted, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request, also where user code raises. limit: an `asyncio.timeout`, or None for none."""
    try:
        if limit is None:
            return await hosted.answer(request)
        async with limit:
            return await hosted.answer(request)
    except BaseException as error:
        # User code may raise anything, including SystemExit and KeyboardInterrupt.
        if limit is not None and limit.expired():
            return {"is_late": True}
        return {"error": f"raised\n{users_traceback(error)}"}
