"""Body of ``/v1/responses``, under the names of OpenAI. Unknown fields are refused."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticSerializationError, to_json

from foredraft.core.errors import OptionError
from foredraft.serve.schema import Body, List, SamplingFields, Templated, only_text

Forced = Literal["none", "auto", "required"]
LOGPROBS = "message.output_text.logprobs"
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""All but the first name what no answer here has."""
_STORED = {
    "previous_response_id": "send the earlier input and output items in input",
    "conversation": "send the earlier input and output items in input",
    "prompt": "send its text in instructions and input",
    "background": "wait for the answer, or stream it",
}
"""Fields that need a server that stores, and what to do instead."""


class MessagePart(Body):
    """Text of a message, also of one that an earlier answer holds."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        return only_text(given, ("input_text", "output_text"))


class Item(Body):
    """An item of the input. ``id`` and ``status``, which items of earlier answers have, mean nothing here."""

    id: str | None = None
    status: str | None = None


class InputMessage(Item):
    """One turn."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | List[MessagePart]
    phase: str | None = None


class InputCall(Item):
    """A call that the assistant made; ``arguments`` is JSON."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = "{}"


class InputResult(Item):
    """What a called function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | List[MessagePart]


class ReasoningPart(Body):
    """Text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class InputReasoning(Item):
    """What the assistant thought; ``summary`` and ``encrypted_content`` mean nothing here."""

    type: Literal["reasoning"]
    content: List[ReasoningPart] | None = None
    summary: list[Any] | None = None
    encrypted_content: str | None = None


def _kind(item: Any) -> str:
    return str(item.get("type") or "message") if isinstance(item, dict) else str(getattr(item, "type", ""))


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputResult, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="unknown_item",
        custom_error_message="An item is a message, a reasoning, a function_call or a function_call_output, and "
        "nothing is stored",
    ),
]


class TextFormat(Body):
    """What the text must be: anything, a JSON object, or one of a schema. ``strict`` changes nothing."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "TextFormat":
        if self.type == "json_schema" and self.schema_ is None:
            raise OptionError("A format of type json_schema needs schema.")
        return self


class TextOptions(Body):
    """``verbosity`` has no effect."""

    format: TextFormat | None = None
    verbosity: str | None = None


class FunctionTool(Body):
    """A function that the assistant may call; ``parameters`` is a JSON schema, which ``strict: true`` enforces."""

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ForcedFunction(Body):
    """The function that the assistant must call."""

    type: Literal["function"]
    name: str


class ResponseStreamOptions(Body):
    """Nothing is obfuscated, whatever is asked."""

    include_obfuscation: bool | None = None


class ResponsesRequest(SamplingFields, Templated):
    """Body of ``/v1/responses``. ``reasoning`` and ``max_tool_calls`` have no effect: there is none of either."""

    input: str | Annotated[List[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**63)
    text: TextOptions | None = None
    tools: List[FunctionTool] | None = None
    tool_choice: Forced | ForcedFunction | None = None
    parallel_tool_calls: bool = True
    include: List[Included] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    reasoning: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    background: bool = False
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    @model_validator(mode="after")
    def _needs_no_storage(self) -> "ResponsesRequest":
        for name, remedy in _STORED.items():
            if getattr(self, name) not in (None, False):
                raise OptionError(f"This server stores nothing: instead of {name}, {remedy}.")
        return self

    @model_validator(mode="after")
    def _can_be_repeated(self) -> "ResponsesRequest":
        """Their schemas hold anything, and the answer repeats them."""
        try:
            to_json([[self.tools, self.text]])  # two levels, as in an event
        except PydanticSerializationError:
            raise OptionError("tools or text is not valid Unicode, or nested too deep.") from None
        return self
