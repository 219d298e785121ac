"""The program of a worker: it holds conversations with a user's code. Arguments: ADAPTER SOURCE NAME [describe].

ADAPTER is a function, "module:function", that loads the user's code: given SOURCE, a Python file or the name of a
module, and NAME, it returns a `Loaded`, or raises `UnusableError`. One process holds many conversations. Those of async
code run at the same time; others take turns, from a message to the reply.

Protocol: one JSON object per line, requests on stdin, answers on stdout.

- The first request is {"id", "path"}: path is the sys.path of the trainer. The answer is {"is_async",
  "max_conversations", "description"} (see `Loaded`; the description is {} unless asked for), or {"error"}.
- Every later request is {"number", "message", "limit_s"}, or {"number", "closes", "limit_s"}, of the conversation with
  this number. The first one of a conversation has "seed" too, for the random generators.
- The answer is {"number", "seconds", "facts"}, with the seconds that it took, and {"reply", "is_last"}, {"error"} or
  {"is_late"}. An error or a late answer ends the conversation.
- Every answer also has the "id" of the first request, a random text, and "printed": the beginning of the output of
  the user's code.

Standard library only, so that the process starts quickly; an adapter imports no more than it needs.
"""

import contextvars
import importlib
import sys
import time
from collections.abc import Callable, Coroutine
from json import loads
from typing import Any

from minirl.workers.containment import (
    OwnRandom,
    TrainerPipes,
    connect,
    isolated,
    working_directory,
)
from minirl.workers.conversation import Conversation, Loaded, run_at_once
from minirl.workers.user_code import UnusableError, users_traceback


def main() -> None:
    """Load the code, then hold conversations until stdin is closed."""
    adapter, source, name, *describes = sys.argv[1:]
    module, _, load = adapter.partition(":")
    load_code = getattr(importlib.import_module(module), load)
    trainer = connect(source)
    if trainer is None:
        return
    folder = working_directory()
    # While it loads, the file draws the same random numbers in every process.
    loading = isolated(
        _answer_within(None, _load(load_code, source, name, bool(describes))), OwnRandom(0), folder
    )
    answer = run_at_once(loading)
    loaded = answer.pop("loaded", None)
    trainer.send(answer)
    if loaded is None:
        return
    server = Server(trainer, loaded, folder)
    if not loaded.is_async:
        for line in trainer.requests:
            run_at_once(server.answer(loads(line)))
        return
    # Imported late: it takes longer than all other imports of this file together.
    import asyncio

    asyncio.run(server.serve())


async def _load(
    load_code: Callable[[str, str], Loaded], source: str, name: str, describes: bool
) -> dict[str, Any]:
    """Return the first answer, with the loaded code beside it. Exceptions of user code pass through."""
    try:
        loaded = load_code(source, name)
        description = loaded.describe() if describes else {}
    except UnusableError as reason:
        return {"error": str(reason)}
    return {
        "is_async": loaded.is_async,
        "max_conversations": loaded.max_conversations,
        "description": description,
        "loaded": loaded,
    }


# The conversation whose code runs, in a process with an event loop; tasks that it starts inherit it.
current_random: contextvars.ContextVar[OwnRandom] = contextvars.ContextVar("current_random")


class Server:
    """Holds conversations, driven by the trainer's requests."""

    def __init__(self, trainer: TrainerPipes, loaded: Loaded, folder: int):
        """folder: a file descriptor of the working directory."""
        self._trainer = trainer
        self._loaded = loaded
        self._held: dict[int, tuple[Conversation, OwnRandom]] = {}
        self._folder = folder

    async def answer(self, request: dict[str, Any], limit: Any = None) -> None:
        """Answer a request. limit: an `asyncio.timeout`, where code may wait."""
        number = request["number"]
        if "seed" in request:
            self._held[number] = (self._loaded.open(), OwnRandom(request["seed"]))
        conversation, own_random = self._held[number]
        current_random.set(own_random)
        began = time.monotonic()
        answer = await isolated(
            _answer_within(limit, _answer(conversation, request)), own_random, self._folder
        )
        seconds = time.monotonic() - began
        if answer.get("is_last", True):
            del self._held[number]
        self._trainer.send({"number": number, "seconds": seconds, "facts": conversation.facts(), **answer})

    async def serve(self) -> None:
        """Answer each request as soon as possible."""
        import asyncio
        from concurrent.futures import ThreadPoolExecutor

        def make_task(loop: Any, coroutine: Any, **options: Any) -> Any:
            own_random = current_random.get(None)
            if own_random is not None:
                coroutine = self._isolated_task(coroutine, own_random)
            return asyncio.Task(coroutine, loop=loop, **options)

        loop = asyncio.get_running_loop()
        loop.set_task_factory(make_task)
        tasks = set()
        # The reader has its own thread: user code may use up the threads of the loop.
        with ThreadPoolExecutor(1) as reader:
            while line := await loop.run_in_executor(reader, self._trainer.requests.readline):
                request = loads(line)
                task = loop.create_task(self.answer(request, asyncio.timeout(request["limit_s"])))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    async def _isolated_task(self, coroutine: Any, own_random: OwnRandom) -> Any:
        """A task that a conversation's code starts."""
        return await isolated(coroutine, own_random, self._folder)


async def _answer_within(limit: Any, answering: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Return what `answering` returns, or why it failed. limit: an `asyncio.timeout`, or None."""
    try:
        if limit is None:
            return await answering
        async with limit:
            return await answering
    except BaseException as error:
        # User code may raise anything, including SystemExit and KeyboardInterrupt.
        if limit is not None and limit.expired():
            return {"is_late": True}
        return {"error": f"raised\n{users_traceback(error)}"}


async def _answer(conversation: Conversation, request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request. Exceptions of user code pass through."""
    if "closes" in request:
        await conversation.close()
        return {"reply": None, "is_last": True}
    reply = await conversation.reply(request["message"])
    return {"reply": reply, "is_last": conversation.has_ended}
