"""Bodies of requests as they arrive: what they may be, how large, and how much of them the server holds."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.types import Receive

from foredraft.serve.errors import RETRY_SECONDS, ApiError, gone

SHORT_BYTES = 32 * 1024
"""Bodies that a thread converts, in at most 25 ms on a slow core, and that are always taken."""
_AT_ONCE = 16
"""Bodies of the largest size that the server holds at once."""


class Bodies:
    """Reads bodies of at most ``most`` bytes. Of those that are not short it holds as much as 16 of the largest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0

    @asynccontextmanager
    async def received(self, headers: Headers, receive: Receive) -> AsyncIterator[bytes]:
        """The body of a request, which the context holds.

        Raises:
            ApiError: it is too large, the server holds too many, or the client went away.
        """
        declared = int(headers.get("content-length", "0"))  # the parser of HTTP has checked it
        body, more = bytearray(), True
        try:
            while more:
                if max(declared, len(body)) > self._most:
                    raise ApiError(413, f"The body has more than {self._most} bytes (--max-body-bytes).")
                if len(body) > SHORT_BYTES and self._held > _AT_ONCE * self._most:
                    raise ApiError(503, "The server reads too many large bodies.", retry_after=RETRY_SECONDS)
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise gone()
                part, more = message.get("body", b""), message.get("more_body", False)
                body += part
                self._held += len(part)
            yield bytes(body)
        finally:
            self._held -= len(body)


def check_type(headers: Headers) -> None:
    """Check that a body is plain JSON. Without a type it is, unless a web page sends it: browsers do not ask the server
    before they do that.

    Raises:
        ApiError: it is compressed, or of another type.
    """
    coding = headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise ApiError(415, f"Bodies with content-encoding {coding} are not supported: send the JSON as it is.")
    kind, _, _ = headers.get("content-type", "").partition(";")
    kind = kind.strip().lower()
    if not (kind == "application/json" or kind.endswith("+json") or (not kind and "origin" not in headers)):
        raise ApiError(400, f"The body must be a JSON object (content-type: application/json, not {kind or 'none'}).")
