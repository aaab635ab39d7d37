"""Limits that hold before a body is read."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.serve.errors import ApiError


class BodyLimit:
    """Refuses bodies of more than ``limit`` bytes, with or without a content-length."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        size, started = 0, False

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limit:
                raise _TooLarge
            return message

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, limited, watched)
        except _TooLarge:
            if not started:
                await ApiError(413, f"The body has more than {self._limit} bytes.").response()(scope, receive, send)


class _TooLarge(BaseException):
    """Not an ``Exception``, which would become an error of the body's form."""
