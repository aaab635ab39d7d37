"""Runs the application in uvicorn."""

import logging
import signal
import socket
from collections.abc import Sequence as Seq
from types import FrameType

import uvicorn

from foredraft.engine.generator import Generator
from foredraft.serve.app import make_app
from foredraft.serve.options import ServeOptions

_log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """A server around a generator. SIGTERM and SIGINT drain it: accepted requests end, new ones are refused.

    Args:
        names: of the model in the API; the first one is in the answers.
    """

    def __init__(self, generator: Generator, names: Seq[str], options: ServeOptions) -> None:
        self.app = make_app(generator, names, options)
        config = uvicorn.Config(
            self.app,
            options.host,
            options.port,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=options.drain_seconds,
        )
        super().__init__(config)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; a second SIGINT stops at once.

        Unlike uvicorn's own, it does not raise the signal again at the end: a drained server ends with status 0.
        """
        self.app.state.service.draining = True
        self.force_exit |= self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            _log.info("Serving on %s.", self.url)

    @property
    def url(self) -> str:
        """Where the server listens, once it has started."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"
