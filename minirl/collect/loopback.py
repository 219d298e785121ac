"""A small HTTP/1.1 server on 127.0.0.1, one for a process. Each session has a path of its own that nobody can guess.

Whatever a client does, it takes a bounded amount of memory and gets an error in OpenAI's form; nothing waits for it
longer than its session lasts.

Standard library only. Nothing here is collective.
"""

import asyncio
import contextlib
import contextvars
import json
import resource
import secrets
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

MAX_HEAD = 1 << 15
MAX_BODY = 1 << 22
MAX_CONNECTIONS = 1024
# For a connection's first request, for the rest of one, and for taking an answer.
REQUEST_S = 30.0
# For what a client still sends when it has been refused: it may read only afterwards.
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
    """What a client gets."""

    body: bytes
    content_type: str = "application/json"
    status: HTTPStatus = HTTPStatus.OK

    @classmethod
    def of_json(cls, value: Any, status: HTTPStatus = HTTPStatus.OK) -> "Answer":
        """A value as JSON."""
        return cls(json.dumps(value).encode(), status=status)


# Takes method, path behind the session's own, and body. Raises HttpError.
Handler = Callable[[str, str, bytes], Awaitable[Answer]]


@dataclass(eq=False)
class Session:
    """What is served under one path. idle: connections whose last request was for it, and that have no other one."""

    url: str
    handler: Handler
    is_open: bool = True
    idle: set[asyncio.StreamWriter] = field(default_factory=set)


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
        # Thousands of digits are no number that Python reads.
        if len(size) > 18 or int(size) > MAX_BODY:
            message = f"the request has {size:.18} bytes; at most {MAX_BODY}"
            raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
        return int(size)


class LoopbackServer:
    """Serves sessions. Use `of_this_loop`."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._port = 0
        self._num_connections = 0
        # User code needs descriptors too, and so does the other end of connections from this process.
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        is_limited = soft_limit != resource.RLIM_INFINITY
        self._max_connections = min(MAX_CONNECTIONS, soft_limit // 4) if is_limited else MAX_CONNECTIONS

    async def start(self) -> "LoopbackServer":
        """Listen at a port that is free."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=MAX_HEAD)
        self._port = server.sockets[0].getsockname()[1]
        return self

    def open(self, handler: Handler) -> Session:
        """A new session."""
        token = secrets.token_urlsafe(16)
        session = Session(f"http://127.0.0.1:{self._port}/{token}/v1", handler)
        self._sessions[token] = session
        return session

    def close(self, session: Session) -> None:
        """End a session and its connections. Those that have a request end behind its answer."""
        session.is_open = False
        self._sessions = {token: other for token, other in self._sessions.items() if other is not session}
        for writer in session.idle:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection."""
        self._num_connections += 1
        try:
            # Such an error is the client's, who has gone.
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._serve_all(reader, writer)
        finally:
            self._num_connections -= 1
            writer.close()

    async def _serve_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        limit_s: float | None = REQUEST_S
        idle: set[asyncio.StreamWriter] = set()
        try:
            if self._num_connections > self._max_connections:
                message = f"more than {self._max_connections} connections are open"
                raise HttpError(HTTPStatus.SERVICE_UNAVAILABLE, message)
            keeps_alive = True
            while keeps_alive:
                head = await _read_head(reader, limit_s)
                idle.discard(writer)
                session, path = self._find(head.path)
                body = await _read_body(reader, writer, head)
                answer = await _answer(session, head.method, path, body)
                keeps_alive = head.keeps_alive and session.is_open
                await _write(writer, answer, keeps_alive=keeps_alive)
                if not session.is_open:
                    # It ended while the answer was written.
                    return
                # From here on the connection is closed with the session.
                limit_s = None
                idle = session.idle
                idle.add(writer)
        except HttpError as error:
            await _refuse(reader, writer, error)
        finally:
            idle.discard(writer)

    def _find(self, path: str) -> tuple[Session, str]:
        """The session of a path, and what is behind its own part of it. Raises HttpError."""
        token, _, rest = path.partition("?")[0].removeprefix("/").partition("/")
        if token not in self._sessions:
            raise HttpError(HTTPStatus.NOT_FOUND, "no episode has this URL: it has ended, or never was")
        return self._sessions[token], rest


_servers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[LoopbackServer]]
_servers = weakref.WeakKeyDictionary()


async def of_this_loop() -> LoopbackServer:
    """The server of the running event loop, which is started once."""
    loop = asyncio.get_running_loop()
    if loop not in _servers:
        # The server's tasks are no episode's: they are not to run with the context of the one that came first.
        _servers[loop] = contextvars.Context().run(loop.create_task, LoopbackServer().start())
    # An episode that ends meanwhile must not end it for the others.
    return await asyncio.shield(_servers[loop])


async def _answer(session: Session, method: str, path: str, body: bytes) -> Answer:
    try:
        return await session.handler(method, path, body)
    except HttpError as error:
        return error.answer()


async def _read_head(reader: asyncio.StreamReader, limit_s: float | None) -> _Head:
    """Raises HttpError, and IncompleteReadError or TimeoutError where there is none."""
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
        # Of a header that is there twice none is right.
        before = [headers[name.lower()]] if name.lower() in headers else []
        headers[name.lower()] = ", ".join([*before, value.strip()])
    return _Head(parts[0], parts[1], parts[2], headers)


async def _read_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: _Head) -> bytes:
    """Raises HttpError, and IncompleteReadError if the client has gone."""
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
    """Answer with an error, before which not all was read: were the rest not read, the client might not see it."""
    await _write(writer, error.answer(), keeps_alive=False)
    writer.write_eof()
    async with asyncio.timeout(LINGER_S):
        while await reader.read(MAX_HEAD):
            pass
