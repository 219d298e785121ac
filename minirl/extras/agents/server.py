"""The HTTP server for a rank's episodes, on 127.0.0.1. Each episode has a URL with a random path.

The server runs on the user functions' event loop, from the first `open_url` to the end of the process. Not collective.
"""

import asyncio
import contextlib
import functools
import json
import logging
import resource
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from minirl.errors import InputError

# Maximum size of a request body, in bytes.
MAX_BODY_BYTES = 1 << 22
# Number of connections that the OS queues until the event loop accepts them, because all agents may connect at once.
BACKLOG = 4096
# The routes at an episode's URL.
ROUTES = {"POST chat/completions", "GET models"}

# A handler takes a request's parsed JSON body, and may raise InputError or HTTPException.
Handler = Callable[[Any], Awaitable[web.Response]]


# The handler of each open URL, keyed by the URL's random part.
_handlers: dict[str, Handler] = {}


async def open_url(handler: Handler) -> str:
    """Return a new URL; requests to this URL go to the handler."""
    # Cancelling an episode must not cancel server startup.
    address = await asyncio.shield(_starting())
    key = secrets.token_urlsafe(16)
    _handlers[key] = handler
    return f"{address}/{key}/v1"


def close_url(url: str) -> None:
    """Stop serving a URL."""
    del _handlers[url.split("/")[-2]]


@functools.cache
def _starting() -> asyncio.Task[str]:
    """Return the one task that starts the server."""
    return asyncio.create_task(_start())


async def _start() -> str:
    """Listen on a free port; return the address."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Allow many open files: both ends of each connection may be in this process. On macOS the reported hard limit may
    # be too high.
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    logging.getLogger("aiohttp.server").addFilter(_should_log)
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_route("*", "/{key}/v1/{path:.*}", _respond)
    # A handler is cancelled when its client disconnects.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=BACKLOG).start()
    host, port = runner.addresses[0]
    return f"http://{host}:{port}"


async def _respond(request: web.Request) -> web.Response:
    """Route a request to its episode's handler; return errors in OpenAI's format."""
    try:
        return await _handle(request)
    except InputError as error:
        http_error: web.HTTPException = web.HTTPBadRequest(text=str(error))
    except web.HTTPException as error:
        http_error = error
    fields = {
        "message": http_error.text,
        "type": "invalid_request_error",
        "param": None,
        "code": http_error.reason,
    }
    return web.json_response({"error": fields}, status=http_error.status)


async def _handle(request: web.Request) -> web.Response:
    """Return the response to a request. Raises InputError and HTTPException."""
    body = await request.read()
    route = f"{request.method} {request.match_info['path']}"
    if route not in ROUTES:
        raise web.HTTPNotFound(text=f"{route:.80}: unknown route; use {' or '.join(sorted(ROUTES))}")
    if route == "GET models":
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})
    # Look up the handler only after the body has arrived, because the episode may end before that.
    handler = _handlers.get(request.match_info["key"])
    if handler is None:
        raise web.HTTPGone(text="no episode has this URL: it has ended or never existed")
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the request is not valid JSON: {error}") from None
    return await handler(fields)


def _should_log(record: logging.LogRecord) -> bool:
    """Return whether to log an error. For malformed HTTP, the response already tells the client what is wrong."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
