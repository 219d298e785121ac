"""A small HTTP/1.1 server on 127.0.0.1, one per process. Each episode has a route: a path that nobody can guess.

Whatever a client does, it takes a bounded amount of memory and gets an error in OpenAI's form. A connection outlives
its routes: a client that many programs share reuses it for any of them. While it has places, the server keeps
connections that wait for a request, since the next one may be on its way; when places run short, its answers announce
the close.

Standard library only. Nothing here is collective.
"""

import asyncio
import contextlib
import contextvars
import json
import resource
import secrets
import weakref
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

MAX_HEAD = 1 << 15
MAX_BODY = 1 << 22
MAX_CONNECTIONS = 512
# Seconds for a connection's first request, for the rest of one, and for taking an answer.
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


@dataclass(eq=False)
class Route:
    """A path, and its handler."""

    url: str
    handler: Handler
    is_open: bool = True


class _Reader(asyncio.StreamReader):
    """has_ended: set as soon as the client stops sending, even if some data is unread."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        super().__init__(limit=MAX_HEAD, loop=loop)
        self.has_ended = asyncio.Event()

    def feed_eof(self) -> None:
        super().feed_eof()
        self.has_ended.set()

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        self.has_ended.set()


@dataclass(eq=False)
class _Connection:
    """has_token: whether it had a request for a route. is_answering: whether it has one now."""

    reader: _Reader
    writer: asyncio.StreamWriter
    has_token: bool = False
    is_answering: bool = False


@dataclass(frozen=True)
class _Head:
    """The beginning of a request, up to its body."""

    method: str
    path: str
    version: str
    headers: Mapping[str, str]

    @property
    def keeps_alive(self) -> bool:
        return self.version == "HTTP/1.1" and self.headers.get("connection", "").lower() != "close"

    def body_size(self) -> int:
        """Raises HttpError for a body that has no size, or is too large."""
        if "transfer-encoding" in self.headers:
            raise HttpError(HTTPStatus.LENGTH_REQUIRED, "a body in chunks; send it with Content-Length")
        size = self.headers.get("content-length", "0")
        if not (size.isascii() and size.isdigit()):
            raise HttpError(HTTPStatus.BAD_REQUEST, f"Content-Length: {size!r:.80}: expected a number")
        # Python does not parse thousands of digits.
        if len(size) > 18 or int(size) > MAX_BODY:
            message = f"the request has {size:.18} bytes; at most {MAX_BODY}"
            raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
        return int(size)


def max_connections() -> int:
    """How many connections a process serves: it needs descriptors for other things too, such as the clients' ends."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft_limit == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft_limit // 4)


