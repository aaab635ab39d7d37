"""Runs the application in uvicorn."""

import asyncio
import functools
import logging
import signal
import socket
from collections.abc import Sequence as Seq
from types import FrameType

import uvicorn

from foredraft.engine.generator import Generator
from foredraft.serve.app import make_app
from foredraft.serve.http import HttpProtocol
from foredraft.serve.options import ServeOptions

_log = logging.getLogger(__name__)
_UNWIND_SECONDS = 5
"""Time that requests which are cut off have to send their error."""


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
