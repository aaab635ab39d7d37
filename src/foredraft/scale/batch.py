"""Offline batches in the format of OpenAI's Batch API: a file of requests becomes a file of answers."""

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from foredraft.core.errors import OptionError
from foredraft.core.rng import derived_seed
from foredraft.engine.generator import Generator
from foredraft.engine.request import Sequence
from foredraft.engine.results import Result
from foredraft.serve.answers import ChatCompletion, Completion
from foredraft.serve.convert import Converter
from foredraft.serve.errors import ApiError, api_error, validated
from foredraft.serve.render import Renderer
from foredraft.serve.schema import ChatRequest, CompletionRequest

_KINDS: dict[str, tuple[type[ChatRequest] | type[CompletionRequest], str]] = {
    "/v1/chat/completions": (ChatRequest, "chatcmpl"),
    "/v1/completions": (CompletionRequest, "cmpl"),
}
Report = Callable[[int, int], object]
"""Called after each answer with the numbers of answers and of failed ones so far, those of earlier runs included."""


@dataclass(slots=True)
class _Entry:
    """A request in flight, or the error that it ended with at once."""

    number: int
    custom_id: str | None
    answer: Callable[[list[Result]], ChatCompletion | Completion] | None = None
    sequences: tuple[Sequence, ...] = ()
    error: ApiError | None = None

    @property
    def done(self) -> bool:
        return all(sequence.finished for sequence in self.sequences)


