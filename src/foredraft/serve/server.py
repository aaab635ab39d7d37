"""Runs the application in uvicorn, with a limit on headers, an end of clients that do not read, and our errors."""

import asyncio
import functools
import logging
import signal
import socket
import sys
from collections.abc import Sequence as Seq
from http import HTTPStatus
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from foredraft.engine.generator import Generator
from foredraft.serve.app import make_app
from foredraft.serve.errors import ApiError
from foredraft.serve.options import ServeOptions

_log = logging.getLogger(__name__)
_UNWIND_SECONDS = 5
"""Time that requests which are cut off have to send their error."""
MAX_HEAD_BYTES = 2**16
"""The most bytes of a request's path and headers."""
_LINGER_SECONDS = 1.0
"""How long what a refused client still sends is read: an answer is lost if its connection closes before that."""
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
        config = uvicorn.Config(
            self.app,
            options.host,
            options.port,
            http=functools.partial(HttpProtocol, client_seconds=options.client_seconds),  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=options.drain_seconds + _UNWIND_SECONDS,
        )
        super().__init__(config)
        self._drain_seconds = options.drain_seconds
        self._cut = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def uninterruptible(self) -> bool:
        """Whether a thread compiles a grammar, for which Python would wait at its end, also after the server's."""
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
            _log.info("Serving on %s.", self.url)

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

    @property
    def url(self) -> str:
        """Where the server listens, once it has started."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class HttpProtocol(HttpToolsProtocol):
    """Refuses a request whose path and headers are too long, also before all of them are there.

    Args:
        client_seconds: a connection is cut off if its client takes nothing for this time while an answer waits.
    """

    def __init__(self, *args: Any, client_seconds: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._client_seconds = client_seconds
        self._unread: asyncio.TimerHandle | None = None
        self._in_head = self._refused = False
        self._head_bytes = 0  # of whole fields
        self._part_bytes = 0  # of reads since the last whole field

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_UNSENT_BYTES)
        connection = transport.get_extra_info("socket")
        if sys.platform == "linux" and connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self._client_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        began = self._in_head
        super().data_received(data)
        if began and self._in_head and not self._refused:
            self._part_bytes += len(data)
            if self._part_bytes > MAX_HEAD_BYTES:
                self.send_400_response("")

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(name + value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

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
        body = error.text()
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write((head + body).encode("ascii"))
        self._refused = True
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)


class _TooLong(Exception):
    """Ends the parser."""
