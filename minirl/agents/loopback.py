"""A small HTTP/1.1 server on 127.0.0.1, one for each episode. Nobody can guess the path of its URL.

Whatever a client does, it takes a bounded amount of memory and gets an error in OpenAI's form. A connection is for one
request, so that no client can send one while the server closes the connection on which it waited.

Nothing here is collective.
"""

import asyncio
import contextlib
import email
import json
import resource
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from email.message import Message
from http import HTTPStatus
from typing import Any

MAX_HEAD = 1 << 15
MAX_BODY = 1 << 22
MAX_CONNECTIONS = 4096
# Seconds for the head of a request, for its body, and for taking the answer.
REQUEST_S = 30.0
# Seconds for a refused client to finish sending: it may read the answer only then.
LINGER_S = 3.0


class HttpError(Exception):
    """A request that is refused. code: OpenAI's name of the reason, where programs look for one."""

    def __init__(self, status: HTTPStatus, message: str, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.code = code

    def answer(self) -> "Answer":
        """In OpenAI's form."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": None, "code": self.code}
        return Answer.of_json({"error": error}, self.status)


@dataclass(frozen=True)
class Answer:
    """An answer to a client."""

    body: bytes
    content_type: str = "application/json"
    status: HTTPStatus = HTTPStatus.OK

    @classmethod
    def of_json(cls, value: Any, status: HTTPStatus = HTTPStatus.OK) -> "Answer":
        """A value as JSON."""
        return cls(json.dumps(value).encode(), status=status)


# Takes method, the rest of the path, and body. Raises HttpError.
Handler = Callable[[str, str, bytes], Coroutine[Any, Any, Answer]]


def max_connections() -> int:
    """How many connections a process serves: it needs descriptors for other things too, such as the clients' ends."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    return MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, limit // 4)


# Of all servers of this process in the order in which they came, each with whether it has sent the head of a request.
_connections: dict[asyncio.StreamWriter, bool] = {}


class LoopbackServer:
    """The server of an episode: requests to the URL go to the handler."""

    def __init__(self, handler: Handler):
        self._handler = handler
        self._token = secrets.token_urlsafe(16)

    async def start(self) -> str:
        """Listen at a free port; returns the URL."""
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", 0, limit=MAX_HEAD, backlog=MAX_CONNECTIONS
        )
        port = self._server.sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}/{self._token}/v1"

    def close(self) -> None:
        """Take no more connections; later requests on those that are open are told so."""
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the request of a connection, and close it."""
        # `drain` then waits until the client has taken all of the answer that the system does not buffer.
        writer.transport.set_write_buffer_limits(0)
        try:
            # The client caused such an error: it is gone, or does not read.
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._answer(reader, writer)
        finally:
            _connections.pop(writer, None)
            # `close` would wait for a client that does not read.
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            _take_place(writer)
            method, target, headers = await _read_head(reader)
            token, _, path = target.partition("?")[0].removeprefix("/").partition("/")
            if token != self._token:
                raise HttpError(HTTPStatus.NOT_FOUND, "no episode has this URL: it ended, or never existed")
            _connections[writer] = True
            body = await _read_body(reader, writer, headers)
            if reader.at_eof():
                return
            if not self._server.is_serving():
                raise HttpError(HTTPStatus.GONE, "the episode ended")
            await _write(writer, await _unless_hung_up(self._handler(method, path, body), reader))
        except HttpError as error:
            await _write(writer, error.answer())
            writer.write_eof()
            # A client that is still sending might otherwise not see the error.
            async with asyncio.timeout(LINGER_S):
                await _read_to_end(reader)


def _take_place(writer: asyncio.StreamWriter) -> None:
    """Count a new connection. If there are too many, drop the oldest without a request.

    Raises HttpError if all have one.
    """
    silent = next((other for other, has_token in _connections.items() if not has_token), None)
    _connections[writer] = False
    if len(_connections) <= max_connections():
        return
    if silent is None:
        message = f"more than {max_connections()} connections are open"
        raise HttpError(HTTPStatus.SERVICE_UNAVAILABLE, message)
    del _connections[silent]
    silent.transport.abort()


async def _read_to_end(reader: asyncio.StreamReader) -> None:
    """Drop what a client still sends; returns when it stops. Raises ConnectionError."""
    while await reader.read(MAX_HEAD):
        pass


async def _unless_hung_up(handling: Coroutine[Any, Any, Answer], reader: asyncio.StreamReader) -> Answer:
    """Return a handler's answer. Raises HttpError like it, and ConnectionError if the client hangs up first."""
    answering = asyncio.ensure_future(handling)
    ended = asyncio.ensure_future(_read_to_end(reader))
    try:
        await asyncio.wait((answering, ended), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ConnectionError
        return answering.result()
    finally:
        answering.cancel()
        ended.cancel()


async def _read_head(reader: asyncio.StreamReader) -> tuple[str, str, Message]:
    """Return method, path and headers. Raises HttpError, and IncompleteReadError or TimeoutError without a request."""
    try:
        async with asyncio.timeout(REQUEST_S):
            text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError:
        message = f"the request's head has more than {MAX_HEAD} bytes"
        raise HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message) from None
    first, _, lines = text.partition("\r\n")
    parts = first.split(" ")
    headers = email.message_from_string(lines)
    if len(parts) != 3 or parts[2] not in ("HTTP/1.0", "HTTP/1.1") or headers.defects:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"{first!r:.80}: this is no HTTP/1.1")
    return parts[0], parts[1], headers


async def _read_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: Message) -> bytes:
    """Raises HttpError, also for a body without a size, and IncompleteReadError if the client is gone."""
    if "transfer-encoding" in headers:
        raise HttpError(HTTPStatus.LENGTH_REQUIRED, "a body in chunks; send it with Content-Length")
    # Neither of two is right.
    size = ", ".join(headers.get_all("content-length", ["0"]))
    if not (size.isascii() and size.isdigit()):
        raise HttpError(HTTPStatus.BAD_REQUEST, f"Content-Length: {size!r:.80}: expected a number")
    # Python does not parse thousands of digits.
    if len(size) > 18 or int(size) > MAX_BODY:
        message = f"the request has {size:.18} bytes; at most {MAX_BODY}"
        raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        async with asyncio.timeout(REQUEST_S):
            return await reader.readexactly(int(size))
    except TimeoutError:
        message = f"the request's {size} bytes took more than {REQUEST_S:g} s"
        raise HttpError(HTTPStatus.REQUEST_TIMEOUT, message) from None


async def _write(writer: asyncio.StreamWriter, answer: Answer) -> None:
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    async with asyncio.timeout(REQUEST_S):
        writer.write(head.encode() + answer.body)
        await writer.drain()
