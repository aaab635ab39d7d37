"""Tools for models whose chat template has none: the server describes them in the messages, as text."""

import json
from collections.abc import Sequence as Seq
from typing import Any

from foredraft.serve.tools import CLOSE, OPEN

TOOL_PROMPT = f"""\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
%s
</tools>

For each function call, return a json object with function name and arguments within {OPEN}{CLOSE} XML tags:
{OPEN}
{{"name": <function-name>, "arguments": <args-json-object>}}
{CLOSE}"""
"""The prompt of Hermes and Qwen 2.5, whose calls ``ToolParser`` reads. %s: the functions, one a line, as JSON."""


def described(messages: Seq[dict[str, Any]], tools: Seq[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation as a template without tools can write it.

    Calls become text of the assistant, and their results turns of the user. ``TOOL_PROMPT`` ends the system message; if
    there is none, which some templates refuse, it begins the first turn of the user.
    """
    found: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        text = _text(message["content"])
        if message["role"] == "tool":
            result = f"<tool_response>\n{text}\n</tool_response>"
            if after_result:  # many templates want the turns to alternate
                result = f"{found.pop()['content']}\n{result}"
            found.append({"role": "user", "content": result})
        elif calls := message.get("tool_calls"):
            written = [text] if text else []
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            found.append({**rest, "content": "\n".join([*written, *map(_call, calls)])})
        else:
            found.append(message)
        after_result = message["role"] == "tool"
    return _with_prompt(found, tools) if tools else found


def _with_prompt(messages: list[dict[str, Any]], tools: Seq[dict[str, Any]]) -> list[dict[str, Any]]:
    prompt = TOOL_PROMPT % "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    for place, message in enumerate(messages):
        if message["role"] in ("system", "user"):
            texts = [_text(message["content"]), prompt]
            ordered = texts if message["role"] == "system" else texts[::-1]
            return [*messages[:place], {**message, "content": "\n\n".join(ordered)}, *messages[place + 1 :]]
    return [{"role": "user", "content": prompt}, *messages]


def _text(content: str | list[dict[str, str]] | None) -> str:
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _call(call: dict[str, Any]) -> str:
    return f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}"
