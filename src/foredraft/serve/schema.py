"""Bodies of requests, under the names of OpenAI and vLLM. Unknown fields are refused."""

from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from foredraft.core.errors import OptionError, shown
from foredraft.core.sampling.params import check_known
from foredraft.model.text.tokenizer import ChatEnding

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""Numbers are bounded here by their types alone; their ranges are those of ``SamplingParams``."""
T = TypeVar("T")
List = Annotated[list[T], Field(fail_fast=True)]
"""A list that is refused at its first wrong entry, not after thousands of them."""


def _in_parts(given: Any, check: ValidatorFunctionWrapHandler) -> Any:
    if not isinstance(given, dict):
        return check(given)
    found: dict[Any, Any] = {}
    entries = iter(given.items())
    while part := dict(islice(entries, 100)):
        found |= check(part)
    return found


K = TypeVar("K")
Dict = Annotated[dict[K, T], WrapValidator(_in_parts)]
"""A dictionary that is refused at the wrong ones of a hundred entries; a body has room for hundreds of thousands."""
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class Body(BaseModel):
    """Part of a request. A null field counts as one that is not there."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        """Refuse unknown names in one sentence that lists the known ones."""
        if isinstance(given, dict):
            given = {name: value for name, value in given.items() if value is not None}
            check_known("field", given, [field.alias or name for name, field in cls.model_fields.items()])
        return given


def only_text(part: Any, known: Sequence[str]) -> Any:
    """A part of a message, unless it is of a type that other servers read.

    Raises:
        OptionError: it is an image, for example.
    """
    if isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind not in known:
        raise OptionError(f"Only text is supported, not {shown(kind)}.")
    return part


class StreamOptions(Body):
    """``include_usage``: a last chunk without choices carries the usage. Nothing is obfuscated, whatever is asked."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class TextPart(Body):
    """A part of a message; only text is supported."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        return only_text(given, ("text",))


class PredictedOutput(Body):
    """A text that the output may repeat; it is drafted from."""

    type: Literal["content"]
    content: str | List[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class SpeculativeOptions(Body):
    """Drafts of one request: paths of at most ``num_assistant_tokens`` tokens."""

    num_assistant_tokens: int = Field(ge=0, lt=2**63)


class NamedSchema(Body):
    """A JSON schema with a name. ``strict`` changes nothing: every answer is valid."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's way to ask for JSON: any object, or one of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Body):
    """vLLM's way to constrain an output; exactly one is given. ``json``: a schema or its text. ``grammar``: GBNF."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: List[str] | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None
    structural_tag: dict[str, Any] | None = None


class Ignored(Body):
    """Fields of OpenAI's interface that have no effect here: nothing is stored, and there is one class of service."""

    user: str | None = None
    store: bool | None = None
    metadata: Dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None


class SamplingFields(Ignored):
    """What all requests have that generate.

    ``stop_token_ids`` end an output besides the model's own end-of-sequence ids, which ``ignore_eos`` turns off.
    """

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    eta_alpha: float | None = None
    presence_penalty: float | None = Field(None, ge=-100, le=100)
    frequency_penalty: float | None = Field(None, ge=-100, le=100)
    repetition_penalty: float | None = None
    no_repeat_ngram_size: Int64 | None = None
    bad_words_ids: List[List[TokenId]] | None = None
    logit_bias: Dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Int64 | None = None
    stop: str | List[str] | None = None
    stop_token_ids: List[TokenId] | None = None
    min_tokens: Int64 | None = None
    ignore_eos: bool = False
    stream: bool = False
    prediction: PredictedOutput | None = None
    speculative: bool | SpeculativeOptions = True
    structured_outputs: StructuredOutputs | None = None
    priority: Int64 = 0


class Generation(SamplingFields):
    """What chats and completions have in common."""

    max_tokens: int | None = Field(None, ge=1, lt=2**63)
    n: int = Field(1, ge=1, lt=2**31)
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_steps: bool = False
    response_format: ResponseFormat | None = None

    @property
    def wants_usage(self) -> bool:
        """The last chunk of the stream says what was used."""
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _streams(self) -> "Generation":
        if self.stream_options is not None and not self.stream:
            raise OptionError("stream_options needs stream: true.")
        return self


class CompletionRequest(Generation):
    """Body of ``/v1/completions``. ``prompt``: text, token ids, or a list of either.

    With ``echo`` and ``logprobs`` the prompt's tokens are scored; ``max_tokens`` 0 generates nothing.
    """

    max_tokens: int | None = Field(None, ge=0, lt=2**63)
    prompt: str | List[str] | List[TokenId] | List[List[TokenId]]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _has_output(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise OptionError("max_tokens: 0 needs echo: true.")
        return self


class FunctionCall(Body):
    """A call that the assistant made earlier; ``arguments`` is JSON, by default an empty object."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Body):
    """A tool call of an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    """One turn. ``reasoning``: vLLM's name for ``reasoning_content``, what the assistant thought before it answered.

    The last four are in OpenAI's answers, so they come back with a history; they must be empty.
    """

    role: Role
    content: str | List[TextPart] | None = None
    name: str | None = None
    tool_calls: List[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = Field(None, exclude=True)
    audio: None = Field(None, exclude=True)
    function_call: None = Field(None, exclude=True)
    annotations: List[Any] | None = Field(None, max_length=0, exclude=True)


class Function(Body):
    """A function that the assistant may call; ``parameters`` is a JSON schema, which ``strict`` enforces."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the assistant may use."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """A function of the request's tools."""

    name: str


class NamedTool(Body):
    """The tool that the assistant must call."""

    type: Literal["function"]
    function: FunctionName


class Templated(Body):
    """How a chat becomes a prompt.

    ``add_generation_prompt``: end with what begins the assistant's turn; by default, unless ``continue_final_message``
    leaves the last message open, so that the output continues it. ``chat_template_kwargs``: further variables of the
    template. ``split_special_tokens``: special tokens in what others than the assistant write are text.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    split_special_tokens: bool = True

    @property
    def ending(self) -> ChatEnding:
        """Where the prompt ends."""
        if self.continue_final_message:
            return "open"
        return "closed" if self.add_generation_prompt is False else "answer"

    @model_validator(mode="after")
    def _one_end(self) -> "Templated":
        if self.add_generation_prompt and self.continue_final_message:
            raise OptionError("Give either add_generation_prompt or continue_final_message.")
        return self


class IgnoredInChats(Ignored):
    """Fields of chats that have no effect; every answer is text."""

    modalities: List[Literal["text"]] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None


class ChatRequest(IgnoredInChats, Generation, Templated):
    """Body of ``/v1/chat/completions``."""

    messages: List[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**63)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: List[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True

    @property
    def called(self) -> list[Tool]:
        """The tools that the assistant may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def must_call(self) -> bool:
        """Whether the assistant must call one of them."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @model_validator(mode="after")
    def _alternatives(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise OptionError("top_logprobs needs logprobs: true.")
        return self


class TokenizeRequest(Templated):
    """Body of ``/tokenize``: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: List[ChatMessage] | None = None
    tools: List[Tool] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise OptionError("Give either prompt or messages.")
        return self


class DetokenizeRequest(Body):
    """Body of ``/detokenize``."""

    model: str | None = None
    tokens: List[TokenId]
