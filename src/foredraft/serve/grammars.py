"""Grammars of requests, from OpenAI's ``response_format`` and tools and vLLM's ``structured_outputs``."""

import json
from typing import Any

from foredraft.core.errors import OptionError
from foredraft.core.sampling.grammar import Grammar
from foredraft.model.text.json_schema import schema_rules
from foredraft.serve.errors import ApiError
from foredraft.serve.schema import ChatRequest, Function, Generation, NamedTool, ResponseFormat, StructuredOutputs
from foredraft.serve.tools import CLOSE, LIST, OPEN, mark_of


def grammar_of(body: Generation) -> Grammar | None:
    """What the outputs of a request must match; None for anything.

    Raises:
        OptionError: it is not a grammar.
        ApiError: the request asks for two.
    """
    formatted = None if body.response_format is None else _formatted(body.response_format)
    structured = None if body.structured_outputs is None else _structured(body.structured_outputs)
    if formatted is not None and structured is not None:
        raise ApiError(400, "Give either response_format or structured_outputs.", param="structured_outputs")
    return formatted or structured


def _formatted(wanted: ResponseFormat) -> Grammar | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar.json_schema({"type": "object"})
    if wanted.json_schema is None:
        raise ApiError(400, "response_format json_schema needs json_schema.", param="response_format")
    return Grammar.json_schema(wanted.json_schema.schema_)


def _structured(wanted: StructuredOutputs) -> Grammar:
    given = wanted.model_dump(exclude_none=True)
    if len(given) != 1:
        known = "json, regex, choice, grammar, json_object, structural_tag"
        raise ApiError(400, f"structured_outputs needs exactly one of {known}.", param="structured_outputs")
    if wanted.regex is not None:
        return Grammar.regex(wanted.regex)
    if wanted.choice is not None:
        return Grammar.choice(wanted.choice)
    if wanted.grammar is not None:
        return Grammar.ebnf(wanted.grammar)
    if wanted.structural_tag is not None:
        return Grammar.structural_tag(wanted.structural_tag)
    return Grammar.json_schema({"type": "object"} if wanted.json_ is None else wanted.json_)


def chat_grammar(body: ChatRequest, chat_template: str) -> Grammar | None:
    """What the outputs of a chat must match, tool calls included.

    Args:
        chat_template: decides how calls look; see ``ToolParser``.

    Raises:
        OptionError: it is not a grammar.
        ApiError: the request asks for two, or for a tool that it does not have.
    """
    wanted, choice = grammar_of(body), body.tool_choice
    functions = [tool.function for tool in body.called]
    if isinstance(choice, NamedTool):
        functions = [function for function in functions if function.name == choice.function.name]
    if body.must_call and not functions:
        raise ApiError(400, "tool_choice asks for a call of a tool that is not in tools.", param="tool_choice")
    if not body.must_call and not any(function.strict for function in functions):
        return wanted
    if wanted is not None:
        raise ApiError(400, "Give either calls that are enforced or another structure.", param="tools")
    one = isinstance(choice, NamedTool) or not body.parallel_tool_calls
    return _calls(functions, mark=mark_of(chat_template), must=body.must_call, one=one)


def _calls(functions: list[Function], *, mark: str, must: bool, one: bool) -> Grammar:
    """Calls of these functions; unless they must be, text with or without calls.

    Args:
        mark: see ``mark_of``. ``LIST`` is a special token, which no grammar allows: the list comes without it.
    """
    tagged, listed = mark == OPEN, mark == LIST
    begin, end = (f"{OPEN}\n", f"\n{CLOSE}") if tagged else ("", "")
    key = "arguments" if mark else "parameters"
    tags = [
        {
            "type": "tag",
            "begin": f'{begin}{{"name": {json.dumps(function.name, ensure_ascii=False)}, "{key}": ',
            "content": {"type": "json_schema", "json_schema": _parameters(function)},
            "end": f"}}{end}",
        }
        for function in functions
    ]
    calls: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "\n" if tagged else ", " if listed else "; ",
        "at_least_one": True,
        "stop_after_first": one,
    }
    if listed:
        ends = [{"type": "const_string", "value": bracket} for bracket in "[]"]
        calls = {"type": "sequence", "elements": [ends[0], calls, ends[1]]}
    if not must and tagged:
        calls = {"type": "triggered_tags", "triggers": [OPEN], "tags": tags, "stop_after_first": one}
    elif not must:  # an output that begins with a brace, or a bracket and a brace, is a call
        calls = {"type": "or", "elements": [calls, {"type": "regex", "pattern": r"\s*([^{\[\s]|\[\s*[^{\s])[\s\S]*"}]}
    return Grammar.structural_tag({"type": "structural_tag", "format": calls})


def _parameters(function: Function) -> Any:
    """The schema of a function's arguments; any object if it is not strict and its own cannot be enforced."""
    given = function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
    if function.strict:
        return given
    try:
        schema_rules(given)
    except OptionError:
        return {"type": "object"}
    return given
