"""HTTP as uvicorn reads it, with a limit on headers, an end of clients that do not read, and our errors."""

import asyncio
import socket
import sys
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from foredraft.serve.errors import ApiError

MAX_HEAD_BYTES = 2**16
"""The most bytes of a request's path and headers."""
_LINGER_SECONDS = 1.0
"""How long what a refused client still sends is read: an answer is lost if its connection closes before that."""
_UNSENT_BYTES = 2**14
"""Bytes that wait for a client before its answer does: in our buffer, and in the kernel's."""


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
