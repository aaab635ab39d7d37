"""One endpoint before several replicas: an ASGI application that passes requests on and hides that a replica dies."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence as Seq
from contextlib import aclosing
from typing import Any, Protocol

from foredraft.serve.bodies import Bodies
from foredraft.serve.errors import ApiError
from foredraft.serve.inprocess import AsgiRequest
from foredraft.serve.metrics import merged
from foredraft.serve.middleware import Headers, Message, Receive, Send, readable
from foredraft.serve.options import ServeOptions
from foredraft_scale.affinity import prompt_blocks

_PAUSES = (0.0, 0.1, 0.5, 2.0, 5.0)
"""Seconds before a request whose replica died is repeated."""
_SLACK = 10.0
"""Seconds beyond a replica's own limit after which the gateway stops waiting for it."""
_COUNTS = ("running", "waiting", "max_rows")


class ReplicaLost(Exception):
    """The replica died, or cannot be reached, before the answer was complete."""


class Replicas(Protocol):
    """Where a gateway sends requests."""

    def answer(self, call: AsgiRequest, blocks: tuple[bytes, ...]) -> AsyncGenerator[Message, None]:
        """The ASGI messages of one replica's answer; see ``Affinity`` for the blocks.

        Raises:
            ReplicaLost: perhaps after some messages.
        """
        ...

    async def all_replicas(self, call: AsgiRequest) -> Mapping[str, Seq[Message]]:
        """The answers of all replicas, by their names; those that do not answer are left out."""
        ...


class Gateway:
    """Sends each request to one replica, ``/metrics`` and ``/live`` to all.

    A request whose replica dies is sent to another one as long as its client has got nothing. A stream that has begun
    ends with an error object and ``[DONE]``. All else is the replicas' own: keys, limits, errors, the page.
    """

    def __init__(self, replicas: Replicas, options: ServeOptions) -> None:
        self._replicas = replicas
        self._patience = options.request_timeout + _SLACK
        self._bodies = Bodies(options.max_body_bytes)
        self._origins = options.cors_origin

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for _ in ("startup", "shutdown"):
                await send({"type": f"{(await receive())['type']}.complete"})
        elif scope["type"] == "http":
            await self._respond(scope, receive, send)

    async def _respond(self, scope: Any, receive: Receive, send: Send) -> None:
        try:
            async with self._bodies.received(Headers(scope=scope), receive) as body:
                call = AsgiRequest.of(scope, body)
            if scope["path"] in ("/metrics", "/live"):
                answer = _merge_responses(await self._replicas.all_replicas(call), scope["path"])
            else:
                answer = await self._of_one(call, send)
        except ApiError as error:
            await readable(error.response(), self._origins)(scope, receive, send)
        else:
            await answer.finish(send)

    async def _of_one(self, call: AsgiRequest, send: Send) -> "_ReplicaResponse":
        """The answer of one replica; if it is a stream, it has been sent already.

        Raises:
            ApiError: there is no replica, or several have died.
        """
        blocks = prompt_blocks(call.body, _authorization(call))
        for pause in _PAUSES:
            await asyncio.sleep(pause)
            answer = _ReplicaResponse()
            try:
                async with aclosing(self._replicas.answer(call, blocks)) as messages:
                    while not answer.complete:
                        await answer.add(await self._next(messages), send)
                return answer
            except ReplicaLost:
                if answer.streaming:
                    await answer.break_off(send)
                    return answer
        raise ApiError(503, "The replicas that had this request have died.", retry_after=1.0)

    async def _next(self, messages: AsyncGenerator[Message, None]) -> Message:
        """The next message.

        Raises:
            ReplicaLost: there is none, though the answer is not complete.
            ApiError: it does not come in time.
        """
        try:
            return await asyncio.wait_for(anext(messages), self._patience)
        except StopAsyncIteration:
            raise ReplicaLost from None
        except asyncio.TimeoutError:
            raise ApiError(503, "No replica answers.", retry_after=1.0) from None


class _ReplicaResponse:
    """An answer as it comes. A stream is passed on at once, all else is held until it is complete."""

    def __init__(self, messages: Seq[Message] = ()) -> None:
        self._start: Message = {"type": "http.response.start", "status": 200, "headers": []}
        self._body: list[bytes] = []
        self.streaming = False
        self.complete = False
        for message in messages:
            self._take(message)

    @property
    def status(self) -> int:
        return self._start["status"]

    @property
    def body(self) -> bytes:
        return b"".join(self._body)

    async def add(self, message: Message, send: Send) -> None:
        """Take the next message; pass it on if it is part of a stream."""
        headers = dict(self._start["headers"])
        if message["type"] != "http.response.body" or b"text/event-stream" not in headers.get(b"content-type", b""):
            self._take(message)
            return
        if not self.streaming:
            self.streaming = True
            await send(self._start)
        self.complete = not message.get("more_body", False)
        await send(message)

    def _take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body":
            self._body.append(message.get("body", b""))
            self.complete = not message.get("more_body", False)

    def with_body(self, text: str) -> "_ReplicaResponse":
        """The same answer with another body."""
        body = text.encode()
        headers = [(name, value) for name, value in self._start["headers"] if name != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        return _ReplicaResponse([{**self._start, "headers": headers}, {"type": "http.response.body", "body": body}])

    async def finish(self, send: Send) -> None:
        """Send all of it, unless it was a stream."""
        if not self.streaming:
            await send(self._start)
            await send({"type": "http.response.body", "body": self.body})

    async def break_off(self, send: Send) -> None:
        """End a stream with an error object."""
        error = ApiError(503, "The replica that wrote this answer has died.")
        await send({"type": "http.response.body", "body": error.ending()})


def _authorization(call: AsgiRequest) -> str:
    return dict(call.scope["headers"]).get(b"authorization", b"").decode("latin-1")


def _merge_responses(answers: Mapping[str, Seq[Message]], path: str) -> _ReplicaResponse:
    """One answer from those of all replicas: metrics with a label ``replica``, the numbers of ``/live`` added up.

    Raises:
        ApiError: no replica answers.
    """
    found = {name: _ReplicaResponse(messages) for name, messages in sorted(answers.items())}
    if not found:
        raise ApiError(503, "No replica answers.", retry_after=1.0)
    good = {name: answer for name, answer in found.items() if answer.status == 200}
    if not good:
        return next(iter(found.values()))
    first = next(iter(good.values()))
    if path == "/metrics":
        return first.with_body(merged({name: answer.body.decode() for name, answer in good.items()}))
    states = [json.loads(answer.body) for answer in good.values()]
    return first.with_body(json.dumps({**states[0], **{name: sum(each[name] for each in states) for name in _COUNTS}}))
