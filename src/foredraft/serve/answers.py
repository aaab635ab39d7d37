"""Bodies of answers, in OpenAI's shape; what vLLM adds has vLLM's names. Fields that were not set are left out."""

import json
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """Part of an answer."""

    model_config = ConfigDict(protected_namespaces=(), json_schema_serialization_defaults_required=False)

    def json_text(self) -> str:
        """JSON of the fields that were set."""
        try:
            return self.model_dump_json(exclude_unset=True)
        except ValueError:  # it repeats text of the client's that is not valid Unicode
            return json.dumps(self.model_dump(exclude_unset=True))


class Speculation(Answer):
    """Acceptance of one request, in vLLM's shape.

    ``acceptance_histogram``: entry i counts the steps that accepted i drafted tokens.
    ``mean_acceptance_length``: emitted tokens per target forward, bonus included.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    acceptance_rate_by_position: list[float]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    method: str
    lossless: bool


class RequestMetrics(Answer):
    """Measurements of one request."""

    speculative_decoding: Speculation


class CompletionDetails(Answer):
    """Tokens that were copied from the request's ``prediction``, by verdict; the rejected ones are in no output.

    ``reasoning_tokens``: of chats, those of the assistant's reasoning.
    """

    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class PromptDetails(Answer):
    """``cached_tokens``: tokens of the prompt that were not read again, because an earlier prompt began alike."""

    cached_tokens: int


class Usage(Answer):
    """Token counts of all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TopLogprob(Answer):
    """A token with its log-probability under the model, before temperature and truncation."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """An emitted token and its likeliest alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """Log-probabilities of a chat's choice."""

    content: list[TokenLogprob]


class CompletionLogprobs(Answer):
    """Log-probabilities of a completion's choice, in lists by token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CalledFunction(Answer):
    """The function that the assistant calls; ``arguments`` is JSON."""

    name: str
    arguments: str


class CalledTool(Answer):
    """A call by the assistant; in a stream it comes whole, and has its ``index``."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Answer):
    """The assistant's answer, and its reasoning if there is any."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None


class Delta(Answer):
    """New parts of the assistant's answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None


class DraftedPiece(Answer):
    """Text of a choice, its number of tokens, and the drafter that proposed it, or "target"."""

    text: str
    by: Literal["target", "drafter", "prediction"]
    tokens: int


class StepDetails(Answer):
    """One step of a choice: its draft tree, the accepted path and what was emitted; see ``StepTrace``."""

    tokens: list[int]
    texts: list[str]
    parents: list[int]
    path: list[int]
    emitted: list[int]
    emitted_texts: list[str]
    by: Literal["drafter", "prediction"]
    draft_seconds: float
    seconds: float
    rows: int


class AnyChoice(Answer):
    """``stop_reason``: the stop string or the id among ``stop_token_ids`` that ended the choice.

    ``pieces``, ``steps``: with ``return_steps``, what is new of both.
    """

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    pieces: list[DraftedPiece] | None = None
    steps: list[StepDetails] | None = None


class ChatChoice(AnyChoice):
    """One output of a chat."""

    message: Message
    logprobs: ChatLogprobs | None


class ChatChunkChoice(AnyChoice):
    """An update of one output of a chat."""

    delta: Delta
    logprobs: ChatLogprobs | None


class CompletionChoice(AnyChoice):
    """One output of a completion, or in a stream an update of it."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = None


class AnyAnswer(Answer):
    """What all answers have. ``metrics`` and ``lossless`` (is the output the target's own law?) come with usage."""

    id: str
    created: int
    model: str
    usage: Usage | None = None
    metrics: RequestMetrics | None = None
    lossless: bool | None = None


class ChatCompletion(AnyAnswer):
    """Answer of ``/v1/chat/completions``."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None


class ChatChunk(AnyAnswer):
    """A line of a chat's stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class Completion(AnyAnswer):
    """Answer of ``/v1/completions``, and a line of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class Tokens(Answer):
    """Answer of ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(Answer):
    """Answer of ``/detokenize``."""

    prompt: str


class ModelCard(Answer):
    """A name of the served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["foredraft"] = "foredraft"
    max_model_len: int


class ModelList(Answer):
    """Answer of ``/v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Live(Answer):
    """What the server does now: requests in the batch and in the queue."""

    model: str
    drafter: str
    lossless: bool
    chat: bool
    running: int
    waiting: int
    max_rows: int


class ErrorFields(Answer):
    """Why a request failed; ``code`` is the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int = Field(ge=400, le=599)


class ErrorAnswer(Answer):
    """Body of every failed request, and the last line but one of a stream that fails."""

    error: ErrorFields
