"""Agents that own their loop: each episode has a URL on this machine that speaks OpenAI's protocol.

    @serve
    async def agent(url, episode):
        client = openai.AsyncOpenAI(base_url=url, api_key="-")
        ...
        return 1.0

is a rollout function, for `--rollout`. Each request of the agent is a turn of its episode. A request that continues a
branch appends to its tokens, so that sampled tokens are never tokenized again; any other request begins a branch.
"""

import asyncio
import functools
import inspect
import json
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aiohttp import web

from minirl.data.messages import Messages, as_messages
from minirl.episodes.episode import Branch, Episode, RolloutFunction
from minirl.errors import refuse
from minirl.extras.agents.openai_format import (
    ChatRequest,
    chat_completion,
    read_client_message,
    read_request,
    stream_response,
)
from minirl.extras.agents.server import Server
from minirl.extras.agents.threads import run_in_thread

# The most requests of an episode that wait for their turns.
MAX_PENDING = 64

SERVER = Server()
Completion = dict[str, Any]


def serve(agent: Callable[[str, Episode], Any]) -> RolloutFunction:
    """The rollout function of an agent that asks for turns at a URL.

    agent: takes the URL and the episode; returns the reward, or rewards by name. An `async def`, or a blocking
    function, which gets a thread.

    Order: requests of an episode wait for each other. A turn whose client hangs up is not trained on.
    End: when the episode ends, an `async def` is cancelled, a command is killed, and requests of a thread fail.
    Limits: requests of 4 MB, 64 waiting requests an episode.
    """

    @functools.wraps(agent)
    async def rollout(episode: Episode) -> Any:
        refuse(
            not episode.is_chat,
            "an agent at a URL sends messages, and the run's prompts are text: add --chat",
        )
        async with Endpoint(episode) as url:
            if inspect.iscoroutinefunction(agent):
                return await agent(url, episode)
            return await run_in_thread(None, functools.partial(agent, url, episode))

    return rollout


async def run_program(url: str, *command: str, text: str = "") -> str:
    """Run a command with the URL in OPENAI_BASE_URL and `text` as its input; return what it prints.

    Its stderr is the run's. Raises RuntimeError unless its exit code is 0. If the episode ends first, the command is
    killed.
    """
    environment = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "-"}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment)
    try:
        output, _ = await process.communicate(text.encode())
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode != 0:
        raise RuntimeError(f"{command[0]} ended with exit code {process.returncode}")
    return output.decode(errors="replace")


class Endpoint:
    """The requests of an episode's agent. `async with` gives the URL, and answers each with a turn until it ends."""

    def __init__(self, episode: Episode):
        prompt = [read_client_message(message, "prompt") for message in as_messages(episode.row.prompt)]
        self._episode = episode
        # The messages so far of each branch, as the agent knows them: `read_client_message` returned them.
        self._said: dict[Branch, Messages] = {episode.branches[0]: prompt}
        # Requests wait for each other, in order of arrival. A turn goes on without its client.
        self._is_free = asyncio.Lock()
        self._answering: dict[asyncio.Future[Completion], asyncio.Task[None]] = {}

    async def __aenter__(self) -> str:
        self._url = await SERVER.open(self._handle)
        return self._url

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        SERVER.close(self._url)
        for answered, answering in self._answering.items():
            if not answered.done():
                answered.set_exception(web.HTTPGone(text="the episode ended"))
            if kind is asyncio.CancelledError:
                # The episode reached a limit: the present turn is not sampled.
                answering.cancel()
        await asyncio.gather(*self._answering.values(), return_exceptions=True)

    async def _handle(self, fields: Any) -> web.Response:
        """Answer a request of the agent. Raises InputError and HTTPException."""
        request = read_request(fields, self._episode)
        if len(self._answering) >= MAX_PENDING:
            raise web.HTTPTooManyRequests(text=f"{MAX_PENDING} requests of the episode are waiting already")
        answered: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        answering = asyncio.create_task(self._answer(request, answered))
        self._answering[answered] = answering
        answering.add_done_callback(lambda _: self._answering.pop(answered))
        completion = await answered
        # As JSON: a name may be anything.
        headers = {"x-minirl-ignored": json.dumps(request.ignored)}
        if request.fields.get("stream"):
            return web.Response(
                text=stream_response(completion), content_type="text/event-stream", headers=headers
            )
        return web.json_response(completion, headers=headers)

    async def _answer(self, request: ChatRequest, answered: "asyncio.Future[Completion]") -> None:
        """Answer a request in its turn, unless its client has hung up."""
        async with self._is_free:
            if answered.done():
                return
            try:
                await self._sample(request, answered)
            except Exception as error:
                if not answered.done():
                    answered.set_exception(error)

    async def _sample(self, request: ChatRequest, answered: "asyncio.Future[Completion]") -> None:
        """Sample the turn that a request asks for. Raises InputError and HTTPException."""
        branch = self._find(request)
        if branch.remaining_tokens < 1:
            message = "the episode has no room for another token; see --max-new-tokens"
            raise web.HTTPBadRequest(text=message, reason="context_length_exceeded")
        after = request.messages[len(self._said[branch]) :] or None
        turn = await branch.generate(after=after, stop=request.stop, max_tokens=request.max_tokens)
        if answered.done():
            # Its client hung up: the turn is no part of the rollout, and none follows it.
            drop_last_turn(branch)
            del self._said[branch]
            return
        completion = chat_completion(turn, branch, request)
        answer = read_client_message(completion["choices"][0]["message"], "answer")
        self._said[branch] = [*request.messages, answer]
        answered.set_result(completion)

    def _find(self, request: ChatRequest) -> Branch:
        """Return the longest conversation that a request continues, or a new one."""
        continued: dict[int, Branch] = {}
        for branch, said in self._said.items():
            is_same = request.messages[: len(said)] == said and request.tools == branch.tools
            # The first turn answers the prompt unchanged, and later ones answer new messages.
            if is_same and (len(request.messages) > len(said)) == bool(branch.turns):
                continued.setdefault(len(said), branch)
        if continued:
            return continued[max(continued)]
        branch = self._episode.branch(request.messages, tools=request.tools)
        self._said[branch] = request.messages
        return branch


def drop_last_turn(branch: Branch) -> None:
    """Remove a branch's last turn, which reached nobody, from the rollout. No turn may follow it."""
    branch.turns.pop()
    if branch.turns:
        sequence = branch.engine_tokens.sequence
        stream = sequence.stream[: sequence.num_prompt_tokens + branch.num_tokens]
        branch.engine_tokens.sequence = replace(sequence, stream=stream, finish_reason=branch.finish_reason)
