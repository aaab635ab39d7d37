"""From the bytes of a body to what its answer needs. This grows with the body, so it runs beside the event loop."""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from foredraft.core.errors import shown
from foredraft.serve.answers import Text, Tokens
from foredraft.serve.convert import Converter
from foredraft.serve.errors import ApiError, body_of
from foredraft.serve.job import Job
from foredraft.serve.render import ChatRenderer, CompletionRenderer, Renderer
from foredraft.serve.responses.render import ResponseRenderer, repeated
from foredraft.serve.responses.schema import ResponsesRequest
from foredraft.serve.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    SamplingFields,
    TokenizeRequest,
)

B = TypeVar("B", SamplingFields, TokenizeRequest, DetokenizeRequest, ChatRequest, CompletionRequest, ResponsesRequest)


class RequestLabel(NamedTuple):
    """What the answer says of its request: a number, and the time in seconds."""

    number: str
    created: int


class Prepared(NamedTuple):
    """What the answer of a request needs, the tokenizer excepted, and whether it is streamed."""

    renderer: Renderer
    stream: bool


@dataclass(frozen=True, slots=True)
class BodyReader:
    """Reads bodies for one model. A value, which also works in a process without the model.

    All methods raise ``ApiError``, ``OptionError`` or ``PromptError`` for a body that is not valid.

    ``names``: of the model; the first one is in the answers.
    """

    converter: Converter
    names: tuple[str, ...]

    def chat(self, raw: bytes, label: RequestLabel) -> Prepared:
        """Of ``/v1/chat/completions``."""
        body = self._body(ChatRequest, raw)
        job = self.converter.chat(body)
        return Prepared(ChatRenderer(*self._common(label, job), **_shown(body)), body.stream)

    def completion(self, raw: bytes, label: RequestLabel) -> Prepared:
        """Of ``/v1/completions``."""
        body = self._body(CompletionRequest, raw)
        job = self.converter.completion(body)
        return Prepared(CompletionRenderer(*self._common(label, job), **_shown(body)), body.stream)

    def response(self, raw: bytes, label: RequestLabel) -> Prepared:
        """Of ``/v1/responses``."""
        body = self._body(ResponsesRequest, raw)
        job = self.converter.response(body)
        return Prepared(ResponseRenderer(*self._common(label, job), repeated=repeated(body)), body.stream)

    def tokens(self, raw: bytes) -> bytes:
        """The answer of ``/tokenize`` in JSON."""
        body = self._body(TokenizeRequest, raw)
        ids, texts = self.converter.tokens(body)
        more = {} if texts is None else {"token_strs": texts}
        return Tokens(count=len(ids), max_model_len=self.converter.max_length, tokens=ids, **more).json_text().encode()

    def text(self, raw: bytes) -> bytes:
        """The answer of ``/detokenize`` in JSON."""
        return Text(prompt=self.converter.text(self._body(DetokenizeRequest, raw))).json_text().encode()

    def _body(self, kind: type[B], raw: bytes) -> B:
        body = body_of(kind, raw)
        if body.model is not None:
            self.check_name(body.model)
        return body

    def check_name(self, name: str) -> None:
        """Raise an ``ApiError`` if the model has another name."""
        if name not in self.names:
            known = ", ".join(self.names)
            raise ApiError(404, f"There is no model {shown(name)} here. Known: {known}.", param="model")

    def _common(self, label: RequestLabel, job: Job) -> tuple[str, str, Job, None, int]:
        return label.number, self.names[0], job, None, label.created


def _shown(body: Generation) -> dict[str, Any]:
    return {"return_token_ids": body.return_token_ids, "wants_usage": body.wants_usage}
