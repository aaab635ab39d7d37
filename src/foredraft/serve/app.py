"""Routes of the server."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence as Seq
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from foredraft.core.errors import ForedraftError
from foredraft.core.version import __version__
from foredraft.engine.generator import Generator
from foredraft.engine.results import Result
from foredraft.serve.answers import (
    Answer,
    ChatCompletion,
    Completion,
    ErrorAnswer,
    Live,
    ModelCard,
    ModelList,
    Text,
    Tokens,
)
from foredraft.serve.bodies import Bodies, check_type
from foredraft.serve.conversions import Conversions
from foredraft.serve.errors import ApiError, api_error, gone, late, stopping, unfinished
from foredraft.serve.middleware import Access, ErrorMiddleware, Head, readable
from foredraft.serve.openapi import describe_bodies
from foredraft.serve.options import ServeOptions
from foredraft.serve.page import page, policy
from foredraft.serve.reading import BodyReader, Prepared, RequestLabel
from foredraft.serve.render import CompletionRenderer, Renderer
from foredraft.serve.responses.answers import Response as ModelResponse
from foredraft.serve.responses.schema import ResponsesRequest
from foredraft.serve.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from foredraft.serve.service import Outputs, Service, converter_for

_log = logging.getLogger(__name__)
_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}}
_STREAMED = {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "The answer"}
_FRESH = {"cache-control": "no-store"}
_BODIES = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
T = TypeVar("T")


class Api:
    """The endpoints, for one generator.

    Args:
        names: of the model; the first one is in the answers.
    """

    def __init__(self, generator: Generator, names: Seq[str], options: ServeOptions) -> None:
        self.service = Service(generator, options)
        most = self.service.capacity
        converter = converter_for(
            generator, options.default_max_tokens, tool_prompt=options.tool_prompt, most_outputs=most
        )
        self._reader = BodyReader(converter, tuple(names))
        self.conversions = Conversions(
            self._reader, generator.engine.compile_grammar, options, busy=lambda: not self.service.idle
        )
        self._bodies = Bodies(options.max_body_bytes)
        self._options = options
        self._created = int(time.time())
        self._stop = asyncio.Event()

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._generated(request, BodyReader.chat)

    async def completion(self, request: Request) -> Response:
        """Continue one or several texts."""
        return await self._generated(request, BodyReader.completion)

    async def response(self, request: Request) -> Response:
        """Answer a conversation in OpenAI's newer form; nothing is stored."""
        return await self._generated(request, BodyReader.response)

    async def stored(self, number: str) -> Response:
        """There is no response to be read, cancelled or deleted."""
        raise ApiError(404, "This server stores no responses.")

    async def models(self) -> Response:
        """The names of the model."""
        return _json(ModelList(object="list", data=[self._card(name) for name in self._reader.names]))

    async def model(self, name: str) -> Response:
        """One of the names."""
        self._reader.check_name(name)
        return _json(self._card(name))

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or of a chat."""
        return _json_text(await self._read(request, BodyReader.tokens))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        return _json_text(await self._read(request, BodyReader.text))

    async def health(self) -> Response:
        """Empty; status 503 if the server is about to stop or makes no progress."""
        return Response(status_code=200 if self.service.healthy else 503)

    async def live(self) -> Response:
        """What the server does now."""
        generator = self.service.generator
        engine, tokenizer = generator.engine, generator.tokenizer
        now = Live(
            model=self._reader.names[0],
            drafter=generator.kind.method,
            lossless=generator.kind.lossless,
            chat=tokenizer is not None and tokenizer.inner.chat_template is not None,
            running=engine.running,
            waiting=engine.waiting,
            max_rows=engine.max_rows,
        )
        return _json(now)

    async def page(self) -> Response:
        """The page: chat with the model, and see what speculation does."""
        text = page()
        headers = {"content-security-policy": policy(text), "x-content-type-options": "nosniff"}
        return HTMLResponse(text, headers={**headers, "cache-control": "no-cache"})

    async def version(self) -> dict[str, str]:
        """The version of foredraft."""
        return {"version": __version__}

    async def metrics(self) -> Response:
        """Prometheus metrics."""
        return Response(self.service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _card(self, name: str) -> ModelCard:
        length = self.service.generator.engine.target.max_length
        return ModelCard(id=name, object="model", created=self._created, owned_by="foredraft", max_model_len=length)

    async def _generated(
        self, request: Request, method: Callable[[BodyReader, bytes, RequestLabel], Prepared]
    ) -> Response:
        """Answer a body that generates."""
        label = RequestLabel(request.state.id, int(time.time()))
        renderer, stream = await self._read(request, method, label)
        renderer.tokenizer = self.service.generator.tokenizer
        job = renderer.job
        if (grammar := job.params.grammar) is not None:
            renderer.job = replace(job, grammar=await self._patient(request, self.conversions.compiled(grammar)))
        if isinstance(renderer, CompletionRenderer) and job.scored is not None:
            renderer.scores = await self._patient(request, self.service.scores(job))
        return await self._answer(request, renderer, stream=stream)

    async def _read(self, request: Request, method: Callable[..., T], *args: Any) -> T:
        """What a method of the reader makes of a request's body; the request's time begins here.

        Until the body is there, the client is not watched by ``_patient``, which would take its messages.
        """
        check_type(request.headers)
        request.state.deadline = time.monotonic() + self._options.request_timeout
        seconds = min(self._options.body_seconds, self._options.request_timeout)
        async with AsyncExitStack() as held:
            arriving = held.enter_async_context(self._bodies.received(request.headers, request.receive))
            raw = await _before(arriving, (asyncio.sleep(seconds), unfinished()), (self._stop.wait(), stopping()))
            return await self._patient(request, self.conversions.read(method, raw, *args))

    async def _patient(self, request: Request, work: Awaitable[T]) -> T:
        """Await what a request needs before it runs.

        Raises:
            ApiError: the client went away, it took too long, or the server is about to stop.
        """
        left = request.state.deadline - time.monotonic()
        return await _before(
            work, (_disconnected(request), gone()), (asyncio.sleep(left), late()), (self._stop.wait(), stopping())
        )

    def stop(self) -> None:
        """End the requests that have not begun to run; called when the server begins to drain."""
        self._stop.set()

    async def _answer(self, request: Request, renderer: Renderer, *, stream: bool) -> Response:
        """Run the job of a renderer. It is queued here also for a stream, so that a refusal has its own status."""
        left = request.state.deadline - time.monotonic()
        outputs = await self.service.start(renderer.job, tenant=request.state.tenant, timeout=left)
        if stream:
            return _Stream(outputs, self._lines(outputs, renderer))
        with outputs:
            return _json_text(await _before(self._whole(outputs, renderer), (_disconnected(request), gone())))

    async def _whole(self, outputs: Outputs, renderer: Renderer) -> bytes:
        return await self.conversions.answer(renderer, await outputs.results())

    async def _lines(self, outputs: Outputs, renderer: Renderer) -> AsyncIterator[str]:
        """The events of a stream; an error in the middle ends it."""
        results: dict[int, Result] = {}
        try:
            for chunk in renderer.opening():
                yield renderer.event(chunk)
            async for update in outputs.updates():
                for chunk in renderer.chunks(update):
                    yield renderer.event(chunk)
                if update.result is not None:
                    results[update.index] = update.result
            for chunk in renderer.closing([results[index] for index in sorted(results)]):
                yield renderer.event(chunk)
        except Exception as error:
            yield renderer.ending(self.failed(error))
        else:
            yield renderer.ending(None)

    def failed(self, error: Exception) -> ApiError:
        """The error for the client; the log keeps the reason of an unexpected one."""
        found = api_error(error)
        self.service.metrics.error(found.status)
        if found.status >= 500 and not isinstance(error, ApiError):
            known = isinstance(error, ForedraftError)  # its sentence says it all
            _log.error("A request failed: %s", error, exc_info=None if known else error)
        return found

    async def on_error(self, request: Request, error: Exception) -> Response:
        """The answer to a request that failed."""
        return self.failed(error).response()

    async def watch(self, seconds: float) -> None:
        """Look for progress every ``seconds``, until cancelled."""
        while True:
            self.service.look()
            await asyncio.sleep(seconds)


class _Stream(StreamingResponse):
    """Server-sent events; the outputs are cancelled when the client goes away."""

    def __init__(self, outputs: Outputs, lines: AsyncIterator[str]) -> None:
        super().__init__(lines, media_type="text/event-stream", headers=_FRESH)
        self._outputs = outputs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._outputs:
            await super().__call__(scope, receive, send)


def _json(answer: Answer) -> Response:
    return _json_text(answer.json_text())


def _json_text(text: str | bytes) -> Response:
    return Response(text, media_type="application/json")


async def _before(work: Awaitable[T], *ends: tuple[Awaitable[object], ApiError]) -> T:
    """Await ``work``; if one of ``ends`` comes before its result, cancel it and raise the end's error."""
    task = asyncio.ensure_future(work)
    errors = {asyncio.ensure_future(end): error for end, error in ends}
    try:
        await asyncio.wait({task, *errors}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise next(error for end, error in errors.items() if end.done())
        return task.result()
    finally:
        for each in (task, *errors):
            each.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await asyncio.gather(task, *errors, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def make_app(generator: Generator, names: Seq[str], options: ServeOptions) -> FastAPI:
    """The ASGI application.

    Args:
        names: of the model in the API; the first one is in the answers.
    """
    api = Api(generator, names, options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        watch = asyncio.ensure_future(api.watch(options.stall_seconds / 8))
        yield
        watch.cancel()
        api.conversions.close()
        api.service.shut_down()
        generator.engine.close()

    app = FastAPI(title="foredraft", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.api, app.state.service = api, api.service
    for kind in (HTTPException, ApiError, ForedraftError):
        app.add_exception_handler(kind, api.on_error)
    app.add_middleware(ErrorMiddleware, failed=api.failed)
    app.add_middleware(Head)
    app.add_middleware(Access, keys=options.keys)
    app.add_middleware(readable, origins=options.cors_origin)  # outside of the others, whose refusals are readable too
    _add_routes(app, api)
    describe_bodies(app, _BODIES)
    return app


def _add_routes(app: FastAPI, api: Api) -> None:
    streams = {**_ERRORS, 200: _STREAMED}
    app.post("/v1/chat/completions", response_model=ChatCompletion, responses=streams)(api.chat)
    app.post("/v1/completions", response_model=Completion, responses=streams)(api.completion)
    app.post("/v1/responses", response_model=ModelResponse, responses=streams)(api.response)
    app.api_route("/v1/responses/{number:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)(api.stored)
    app.post("/tokenize", response_model=Tokens, responses=_ERRORS)(api.tokenize)
    app.post("/detokenize", response_model=Text, responses=_ERRORS)(api.detokenize)
    app.get("/v1/models", response_model=ModelList)(api.models)
    app.get("/v1/models/{name:path}", response_model=ModelCard, responses=_ERRORS)(api.model)
    app.get("/health", response_class=Response)(api.health)
    app.get("/version")(api.version)
    app.get("/metrics", response_class=Response)(api.metrics)
    app.get("/live", response_model=Live)(api.live)
    app.get("/", response_class=HTMLResponse)(api.page)
