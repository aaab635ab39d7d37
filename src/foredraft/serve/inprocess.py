"""Answers requests that arrive as values: another process has read them from a connection."""

import asyncio
from collections.abc import AsyncIterator, Sequence as Seq
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

from starlette.types import Message

from foredraft.engine.generator import Generator
from foredraft.serve.app import make_app
from foredraft.serve.options import ServeOptions

_CARRIED = ("http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client", "server")


@dataclass(frozen=True, slots=True)
class AsgiRequest:
    """A whole request: the values of its ASGI scope, and its body."""

    scope: dict[str, Any]
    body: bytes

    @classmethod
    def of(cls, scope: Any, body: bytes) -> "AsgiRequest":
        """Keep of a scope what can be sent to another process."""
        return cls({name: scope[name] for name in _CARRIED if name in scope}, body)


class InProcess:
    """The application of the server without a server."""

    def __init__(self, generator: Generator, names: Seq[str], options: ServeOptions) -> None:
        self._app = make_app(generator, names, options)
        self._open = AsyncExitStack()

    async def start(self) -> None:
        """Start what runs beside the requests."""
        await self._open.enter_async_context(self._app.router.lifespan_context(self._app))

    async def stop(self) -> None:
        """End all requests."""
        await self._open.aclose()

    @property
    def healthy(self) -> bool:
        return self._app.state.service.healthy

    async def answer(self, call: AsgiRequest) -> AsyncIterator[Message]:
        """Yield the ASGI messages of the answer; closing the iterator is the client's going away."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        body: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]
        gone = asyncio.Event()

        async def receive() -> Message:
            if body:
                return body.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            messages.put_nowait(message)

        # with spec 2.3 starlette watches for the client's going away while it streams
        scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "root_path": "", **call.scope}
        running = asyncio.ensure_future(self._app(scope, receive, send))
        running.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
            await running
        finally:
            gone.set()
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
