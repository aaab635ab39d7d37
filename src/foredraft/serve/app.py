"""Routes of the server."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from foredraft.core.version import __version__
from foredraft.engine.generator import Generator
from foredraft.engine.results import Result
from foredraft.serve.answers import Answer, ChatChunk, ChatCompletion, Completion, ErrorAnswer, ModelCard, ModelList
from foredraft.serve.convert import Converter, Job
from foredraft.serve.errors import ApiError, api_error
from foredraft.serve.limits import BodyLimit
from foredraft.serve.options import ServeOptions
from foredraft.serve.render import Renderer
from foredraft.serve.schema import ChatRequest, CompletionRequest, Generation
from foredraft.serve.service import Outputs, Service, Update

_log = logging.getLogger(__name__)
_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}}
_STREAMED = {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "The answer"}
T = TypeVar("T")


class Api:
    """The endpoints, for one generator.

    Args:
        names: of the model; the first one is in the answers.
    """

    def __init__(self, generator: Generator, names: Seq[str], options: ServeOptions) -> None:
        self.service = Service(generator, options.max_queue)
        self._converter = Converter(generator, options.default_max_tokens)
        self._names = tuple(names)
        self._created = int(time.time())
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="foredraft-convert")

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        job = await self._job(body, self._converter.chat)
        renderer = self._renderer("chatcmpl", body, job)
        if not body.stream:
            return await self._whole(request, job, renderer.chat)
        first = list(renderer.first_chunks())
        return self._stream(body, job, first, renderer.chat_chunk, lambda done: renderer.usage_chunk(done, ChatChunk))

    async def completion(self, body: CompletionRequest, request: Request) -> Response:
        """Continue one or several texts."""
        job = await self._job(body, self._converter.completion)
        renderer = self._renderer("cmpl", body, job)
        if not body.stream:
            return await self._whole(request, job, renderer.completion)
        return self._stream(
            body, job, [], renderer.completion_chunk, lambda done: renderer.usage_chunk(done, Completion)
        )

    async def models(self) -> Response:
        """The names of the model."""
        length = self.service.generator.engine.target.max_length
        cards = [
            ModelCard(id=name, object="model", created=self._created, owned_by="foredraft", max_model_len=length)
            for name in self._names
        ]
        return _json(ModelList(object="list", data=cards))

    async def health(self) -> Response:
        """Empty, with status 503 if the server is about to stop."""
        return Response(status_code=503 if self.service.draining else 200)

    async def version(self) -> dict[str, str]:
        """The version of foredraft."""
        return {"version": __version__}

    def _renderer(self, prefix: str, body: Generation, job: Job) -> Renderer:
        tokenizer = self.service.generator.tokenizer
        return Renderer(prefix, self._names[0], job, tokenizer, return_token_ids=body.return_token_ids)

    async def _job(self, body: Any, convert: Callable[[Any], Job]) -> Job:
        """The job of a body. Long prompts take a while to encode, so this runs in a thread."""
        if body.model is not None and body.model not in self._names:
            known = ", ".join(self._names)
            raise ApiError(404, f"There is no model {body.model!r} here. Known: {known}.", param="model")
        return await asyncio.get_running_loop().run_in_executor(self._pool, convert, body)

    async def _whole(self, request: Request, job: Job, answer: Callable[[Seq[Result]], Answer]) -> Response:
        with self.service.start(job) as outputs:
            return _json(answer(await _unless_gone(request, outputs.results())))

    def _stream(
        self,
        body: Generation,
        job: Job,
        first: Seq[Answer],
        chunk: Callable[[Update], Answer],
        usage: Callable[[Seq[Result]], Answer],
    ) -> Response:
        """Stream a job; it is queued here, so that a refusal has its own status."""
        outputs = self.service.start(job)
        wants_usage = body.stream_options is not None and body.stream_options.include_usage
        lines = _lines(outputs, first, chunk, usage if wants_usage else None)
        return _Stream(outputs, lines)


class _Stream(StreamingResponse):
    """Server-sent events; the outputs are cancelled when the client goes away."""

    def __init__(self, outputs: Outputs, lines: AsyncIterator[str]) -> None:
        super().__init__(lines, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._outputs = outputs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._outputs:
            await super().__call__(scope, receive, send)


async def _lines(
    outputs: Outputs,
    first: Seq[Answer],
    chunk: Callable[[Update], Answer],
    usage: Callable[[Seq[Result]], Answer] | None,
) -> AsyncIterator[str]:
    """The lines of a stream; an error in the middle is one of them."""
    results: dict[int, Result] = {}
    try:
        for answer in first:
            yield _event(answer.json_text())
        async for update in outputs.updates():
            yield _event(chunk(update).json_text())
            if update.result is not None:
                results[update.index] = update.result
        if usage is not None:
            yield _event(usage([results[index] for index in sorted(results)]).json_text())
    except Exception as error:
        yield _event(_failed(error).text())
    yield _event("[DONE]")


def _event(data: str) -> str:
    return f"data: {data}\n\n"


def _json(answer: Answer) -> Response:
    return Response(answer.json_text(), media_type="application/json")


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await ``work``; cancel it if the client goes away.

    Raises:
        ApiError: the client went away.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(408, "The client went away.")
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _failed(error: Exception) -> ApiError:
    """The error for the client; the log keeps the reason of an unexpected one."""
    found = api_error(error)
    if found.status >= 500 and not isinstance(error, ApiError):
        _log.error("A request failed.", exc_info=error)
    return found


async def _on_error(request: Request, error: Exception) -> Response:
    return _failed(error).response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, str(error.detail)).response()


def make_app(generator: Generator, names: Seq[str], options: ServeOptions) -> FastAPI:
    """The ASGI application.

    Args:
        names: of the model in the API; the first one is in the answers.
    """
    api = Api(generator, names, options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        generator.engine.close()

    app = FastAPI(title="foredraft", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = api.service
    app.add_middleware(BodyLimit, limit=options.max_body_bytes)
    app.add_exception_handler(HTTPException, _on_http_error)
    for kind in (RequestValidationError, ApiError, Exception):
        app.add_exception_handler(kind, _on_error)
    streams = {**_ERRORS, 200: _STREAMED}
    app.post("/v1/chat/completions", response_model=ChatCompletion, responses=streams)(api.chat)
    app.post("/v1/completions", response_model=Completion, responses=streams)(api.completion)
    app.get("/v1/models", response_model=ModelList)(api.models)
    app.get("/health", response_class=Response)(api.health)
    app.get("/version")(api.version)
    return app
