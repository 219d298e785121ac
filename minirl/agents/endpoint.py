"""Programs that own their loop: each episode has a URL on this machine that speaks OpenAI's protocol.

    @serve
    async def agent(url, episode):
        client = openai.AsyncOpenAI(base_url=url, api_key="-")
        ...
        return 1.0

is a rollout function, for `--rollout`. Each request of the program is a turn of its episode. A request that continues a
branch appends to its tokens, so that sampled tokens are never tokenized again; any other request begins a branch.

Nothing here is collective.
"""

import asyncio
import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

from minirl.agents.loopback import Answer, HttpError, LoopbackServer
from minirl.agents.openai_format import (
    Asked,
    Sampled,
    answer_of,
    models,
    read_request,
    same_messages,
    template_form,
)
from minirl.data.task import as_messages
from minirl.episodes.episode import Branch, Episode, RolloutFunction
from minirl.episodes.event_loop import in_thread
from minirl.episodes.turn import Turn

# The most requests of an episode that wait for their turn.
MAX_PENDING = 64
# Seconds for a program to end after it was told to.
CLOSE_S = 1.0
# The most bytes of a program's output to keep.
MAX_OUTPUT = 1 << 20

Program = Callable[[str, Episode], Any]
ProgramRequest = tuple[Coroutine[Any, Any, Turn], Callable[[Turn], None]]


def serve(program: Program) -> RolloutFunction:
    """The rollout function of a program that asks for turns at a URL.

    program: takes the URL and the episode; returns the reward, or rewards by name. An `async def`, or a blocking
    function, which gets a thread for each episode.

    Order: requests of an episode wait for each other. The turn of a client that disconnects is not trained on.
    End: when the episode ends, an `async def` is cancelled, a command is killed, and requests of a thread fail.
    Limits: requests of 4 MB, 64 waiting requests an episode, 4,096 connections a rank (or a quarter of the files that
    it may open), 30 seconds to send a request or read an answer.
    """

    @functools.wraps(program)
    async def rollout(episode: Episode) -> Any:
        async with Endpoint(episode, program) as endpoint:
            while (request := await endpoint.next_request()) is not None:
                sampling, answer = request
                answer(await sampling)
        return endpoint.running.result()

    return rollout


async def run_program(url: str, *command: str, text: str = "") -> str:
    """Run a command with the URL in OPENAI_BASE_URL and `text` as its input; return what it prints.

    It keeps the last MAX_OUTPUT bytes of the output. Raises RuntimeError with the end of its stderr unless its exit
    code is 0. If the episode ends first, the command is killed; processes that it started end with the run.
    """
    environment = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "-"}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment
    )
    try:
        _, output, errors = await asyncio.gather(
            _write(process.stdin, text.encode()), _read_end(process.stdout), _read_end(process.stderr)
        )
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
    if code != 0:
        raise RuntimeError(f"{command[0]} ended with exit code {code}\n{errors[-2000:]}")
    return output


class _BranchChat:
    """A branch of the episode as the program knows it. said: the messages so far, as the program has them."""

    def __init__(self, branch: Branch, said: list[Any]):
        self.branch = branch
        self.said = said

    def rest(self, asked: Asked) -> list[Any] | None:
        """Return the messages that a request adds; None if it does not continue the conversation."""
        begin, rest = asked.prompt[: len(self.said)], asked.prompt[len(self.said) :]
        # The first turn answers the prompt unchanged, and later ones answer new messages.
        is_next = bool(rest) == bool(self.branch.turns) and asked.tools == self.branch.tools
        return rest if is_next and same_messages(begin, self.said) else None


