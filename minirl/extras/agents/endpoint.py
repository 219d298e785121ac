"""Agents with their own loop: each episode serves OpenAI's chat completions API at a local URL.

    @serve
    async def agent(url, episode):
        client = openai.AsyncOpenAI(base_url=url, api_key="-")
        ...
        return 1.0

is a rollout function for `--rollout`. Each request from the agent is one turn of the episode. A request that continues
a branch only appends tokens, so sampled tokens are never retokenized. Any other request begins a new branch.
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
from minirl.extras.agents.server import close_url, open_url
from minirl.extras.agents.threads import run_in_thread

# Maximum number of pending requests per episode.
MAX_PENDING = 64

Completion = dict[str, Any]


def serve(agent: Callable[[str, Episode], Any]) -> RolloutFunction:
    """Return a rollout function that runs an agent against the episode's URL.

    agent: a function that takes the URL and the episode and returns a reward, or a dict of rewards. An agent may be an
    `async def` or a blocking function; blocking functions run in threads.

    Order: an episode's requests run one at a time. A turn whose client disconnects is not trained on.
    End: when the episode ends, an `async def` agent is cancelled, any command that it runs is killed, and a blocking
    agent's requests fail.
    Limits: 4 MB per request, 64 pending requests per episode.
    """

    @functools.wraps(agent)
    async def rollout(episode: Episode) -> Any:
        refuse(
            not episode.is_chat,
            "the agent sends chat messages, but the run's prompts are text: add --chat",
        )
        async with Endpoint(episode) as url:
            if inspect.iscoroutinefunction(agent):
                return await agent(url, episode)
            return await run_in_thread(None, functools.partial(agent, url, episode))

    return rollout


async def run_program(url: str, *command: str, text: str = "") -> str:
    """Run a command with the URL in OPENAI_BASE_URL and `text` on stdin; return the command's stdout.

    The command's stderr goes to the run's stderr. If the episode ends first, the command is killed. Raises RuntimeError
    for a non-zero exit code.
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
        raise RuntimeError(f"{command[0]} exited with code {process.returncode}")
    return output.decode(errors="replace")


class Endpoint:
    """Serves requests from one episode's agent at a URL, which is open during an `async with` block."""

    def __init__(self, episode: Episode):
        prompt = [read_client_message(message, "prompt") for message in as_messages(episode.row.prompt)]
        self._episode = episode
        # The messages of each branch so far, as the agent sees them: normalized by `read_client_message`.
        self._branch_messages: dict[Branch, Messages] = {episode.branches[0]: prompt}
        # Requests run one at a time, in order of arrival. A turn is sampled to completion even if its client
        # disconnects.
        self._turn_lock = asyncio.Lock()
        self._answer_tasks: dict[asyncio.Future[Completion], asyncio.Task[None]] = {}

    async def __aenter__(self) -> str:
        self._url = await open_url(self._handle)
        return self._url

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        close_url(self._url)
        for answer, task in self._answer_tasks.items():
            if not answer.done():
                answer.set_exception(web.HTTPGone(text="the episode has ended"))
            if kind is asyncio.CancelledError:
                # The episode reached a limit, so the current turn will never be sampled.
                task.cancel()
        await asyncio.gather(*self._answer_tasks.values(), return_exceptions=True)

    async def _handle(self, fields: Any) -> web.Response:
        """Answer one of the agent's requests. Raises InputError and HTTPException."""
        request = read_request(fields, self._episode)
        if len(self._answer_tasks) >= MAX_PENDING:
            raise web.HTTPTooManyRequests(
                text=f"the episode already has {MAX_PENDING} pending requests (the maximum)"
            )
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._answer(request, answer))
        self._answer_tasks[answer] = task
        task.add_done_callback(lambda _: self._answer_tasks.pop(answer))
        completion = await answer
        # JSON escapes the field names, which may contain any characters.
        headers = {"x-minirl-ignored": json.dumps(request.ignored)}
        if request.fields.get("stream"):
            return web.Response(
                text=stream_response(completion), content_type="text/event-stream", headers=headers
            )
        return web.json_response(completion, headers=headers)

    async def _answer(self, request: ChatRequest, answer: "asyncio.Future[Completion]") -> None:
        """Answer a request once earlier requests are done, unless its client has disconnected by then."""
        async with self._turn_lock:
            if answer.done():
                return
            try:
                await self._sample(request, answer)
            except Exception as error:
                if not answer.done():
                    answer.set_exception(error)

    async def _sample(self, request: ChatRequest, answer: "asyncio.Future[Completion]") -> None:
        """Sample the turn for a request and set `answer`. Raises InputError and HTTPException."""
        branch = self._find_branch(request)
        if branch.remaining_tokens < 1:
            text = "no room for another token in the episode; see --max-new-tokens"
            raise web.HTTPBadRequest(text=text, reason="context_length_exceeded")
        after = request.messages[len(self._branch_messages[branch]) :] or None
        turn = await branch.generate(after=after, stop=request.stop, max_tokens=request.max_tokens)
        if answer.done():
            # The client disconnected, so the turn is dropped from the rollout and its branch cannot continue.
            drop_last_turn(branch)
            del self._branch_messages[branch]
            return
        completion = chat_completion(turn, branch, request)
        message = read_client_message(completion["choices"][0]["message"], "answer")
        self._branch_messages[branch] = [*request.messages, message]
        answer.set_result(completion)

    def _find_branch(self, request: ChatRequest) -> Branch:
        """Return the branch with the longest conversation that the request continues, or begin a new branch."""
        candidates: dict[int, Branch] = {}
        for branch, messages in self._branch_messages.items():
            is_prefix = request.messages[: len(messages)] == messages and request.tools == branch.tools
            # A branch's first turn answers the unchanged prompt; every later turn answers new messages.
            if is_prefix and (len(request.messages) > len(messages)) == bool(branch.turns):
                candidates.setdefault(len(messages), branch)
        if candidates:
            return candidates[max(candidates)]
        branch = self._episode.branch(request.messages, tools=request.tools)
        self._branch_messages[branch] = request.messages
        return branch


def drop_last_turn(branch: Branch) -> None:
    """Remove a branch's last turn, which no client received, from the rollout. The branch cannot continue."""
    branch.turns.pop()
    if branch.turns:
        sequence = branch.engine_tokens.sequence
        stream = sequence.stream[: sequence.num_prompt_tokens + branch.num_tokens]
        branch.engine_tokens.sequence = replace(sequence, stream=stream, finish_reason=branch.finish_reason)
