"""Middleware: API keys, request ids and the log of requests; HEAD; unexpected errors."""

import asyncio
import hashlib
import hmac
import importlib
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence as Seq
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.serve.errors import ApiError, stopped

_log = logging.getLogger(__name__)
_OPEN = {"/", "/health", "/version"}
"""Paths that need no key."""
_SAFE = re.compile(r"[A-Za-z0-9._-]{1,64}")


def readable(app: ASGIApp, origins: Seq[str]) -> ASGIApp:
    """An application whose answers web pages of these origins may read."""
    return CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]) if origins else app


class Access:
    """Checks keys and sets ``scope["state"]``: ``id``, the client's ``x-request-id`` or a new one, and ``tenant``, a
    hash of the key.

    Args:
        keys: any of them opens; none: no key is needed.
    """

    def __init__(self, app: ASGIApp, keys: Seq[str]) -> None:
        self._app = app
        self._keys = [coded for key in keys for coded in _codings(key)]
        self._tracer = _tracer()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        number = given if _SAFE.fullmatch(given) else uuid.uuid4().hex
        key = _key(headers.get("authorization", ""))
        scope.setdefault("state", {}).update(id=number, tenant=hashlib.sha256(key).hexdigest()[:16] if key else "")
        started, status, streams = time.perf_counter(), 499, False

        async def tagged(message: Message) -> None:
            nonlocal status, streams
            if message["type"] == "http.response.start":
                status, fields = message["status"], MutableHeaders(scope=message)
                fields["x-request-id"] = number
                streams = "text/event-stream" in fields.get("content-type", "")
            await send(message)

        span = self._tracer.start_span(f"{scope['method']} {scope['path']}") if self._tracer else None
        try:
            if self._allowed(scope, key):
                await self._app(scope, receive, tagged)
            else:
                refused = ApiError(401, "A valid API key is needed: send it as authorization: Bearer KEY.")
                await refused.response()(scope, receive, tagged)
        except asyncio.CancelledError:  # the server stops, and takes the request with it
            if status == 499:
                await stopped().response()(scope, receive, tagged)
            elif streams:
                await send({"type": "http.response.body", "body": stopped().ending()})
        finally:
            facts: dict[str, Any] = {"request_id": number, "status": status, "path": scope["path"]}
            if span is not None:
                span.set_attributes({f"foredraft.{name}": value for name, value in facts.items()})
                span.end()
            facts |= {"method": scope["method"], "seconds": round(time.perf_counter() - started, 4)}
            _log.info("request", extra={"facts": facts})

    def _allowed(self, scope: Scope, key: bytes) -> bool:
        if not self._keys or scope["path"] in _OPEN or scope["method"] == "OPTIONS":
            return True
        return any(hmac.compare_digest(key, each) for each in self._keys)


def _key(authorization: str) -> bytes:
    """The key of a header ``Bearer KEY``; the scheme's name is not case-sensitive (RFC 9110, 11.1)."""
    scheme, _, rest = authorization.partition(" ")
    return (rest.strip(" \t") if scheme.lower() == "bearer" else authorization).encode("latin-1")


def _codings(key: str) -> set[bytes]:
    """A key as clients send it: in UTF-8, or where it can be in Latin-1, as HTTP once had it."""
    plain = key.encode("utf-8", "surrogateescape")  # bytes of the environment that are no UTF-8 stay what they are
    try:
        return {plain, key.encode("latin-1")}
    except UnicodeEncodeError:
        return {plain}


def _tracer() -> Any:
    """OpenTelemetry's tracer, if the package is there."""
    try:
        return importlib.import_module("opentelemetry.trace").get_tracer("foredraft")
    except ImportError:
        return None


class _WatchedSend:
    """Sends, and notes that an answer has ``started``."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def __call__(self, message: Message) -> None:
        self.started = True
        await self._send(message)


class Head:
    """Answers HEAD as GET; what runs the application sends no body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "method": "GET"} if scope.get("method") == "HEAD" else scope, receive, send)


class ErrorMiddleware:
    """Answers a request that failed. Starlette's own handler raises the error again, and uvicorn then closes the
    connection without a word to the client, whose next request on it fails, too.

    Args:
        failed: the error for the client.
    """

    def __init__(self, app: ASGIApp, failed: Callable[[Exception], ApiError]) -> None:
        self._app = app
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watched = _WatchedSend(send)
        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if watched.started or scope["type"] != "http":  # the client must see that the answer is not whole
                raise
            await self._failed(error).response()(scope, receive, send)
