"""The chat that a body of ``/v1/responses`` stands for."""

from collections.abc import Sequence as Seq
from typing import Any

from foredraft.serve.errors import validated
from foredraft.serve.responses.schema import (
    ForcedFunction,
    FunctionTool,
    InputCall,
    InputItem,
    InputMessage,
    InputReasoning,
    MessagePart,
    ResponsesRequest,
    TextFormat,
)
from foredraft.serve.schema import ChatRequest, SamplingFields, Templated

_SHARED = (*SamplingFields.model_fields, *Templated.model_fields)


def chat_of(body: ResponsesRequest) -> ChatRequest:
    """The same request as a chat; ``instructions`` are its system message.

    Raises:
        ApiError: chats have no such request.
    """
    chat: dict[str, Any] = {name: getattr(body, name) for name in _SHARED if name in body.model_fields_set}
    chat |= {
        "messages": _messages(body),
        "max_completion_tokens": body.max_output_tokens,
        "tools": [_tool(tool) for tool in body.tools or []] or None,
        "tool_choice": _choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "logprobs": body.wants_logprobs,
        "top_logprobs": body.top_logprobs if body.wants_logprobs else None,
        "response_format": _format(body.text.format) if body.text is not None and body.text.format else None,
    }
    return validated(ChatRequest, chat)


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    items: Seq[InputItem] = (
        body.input if isinstance(body.input, list) else [InputMessage(role="user", content=body.input)]
    )
    found: list[dict[str, Any]] = []
    if body.instructions is not None:
        found.append({"role": "system", "content": body.instructions})
    for item in items:
        _add(found, item)
    return found


def _add(messages: list[dict[str, Any]], item: InputItem) -> None:
    """Add an item: calls belong to the turn of the assistant before them, a first system message to instructions."""
    before: dict[str, Any] = messages[-1] if messages else {"role": None}
    if isinstance(item, InputCall):
        call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
        if before["role"] != "assistant":
            messages.append(before := {"role": "assistant"})
        before.setdefault("tool_calls", []).append(call)
    elif isinstance(item, InputReasoning):
        if thought := "\n".join(part.text for part in item.content or []):
            messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
    elif isinstance(item, InputMessage):
        text = _text(item.content)
        if item.role in ("system", "developer") and before["role"] == "system" and len(messages) == 1:
            before["content"] += f"\n\n{text}"  # many templates take one system message only
        elif item.role == "assistant" and before.get("reasoning_content") and not before["content"]:
            before["content"] = text
        else:
            messages.append({"role": item.role, "content": text})
    else:
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})


def _text(content: str | list[MessagePart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_unset=True)}


def _choice(choice: str | ForcedFunction | None) -> Any:
    return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, ForcedFunction) else choice


def _format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    named = wanted.model_dump(by_alias=True, exclude={"type"}, exclude_unset=True)
    return {"type": wanted.type, "json_schema": named}
