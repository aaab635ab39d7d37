"""Runs the application in uvicorn, with limits on connections, heads and slow clients, and with our errors."""

import asyncio
import functools
import logging
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from http import HTTPStatus
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from foredraft.engine.generator import Generator
from foredraft.serve.app import make_app
from foredraft.serve.errors import RETRY_SECONDS, ApiError
from foredraft.serve.options import ServeOptions

_log = logging.getLogger(__name__)
_UNWIND_SECONDS = 1.0
"""Time that requests which are cut off have to send their error."""
MAX_HEAD_BYTES = 2**16
"""The most bytes of a request's path and headers."""
_LINGER_SECONDS = 1.0
"""How long what a refused client still sends is read: an answer is lost if its connection closes before that."""
_BACKLOG = 128
"""Connections that wait to be accepted. More are accepted at once before any of them makes room for another."""
_UNSENT_BYTES = 2**14
"""Bytes that wait for a client before its answer does: in our buffer, and in the kernel's."""


class Server(uvicorn.Server):
    """A server around a generator. SIGTERM and SIGINT drain it: accepted requests end, new ones are refused.

    A second SIGINT, or the end of ``drain_seconds``, cuts off the requests that still run: each answers with an error.

    Args:
        names: of the model in the API; the first one is in the answers.
    """

    def __init__(self, generator: Generator, names: Seq[str], options: ServeOptions) -> None:
        self.app = make_app(generator, names, options)
        limits = ConnectionLimits(
            _room_for(options.max_connections), options.head_seconds, options.body_seconds, options.client_seconds
        )
        config = uvicorn.Config(
            self.app,
            options.host,
            options.port,
            http=functools.partial(HttpProtocol, limits=limits),  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=math.ceil(options.drain_seconds + 2 * _UNWIND_SECONDS),
        )
        super().__init__(config)
        self._drain_seconds = options.drain_seconds
        self._cut = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def uninterruptible(self) -> bool:
        """Whether a thread is at work for which Python would wait at its end, also after the server's."""
        return bool(self.app.state.api.conversions.uninterruptible)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; a second SIGINT cuts off the requests, a third stops at once.

        Unlike uvicorn's own, it does not raise the signal again at the end: a drained server ends with status 0.
        """
        self.app.state.service.draining = True
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit |= self._cut
            self._cut = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._cut_off)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            local = self.url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
            addresses = {"page": f"{local}/", "api": f"{local}/v1"}
            _log.info("Serving on %s.", self.url, extra={"facts": addresses})

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().serve(sockets)
        finally:  # also after a third Ctrl-C, which skips all else
            self.app.state.api.conversions.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.app.state.api.stop()
        asyncio.get_running_loop().call_later(self._drain_seconds, self._cut_off)
        await super().shutdown(sockets)

    def _cut_off(self) -> None:
        """End the requests that still run; see ``Access``."""
        tasks = [task for task in self.server_state.tasks if not task.done()]
        if tasks:
            _log.warning("Cut off requests at the end: %d.", len(tasks))
        for task in tasks:
            task.cancel()
        asyncio.get_running_loop().call_later(_UNWIND_SECONDS, self._hang_up)

    def _hang_up(self) -> None:
        """Close the connections whose clients do not take the end of their answer."""
        for connection in self.server_state.connections:
            connection.transport.abort()

    @property
    def url(self) -> str:
        """Where the server listens, once it has started."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of connections: their number, and seconds; see ``ServeOptions``."""

    count: int
    head_seconds: float
    body_seconds: float
    client_seconds: float


