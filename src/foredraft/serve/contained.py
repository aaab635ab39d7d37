"""Unexpected errors become answers, and their connections stay open."""

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.serve.errors import ApiError


class Contained:
    """Answers a request that failed. Starlette's own handler raises the error again, and uvicorn then closes the
    connection without a word to the client, whose next request on it fails, too.

    Args:
        failed: the error for the client.
    """

    def __init__(self, app: ASGIApp, failed: Callable[[Exception], ApiError]) -> None:
        self._app = app
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if started or scope["type"] != "http":  # the client must see that the answer is not whole
                raise
            await self._failed(error).response()(scope, receive, send)
