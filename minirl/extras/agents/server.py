"""The HTTP server of a rank's episodes, on 127.0.0.1. Nobody can guess the path of an episode's URL.

It runs on the event loop of users' functions, from the first URL to the end of the process. Not collective.
"""

import asyncio
import contextlib
import json
import logging
import resource
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from minirl.errors import InputError

# The most bytes of a request.
MAX_BODY = 1 << 22
# Connections that the system accepts before the loop takes them: all agents may begin at once.
BACKLOG = 4096
# By path: the answers at the URL of an episode.
PATHS = {"POST chat/completions", "GET models"}

# Takes the JSON of a request, None without one. Raises InputError or HTTPException.
Handler = Callable[[Any], Awaitable[web.Response]]


class Server:
    """Hands a request to the handler of the episode to whose URL it came; errors get OpenAI's form."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._address = ""
        self._starting = asyncio.Lock()

    async def open(self, handler: Handler) -> str:
        """Return a new URL, whose requests the handler answers."""
        async with self._starting:
            self._address = self._address or await self._start()
        key = secrets.token_urlsafe(16)
        self._handlers[key] = handler
        return f"{self._address}/{key}/v1"

    def close(self, url: str) -> None:
        """Answer no more requests to a URL."""
        del self._handlers[url.split("/")[-2]]

    async def _start(self) -> str:
        """Listen at a free port; return the address."""
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Both ends of an agent's connections may be in this process. macOS has a limit that it does not name.
        with contextlib.suppress(ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
        logging.getLogger("aiohttp.server").addFilter(_is_our_fault)
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{key}/v1/{path:.*}", self._respond)
        # A handler is cancelled when its client hangs up.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=BACKLOG).start()
        host, port = runner.addresses[0]
        return f"http://{host}:{port}"

    async def _respond(self, request: web.Request) -> web.Response:
        try:
            return await self._handle(request)
        except InputError as error:
            refusal: web.HTTPException = web.HTTPBadRequest(text=str(error))
        except web.HTTPException as error:
            refusal = error
        said = {"message": refusal.text, "type": "invalid_request_error", "param": None}
        return web.json_response({"error": {**said, "code": refusal.reason}}, status=refusal.status)

    async def _handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        asked = f"{request.method} {request.match_info['path']}"
        if asked not in PATHS:
            raise web.HTTPNotFound(text=f"{asked:.80}: there are only {' and '.join(sorted(PATHS))}")
        if asked == "GET models":
            return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})
        # After the body has come: from here on the episode tells its clients when it ends.
        handler = self._handlers.get(request.match_info["key"])
        if handler is None:
            raise web.HTTPGone(text="no episode has this URL: it ended, or never existed")
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise InputError(f"the request is not JSON: {error}") from None
        return await handler(fields)


def _is_our_fault(record: logging.LogRecord) -> bool:
    """Return whether to log an error. A client is told if its request is not HTTP; a traceback says no more."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