def _room_for(connections: int) -> int:
    """As many connections, or half as many as this process may open files: the other half are those that are accepted
    before others are closed, and the pipes of processes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/dev/fd"))
    wanted = opened + 2 * connections
    if hard == resource.RLIM_INFINITY or hard > soft:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, max(soft, wanted))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    room = max(1, min(connections, (soft - opened) // 2))
    if room < connections:
        _log.warning("At most %d connections, not %d: this process may open %d files.", room, connections, soft)
    return room


class HttpProtocol(HttpToolsProtocol):
    """A connection. It ends if its client is too slow, and refuses a request whose path and headers are too long, also
    before all of them are there."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._unread: asyncio.TimerHandle | None = None
        self._awaited: asyncio.TimerHandle | None = None  # the rest of a head or of a body
        self._in_head = self._refused = self._closes = False
        self._head_bytes = 0  # of whole fields
        self._part_bytes = 0  # of reads since the last whole field
        self.idle_since = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_UNSENT_BYTES)
        connection = transport.get_extra_info("socket")
        if sys.platform == "linux" and connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        self._await(self._limits.head_seconds)
        if len(self.connections) > self._limits.count:
            self._make_room()

    def _make_room(self) -> None:
        """Close the connection that has waited for its request the longest; if all have one, refuse this one."""
        _log.warning("All of the %d connections are in use.", self._limits.count)
        idle = [each for each in self.connections if isinstance(each, HttpProtocol) and each.idle and each is not self]
        if idle:
            oldest = min(idle, key=lambda each: each.idle_since)
            self.connections.discard(oldest)
            oldest.transport.abort()
        else:
            self._refuse(ApiError(503, "The server has too many connections.", retry_after=RETRY_SECONDS))

    @property
    def idle(self) -> bool:
        """Whether there is no request to be answered."""
        return self.cycle is None or self.cycle.response_complete

    def on_response_complete(self) -> None:
        self.idle_since = self.loop.time()
        super().on_response_complete()

    def _await(self, seconds: float | None) -> None:
        """Wait for the rest of a head or of a body for this time; None: for nothing."""
        if self._awaited is not None:
            self._awaited.cancel()
        self._awaited = None if seconds is None else self.loop.call_later(seconds, self._missed, seconds)

    def _missed(self, seconds: float) -> None:
        """End a connection that is idle. While a request is answered, that is the application's matter."""
        if not self.idle:
            self._await(seconds)
        elif self._in_head:
            self._refuse(ApiError(408, "The head of the request took too long to arrive."))
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._await(None)
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self._limits.client_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        began = self._in_head
        if self._awaited is None and self.idle:
            self._await(self._limits.head_seconds)
        super().data_received(data)
        if began and self._in_head and not self._refused:
            self._part_bytes += len(data)
            if self._part_bytes > MAX_HEAD_BYTES:
                self.send_400_response("")

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._await(self._limits.head_seconds)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(name + value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._await(self._limits.body_seconds)
        super().on_headers_complete()
        if self.cycle is not None:  # it is for an upgrade
            self._closes = not self.cycle.keep_alive
            self.cycle.keep_alive = True  # until the body is there: a client that still sends could not read the answer

    def on_message_complete(self) -> None:
        self._await(None)
        if self._closes:
            self.cycle.keep_alive = False
            if self.cycle.response_complete:
                self.transport.close()
        super().on_message_complete()

    def _count(self, field: bytes) -> None:
        self._part_bytes = 0
        self._head_bytes += len(field)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _TooLong  # the parser stops, and uvicorn answers by send_400_response

    def send_400_response(self, msg: str) -> None:
        """Answer a request that cannot be read, and close the connection."""
        error = ApiError(400, "The request is not valid HTTP.")
        if max(self._head_bytes, self._part_bytes) > MAX_HEAD_BYTES:
            error = ApiError(431, f"The path and headers of the request have more than {MAX_HEAD_BYTES} bytes.")
        self._refuse(error)

    def _refuse(self, error: ApiError) -> None:
        """Answer what has no request, and close the connection."""
        answer = error.response()
        head = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode(), b"connection: close"]
        head += [b"%s: %s" % field for field in answer.raw_headers if field[0] != b"connection"]
        self.transport.write(b"\r\n".join([*head, b"", bytes(answer.body)]))
        self._refused = True
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)


class _TooLong(Exception):
    """Ends the parser."""