class BatchRun:
    """Answers the requests of ``source`` in ``out``, in their order; continues an interrupted run.

    An answer is written when it and all before it are complete. Whatever interrupts a run, ``out`` then holds the first
    answers of the undisturbed one, perhaps with half a line, which the next run removes.

    A request without a seed gets one from ``seed`` and its number, ids come from numbers, and ``created`` is the time
    of the source file. So a run repeated with the same generator gives the same file, if a seed gives the same output
    (drafts that are picked; see ``Generator.submit``).

    Args:
        name: of the model, for bodies and answers.
        default_max_tokens: of chats that give none.

    Raises:
        OptionError: a file cannot be read or written, or ``out`` holds answers to other requests.
    """

    def __init__(
        self, generator: Generator, name: str, source: Path, out: Path, *, seed: int = 0, default_max_tokens: int = 1024
    ) -> None:
        self._generator = generator
        self._converter = Converter(generator, default_max_tokens)
        self._name, self._seed = name, seed
        self._source, self._out = source, out
        try:
            self._created = int(source.stat().st_mtime)
            self.total = sum(1 for _ in self._lines())
        except OSError as error:
            raise OptionError(f"Cannot read {source}: {error.strerror}.") from None
        self.done, self.failed = self._resume()

    def run(self, report: Report | None = None) -> None:
        """Answer all requests that have no answer yet.

        Raises:
            OSError: an answer cannot be written; those before it are in the file.
        """
        pending: deque[_Entry] = deque()
        waiting = self._requests()
        try:
            with self._out.open("ab") as file:
                while self.done < self.total:
                    self._fill(pending, waiting)
                    if pending[0].done:
                        self._write(file, pending.popleft())
                        if report is not None:
                            report(self.done, self.failed)
                    else:
                        self._generator.engine.contained_step()
        finally:
            self._generator.engine.cancel([sequence for entry in pending for sequence in entry.sequences])

    def _fill(self, pending: deque[_Entry], waiting: Iterator[tuple[int, bytes]]) -> None:
        """Queue requests until as many outputs run or wait as two batches hold."""
        most = 2 * self._generator.engine.max_rows
        while sum(not sequence.finished for entry in pending for sequence in entry.sequences) < most:
            number, line = next(waiting, (-1, b""))
            if number < 0:
                return
            pending.append(self._start(number, line))
            if len(pending) >= 4 * most:  # the first one is long: answers behind it are held in memory
                return

    def _lines(self) -> Iterator[bytes]:
        """The lines of the source that are not blank."""
        with self._source.open("rb") as file:
            yield from (line for line in file if line.strip())

    def _requests(self) -> Iterator[tuple[int, bytes]]:
        """The requests without an answer, with their numbers."""
        for number, line in enumerate(self._lines()):
            if number >= self.done:
                yield number, line

    def _start(self, number: int, line: bytes) -> _Entry:
        entry = _Entry(number, None)
        try:
            request = _parsed(line)
            entry.custom_id = request["custom_id"]
            body, prefix = self._body(request)
            chat = isinstance(body, ChatRequest)
            job = self._converter.chat(body) if chat else self._converter.completion(body)
            if job.params.seed is None:
                job = replace(job, params=replace(job.params, seed=derived_seed(self._seed, number)))
            tokenizer = self._generator.tokenizer
            renderer = Renderer(
                f"{prefix}-{uuid4().hex}", self._name, job, tokenizer, return_token_ids=body.return_token_ids
            )
            entry.answer = renderer.chat if chat else renderer.completion
            if job.scored is not None:
                renderer.scored([self._generator.score(prompt, job.scored) for prompt in job.prompts])
            entry.sequences = tuple(job.start(self._generator))
        except Exception as error:
            entry.error = api_error(error)
        return entry

    def _body(self, request: dict[str, Any]) -> tuple[ChatRequest | CompletionRequest, str]:
        url = request.get("url")
        if url not in _KINDS:
            raise ApiError(400, f"url must be one of {', '.join(_KINDS)}, not {url!r}.", param="url")
        kind, prefix = _KINDS[url]
        body = validated(kind, request.get("body"))
        if body.stream:
            raise ApiError(400, "A batch does not stream.", param="stream")
        if body.model is not None and body.model != self._name:
            raise ApiError(404, f"There is no model {body.model!r} here. Known: {self._name}.", param="model")
        return body, prefix

    def _write(self, file: BinaryIO, entry: _Entry) -> None:
        """Append the answer of a request that has ended."""
        status, body = self._answer(entry)
        identity = f"batch_req_{entry.number}"
        response = {"status_code": status, "request_id": identity, "body": body}
        line = {"id": identity, "custom_id": entry.custom_id, "response": response, "error": None}
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        self.done += 1
        self.failed += status != 200

    def _answer(self, entry: _Entry) -> tuple[int, dict[str, Any]]:
        failed = next((sequence.error for sequence in entry.sequences if sequence.error is not None), None)
        error = entry.error or (None if failed is None else api_error(failed))
        if error is not None or entry.answer is None:
            found = error or ApiError(500, "The request was not run.")
            return found.status, json.loads(found.text())
        answer = entry.answer([self._generator.result_of(sequence) for sequence in entry.sequences])
        answer.id, answer.created = f"{answer.id.partition('-')[0]}-{entry.number}", self._created
        # acceptance depends on the policy, hence on clocks
        return 200, json.loads(answer.model_dump_json(exclude_unset=True, exclude={"metrics"}))

    def _resume(self) -> tuple[int, int]:
        """The numbers of answers and of failed ones in ``out``; half a line at its end is removed."""
        if not self._out.exists():
            return 0, 0
        done = failed = size = 0
        asked = self._lines()
        try:
            with self._out.open("rb") as file:
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    answer, request = _answered(line), next(asked, None)
                    if answer is None or request is None or answer["custom_id"] != _custom_id(request):
                        raise OptionError(
                            f"{self._out} holds something else than answers to these requests: choose another file."
                        )
                    failed += answer["response"]["status_code"] != 200
                    done, size = done + 1, size + len(line)
            with self._out.open("r+b") as file:
                file.truncate(size)
        except OSError as error:
            raise OptionError(f"Cannot read {self._out}: {error.strerror}.") from None
        return done, failed


def _parsed(line: bytes) -> dict[str, Any]:
    """A request.

    Raises:
        ApiError: it is not a JSON object with a ``custom_id``.
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise ApiError(400, "The line is not valid JSON.") from None
    if not isinstance(found, dict) or not isinstance(found.get("custom_id"), str):
        raise ApiError(400, "A request is a JSON object with custom_id, method, url and body.", param="custom_id")
    return found


def _custom_id(line: bytes) -> str | None:
    try:
        return _parsed(line)["custom_id"]
    except ApiError:
        return None


def _answered(line: bytes) -> dict[str, Any] | None:
    """An answer; None if the line is something else."""
    try:
        found = json.loads(line)
        return found if found.keys() >= {"custom_id", "response"} else None
    except (ValueError, RecursionError, AttributeError):
        return None