class Endpoint:
    """The URL of an episode, and the program that uses it. `async with` starts and ends both.

    running: the program.
    """

    def __init__(self, episode: Episode, program: Program):
        self._episode = episode
        self._program = program
        self._chats = [_BranchChat(episode, as_messages(episode.row.prompt))]
        self._server = LoopbackServer(self._handle)
        self._num_turns = 0
        # None when the program ends.
        self._waiting: asyncio.Queue[tuple[Asked, asyncio.Future[Sampled]] | None] = asyncio.Queue()
        self._pending: set[asyncio.Future[Sampled]] = set()

    async def __aenter__(self) -> "Endpoint":
        url = await self._server.start()
        self.running = asyncio.ensure_future(_run(self._program, url, self._episode))
        self.running.add_done_callback(lambda _: self._waiting.put_nowait(None))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for answered in self._pending:
            if not answered.done():
                answered.set_exception(HttpError(HTTPStatus.GONE, "the episode ended"))
        self.running.cancel()
        # A program that goes on is left alone: its requests get no answer.
        await asyncio.wait({self.running}, timeout=CLOSE_S)
        if self.running.done() and not self.running.cancelled():
            # Retrieved, so that asyncio does not print the exception of a program whose episode ended.
            self.running.exception()

    async def next_request(self) -> ProgramRequest | None:
        """Return the next request, in order of arrival; None if the program has ended. Its exceptions pass through.

        A request is the turn to await for it, and the function that answers it with the sampled turn.
        """
        while (waiting := await self._waiting.get()) is not None and not self.running.done():
            asked, answered = waiting
            if answered.done():
                continue
            try:
                return self._request(asked, answered)
            except HttpError as error:
                answered.set_exception(error)
        self.running.result()
        return None

    def _request(self, asked: Asked, answered: "asyncio.Future[Sampled]") -> ProgramRequest:
        """Return the turn to await for a request, and what answers it. Raises HttpError."""
        chat, rest = self._find(asked)
        branch = chat.branch
        if branch.room < 1:
            message = "the episode has no room for another token; see --max-new-tokens"
            raise HttpError(HTTPStatus.BAD_REQUEST, message, "context_length_exceeded")

        def answer(turn: Turn) -> None:
            self._num_turns += 1
            if answered.done():
                # The program hung up.
                branch.drops_last = True
                self._chats.remove(chat)
                return
            num_before = len(branch.prompt_ids) + turn.start
            sampled = Sampled(turn, self._num_turns, num_before, asked)
            chat.said = [*asked.prompt, sampled.message]
            answered.set_result(sampled)

        after = template_form(rest) or None
        sampling = branch.generate(
            after=after, stop=asked.stop, max_tokens=asked.max_tokens, **asked.truncation
        )
        return sampling, answer

    def _find(self, asked: Asked) -> tuple[_BranchChat, list[Any]]:
        """Return the longest conversation that a request continues, or a new one, and the rest. Raises HttpError."""
        prompt = asked.prompt
        rests = [(chat, chat.rest(asked)) for chat in self._chats]
        found = [(chat, rest) for chat, rest in rests if rest is not None]
        farthest = min(found, key=lambda pair: len(pair[1]), default=None)
        is_whole = farthest is not None and not farthest[1]
        if not is_whole and prompt[-1]["role"] == "assistant":
            message = "the last message is the assistant's, whose turn the model samples"
            raise HttpError(HTTPStatus.BAD_REQUEST, message)
        if farthest is not None:
            return farthest
        chat = _BranchChat(self._episode.branch(template_form(prompt), tools=asked.tools), prompt)
        self._chats.append(chat)
        # It begins with all messages so far.
        return chat, prompt[:0]

    async def _handle(self, method: str, path: str, body: bytes) -> Answer:
        """Answer a request of the program. Raises HttpError."""
        is_list = path == "v1/models"
        if method != ("GET" if is_list else "POST"):
            message = f"{method:.20} is not answered here; ask with {'GET' if is_list else 'POST'}"
            raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, message)
        if is_list:
            return models(self._episode)
        asked = read_request(path, body, self._episode)
        if len(self._pending) >= MAX_PENDING:
            message = f"{MAX_PENDING} requests of the episode are waiting already"
            raise HttpError(HTTPStatus.TOO_MANY_REQUESTS, message)
        answered: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        self._pending.add(answered)
        self._waiting.put_nowait((asked, answered))
        try:
            return answer_of(await answered)
        finally:
            self._pending.discard(answered)


async def _run(program: Program, url: str, episode: Episode) -> Any:
    """Return a program's result; unless it is an `async def`, it runs in a thread. Its exceptions pass through."""
    try:
        if inspect.iscoroutinefunction(program):
            return await program(url, episode)
        return await in_thread(ThreadPoolExecutor(1), functools.partial(program, url, episode))
    except (SystemExit, KeyboardInterrupt) as error:
        # These would end the event loop, with all other episodes.
        raise RuntimeError(f"the program raised {error!r}") from error


async def _write(pipe: asyncio.StreamWriter | None, data: bytes) -> None:
    """Write all to a program, which may be gone."""
    assert pipe is not None
    with contextlib.suppress(ConnectionError):
        pipe.write(data)
        await pipe.drain()
    pipe.close()


async def _read_end(pipe: asyncio.StreamReader | None) -> str:
    """Return the end of a program's output."""
    assert pipe is not None
    kept = b""
    while piece := await pipe.read(MAX_OUTPUT):
        kept = (kept + piece)[-MAX_OUTPUT:]
    return kept.decode(errors="replace")