class LoopbackServer:
    """Serves routes. Use `of_this_loop`."""

    def __init__(self) -> None:
        self._routes: dict[str, Route] = {}
        self._port = 0
        # Waiting connections are in the order in which they began to wait.
        self._connections: dict[_Connection, None] = {}
        self._max_connections = max_connections()

    async def start(self) -> "LoopbackServer":
        """Listen at a free port."""
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.StreamReaderProtocol:
            return asyncio.StreamReaderProtocol(_Reader(loop), self._serve, loop)

        server = await loop.create_server(protocol, "127.0.0.1", 0, backlog=self._max_connections)
        self._port = server.sockets[0].getsockname()[1]
        return self

    def open(self, handler: Handler) -> Route:
        """A new route."""
        token = secrets.token_urlsafe(16)
        route = Route(f"http://127.0.0.1:{self._port}/{token}/v1", handler)
        self._routes[token] = route
        return route

    def close(self, route: Route) -> None:
        """End a route: later requests for it are told so. Its connections stay."""
        route.is_open = False
        self._routes = {token: other for token, other in self._routes.items() if other is not route}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection."""
        assert isinstance(reader, _Reader)
        connection = _Connection(reader, writer)
        # `drain` then waits until the client has taken all of the answer that the system does not buffer.
        writer.transport.set_write_buffer_limits(0)
        try:
            # The client caused such an error: it is gone, or does not read.
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._serve_all(connection)
        finally:
            self._connections.pop(connection, None)
            # `close` would wait for a client that does not read.
            writer.transport.abort()

    async def _serve_all(self, connection: _Connection) -> None:
        reader, writer = connection.reader, connection.writer
        limit_s: float | None = REQUEST_S
        try:
            self._take_place(connection)
            keeps_alive = True
            while keeps_alive:
                self._connections[connection] = self._connections.pop(connection)
                head = await _read_head(reader, limit_s)
                route, path = self._find(head.path)
                connection.has_token = connection.is_answering = True
                body = await _read_body(reader, writer, head)
                if reader.has_ended.is_set() or writer.is_closing():
                    return
                answer = await _answer(route.handler(head.method, path, body), reader)
                # A client does not reuse a connection whose close was announced, but might be using one that is closed
                # without a word.
                keeps_alive = head.keeps_alive and 2 * len(self._connections) <= self._max_connections
                await _write(writer, answer, keeps_alive=keeps_alive)
                connection.is_answering = False
                limit_s = None
        except HttpError as error:
            await _refuse(reader, writer, error)

    def _take_place(self, connection: _Connection) -> None:
        """Count a new connection. If there are too many, drop one that waits: without a token, or else the oldest.

        Raises HttpError if all have requests.
        """
        waiting = [other for other in self._connections if not other.is_answering]
        self._connections[connection] = None
        if len(self._connections) <= self._max_connections:
            return
        if not waiting:
            message = f"more than {self._max_connections} connections are open"
            raise HttpError(HTTPStatus.SERVICE_UNAVAILABLE, message)
        dropped = min(waiting, key=lambda other: other.has_token)
        del self._connections[dropped]
        dropped.writer.transport.abort()

    def _find(self, path: str) -> tuple[Route, str]:
        """Return the route of a path, and the rest of the path. Raises HttpError."""
        token, _, rest = path.partition("?")[0].removeprefix("/").partition("/")
        if token not in self._routes:
            raise HttpError(HTTPStatus.NOT_FOUND, "no episode has this URL: it ended, or never existed")
        return self._routes[token], rest


_servers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[LoopbackServer]]
_servers = weakref.WeakKeyDictionary()


async def of_this_loop() -> LoopbackServer:
    """The server of the running event loop, which is started once."""
    loop = asyncio.get_running_loop()
    if loop not in _servers:
        # The server's tasks belong to no episode, so they must not run in the context of the first one.
        _servers[loop] = contextvars.Context().run(loop.create_task, LoopbackServer().start())
    # An episode that ends meanwhile must not end it for the others.
    return await asyncio.shield(_servers[loop])


async def _answer(handling: Coroutine[Any, Any, Answer], reader: _Reader) -> Answer:
    """Return a handler's answer. Raises ConnectionError if the client hangs up first."""
    answering = asyncio.ensure_future(handling)
    ended = asyncio.ensure_future(reader.has_ended.wait())
    try:
        await asyncio.wait((answering, ended), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ConnectionError
        return answering.result()
    except HttpError as error:
        return error.answer()
    finally:
        answering.cancel()
        ended.cancel()


async def _read_head(reader: asyncio.StreamReader, limit_s: float | None) -> _Head:
    """Raises HttpError, and IncompleteReadError or TimeoutError without a request."""
    try:
        async with asyncio.timeout(limit_s):
            text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError:
        message = f"the request's head has more than {MAX_HEAD} bytes"
        raise HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message) from None
    first, *lines = text.removesuffix("\r\n\r\n").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or parts[2] not in ("HTTP/1.0", "HTTP/1.1") or not all(":" in line for line in lines):
        raise HttpError(HTTPStatus.BAD_REQUEST, f"{first!r:.80}: this is no HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        # Neither of two equal headers is right.
        before = [headers[name.lower()]] if name.lower() in headers else []
        headers[name.lower()] = ", ".join([*before, value.strip()])
    return _Head(parts[0], parts[1], parts[2], headers)


async def _read_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: _Head) -> bytes:
    """Raises HttpError, and IncompleteReadError if the client is gone."""
    size = head.body_size()
    if head.headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        async with asyncio.timeout(REQUEST_S):
            return await reader.readexactly(size)
    except TimeoutError:
        message = f"the request's {size} bytes took more than {REQUEST_S:g} s"
        raise HttpError(HTTPStatus.REQUEST_TIMEOUT, message) from None


async def _write(writer: asyncio.StreamWriter, answer: Answer, *, keeps_alive: bool) -> None:
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        f"Connection: {'keep-alive' if keeps_alive else 'close'}\r\n\r\n"
    )
    async with asyncio.timeout(REQUEST_S):
        writer.write(head.encode() + answer.body)
        await writer.drain()


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, error: HttpError) -> None:
    """Answer with an error, then read the rest of the request: otherwise the client might not see the error."""
    await _write(writer, error.answer(), keeps_alive=False)
    writer.write_eof()
    async with asyncio.timeout(LINGER_S):
        while await reader.read(MAX_HEAD):
            pass
