"""Answers and events of ``/v1/responses``, in OpenAI's shape."""

from typing import Any, Literal

from pydantic import Field, PrivateAttr

from foredraft.serve.answers import Answer, RequestMetrics, TokenLogprob

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Answer):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[str] = Field(max_length=0)
    logprobs: list[TokenLogprob]


class OutputMessage(Answer):
    """What the assistant says."""

    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class OutputCall(Answer):
    """A call by the assistant; ``arguments`` is JSON. Its result names it by ``call_id``."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


class ReasoningText(Answer):
    """The text of reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(Answer):
    """What the assistant thought before it answered."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[str] = Field(max_length=0)
    content: list[ReasoningText]
    status: Status


Item = OutputReasoning | OutputMessage | OutputCall
Output = list[Item]


class InputDetails(Answer):
    """``cached_tokens``: tokens of the input that were not read again, because an earlier input began alike."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Answer):
    """``accepted_prediction_tokens``, ``rejected_prediction_tokens``: as in chats."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class ResponseUsage(Answer):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Failure(Answer):
    """Why a response failed after it had begun."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class Incomplete(Answer):
    """Why a response ended before its end."""

    reason: Literal["max_output_tokens"]


class Response(Answer):
    """Answer of ``/v1/responses``, and the state of one in its stream.

    ``metrics`` and ``lossless`` (is the output the target's own law?) come with usage. Fields that repeat the body have
    no values but are one text in JSON, which ``repeating`` takes: a body may be large, and a stream has it three times.
    """

    _repeated: str = PrivateAttr("")

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    error: Failure | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: Output
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, None]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    metrics: RequestMetrics | None = None
    lossless: bool | None = None

    @classmethod
    def repeating(cls, repeated: str, **fields: Any) -> "Response":
        """Make one of what the body does not say, and of what it does (the inside of an object)."""
        made = cls.model_construct(**fields)
        made._repeated = repeated
        return made

    def json_text(self) -> str:
        return self.completed(super().json_text(), "}")

    def completed(self, text: str, end: str) -> str:
        """A text in JSON that ends with this response, whose end is ``end``, with what repeats the body."""
        return f"{text.removesuffix(end)}, {self._repeated}{end}"


class Event(Answer):
    """A line of a stream."""

    type: str
    sequence_number: int


class ResponseEvent(Event):
    """A change of the whole response."""

    response: Response

    def json_text(self) -> str:
        return self.response.completed(super().json_text(), "}}")


class ItemEvent(Event):
    """An item begins or ends."""

    output_index: int
    item: Item


class PartEvent(Event):
    """The text of a message, or of reasoning, begins or ends."""

    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class ReasoningEvent(Event):
    """New text of reasoning (``delta``), or all of it (``text``)."""

    item_id: str
    output_index: int
    content_index: int
    delta: str | None = None
    text: str | None = None


class TextEvent(Event):
    """New text of a message (``delta``), or all of it (``text``)."""

    item_id: str
    output_index: int
    content_index: int
    delta: str | None = None
    text: str | None = None
    logprobs: list[TokenLogprob]


class ArgumentsEvent(Event):
    """Arguments of a call: they come whole (``delta``), and so does their end (``arguments``)."""

    item_id: str
    output_index: int
    delta: str | None = None
    name: str | None = None
    arguments: str | None = None
