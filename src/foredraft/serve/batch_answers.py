"""Answers to the requests of an offline batch, by one generator."""

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from foredraft.core.rng import derived_seed
from foredraft.engine.generator import Generator
from foredraft.engine.request import Sequence
from foredraft.serve.errors import ApiError, api_error, validated
from foredraft.serve.job import Job
from foredraft.serve.render import ChatRenderer, CompletionRenderer, Renderer
from foredraft.serve.responses.render import ResponseRenderer, repeated
from foredraft.serve.responses.schema import ResponsesRequest
from foredraft.serve.schema import ChatRequest, CompletionRequest
from foredraft.serve.service import converter_for, queued, requests_of

Body = ChatRequest | CompletionRequest | ResponsesRequest
_KINDS: dict[str, type[ChatRequest] | type[CompletionRequest] | type[ResponsesRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
}
Numbered = tuple[int, bytes]
"""A request's number in its file, and its line."""


class Answered(NamedTuple):
    """The line of an answer, and whether it is an error."""

    line: bytes
    failed: bool


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What all answers of a batch have in common.

    Args:
        name: of the model, for bodies and answers.
        created: time of the answers, in seconds.
        seed: a request without a seed gets one from it and its number.
        default_max_tokens: of chats that give none.
        run: what the answers depend on; each line names it, so that a file is continued by the same run alone.
    """

    name: str
    created: int
    seed: int = 0
    default_max_tokens: int = 1024
    run: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Entry:
    """A request in flight, or the error that it ended with at once."""

    number: int
    custom_id: str | None
    renderer: Renderer | None = None
    sequences: tuple[Sequence, ...] = ()
    error: ApiError | None = None

    @property
    def done(self) -> bool:
        return all(sequence.finished for sequence in self.sequences)


class BatchAnswers:
    """Answers requests by a generator that nothing else uses until they are answered.

    Ids come from numbers. So the same requests get the same lines, in whatever company, if a seed gives the same output
    (drafts that are picked; see ``Generator.submit``).
    """

    def __init__(self, generator: Generator, options: BatchOptions) -> None:
        self._generator = generator
        self._converter = converter_for(generator, options.default_max_tokens)
        self._options = options

    def of(self, requests: Iterable[Numbered]) -> Iterator[Answered]:
        """Answer requests, in their order. Closing the iterator cancels those in flight."""
        pending: deque[_Entry] = deque()
        waiting = iter(requests)
        try:
            while True:
                self._fill(pending, waiting)
                if not pending:
                    return
                if pending[0].done:
                    yield self._line(pending.popleft())
                else:
                    self._generator.engine.contained_step()
        finally:
            self._generator.engine.cancel([sequence for entry in pending for sequence in entry.sequences])

    def _fill(self, pending: deque[_Entry], waiting: Iterator[Numbered]) -> None:
        """Queue requests until as many outputs run or wait as two batches hold."""
        most = 2 * self._generator.engine.max_rows
        while sum(not sequence.finished for entry in pending for sequence in entry.sequences) < most:
            number, line = next(waiting, (-1, b""))
            if number < 0:
                return
            pending.append(self._start(number, line))
            if len(pending) >= 4 * most:  # the first one is long: answers behind it are held in memory
                return

    def _start(self, number: int, line: bytes) -> _Entry:
        entry = _Entry(number, None)
        try:
            request = parsed(line)
            entry.custom_id = request["custom_id"]
            entry.renderer = renderer = self._renderer(number, self._body(request))
            job = renderer.job
            if isinstance(renderer, CompletionRenderer) and job.scored is not None:
                renderer.scores = [self._generator.score(prompt, job.scored) for prompt in job.prompts]
            entry.sequences = tuple(queued(job, requests_of(job, self._generator), self._generator))
        except Exception as error:
            entry.error = api_error(error)
        return entry

    def _renderer(self, number: int, body: Body) -> Renderer:
        """The job of a request, with a seed, and how it is answered."""
        job = self._job(body)
        if job.params.seed is None:
            job = replace(job, params=replace(job.params, seed=derived_seed(self._options.seed, number)))
        common = (str(number), self._options.name, job, self._generator.tokenizer, self._options.created)
        if isinstance(body, ResponsesRequest):
            return ResponseRenderer(*common, repeated=repeated(body))
        kind = ChatRenderer if isinstance(body, ChatRequest) else CompletionRenderer
        return kind(*common, body.return_token_ids)

    def _job(self, body: Body) -> Job:
        if isinstance(body, ResponsesRequest):
            return self._converter.response(body)
        return self._converter.chat(body) if isinstance(body, ChatRequest) else self._converter.completion(body)

    def _body(self, request: dict[str, Any]) -> Body:
        url = request.get("url")
        if url not in _KINDS:
            raise ApiError(400, f"url must be one of {', '.join(_KINDS)}, not {url!r}.", param="url")
        body = validated(_KINDS[url], request.get("body"))
        if body.stream:
            raise ApiError(400, "A batch does not stream.", param="stream")
        if body.model is not None and body.model != self._options.name:
            raise ApiError(404, f"There is no model {body.model!r} here. Known: {self._options.name}.", param="model")
        return body

    def _line(self, entry: _Entry) -> Answered:
        """The line of a request that has ended."""
        status, body = self._answer(entry)
        begin = begin_of_line(entry.number, self._options.run, entry.custom_id)
        response = {"status_code": status, "request_id": begin["id"], "body": body}
        line = {**begin, "response": response, "error": None}
        return Answered(json.dumps(line).encode() + b"\n", status != 200)

    def _answer(self, entry: _Entry) -> tuple[int, dict[str, Any]]:
        failed = next((sequence.error for sequence in entry.sequences if sequence.error is not None), None)
        error = entry.error or (None if failed is None else api_error(failed))
        if error is not None or entry.renderer is None:
            found = error or ApiError(500, "The request was not run.")
            return found.status, json.loads(found.text())
        answer = entry.renderer.whole([self._generator.result_of(sequence) for sequence in entry.sequences])
        body = json.loads(answer.json_text())
        body.pop("metrics", None)  # acceptance depends on the policy, and so on clocks
        return 200, body


def begin_of_line(number: int, run: Mapping[str, Any], custom_id: str | None) -> dict[str, Any]:
    """The first fields of an answer's line: what is known of it before it is made."""
    return {"id": f"batch_req_{number}", **({"foredraft": dict(run)} if run else {}), "custom_id": custom_id}


def parsed(line: bytes) -> dict[str, Any]:
    """A request. Raises ``ApiError``: it is not a JSON object with a ``custom_id``."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise ApiError(400, "The line is not valid JSON.") from None
    if not isinstance(found, dict) or not isinstance(found.get("custom_id"), str):
        raise ApiError(400, "A request is a JSON object with custom_id, method, url and body.", param="custom_id")
    return found
