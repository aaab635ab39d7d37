"""Tool calls in a model's output: JSON between ``<tool_call>`` tags (Hermes, Qwen), or alone (Llama 3)."""

import json
from typing import Any, NamedTuple

from foredraft.serve.answers import CalledFunction

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_LLAMA = "<|python_tag|>"


class Parsed(NamedTuple):
    """Text for the reader, and calls."""

    content: str
    calls: list[CalledFunction]


class ToolParser:
    """Takes the text of one output as it comes. What may belong to a call is held back until the end.

    Text that looks like a call but is none, such as broken JSON, is content.

    Args:
        chat_template: decides the format.
    """

    def __init__(self, chat_template: str) -> None:
        self._tagged = OPEN in chat_template
        self._held = ""
        self._open = False  # everything from here on is held
        self._prose = False  # the output has begun with what is no call

    def push(self, text: str) -> str:
        """Add text; return the content that is final."""
        self._held += text
        if self._open:
            return ""
        final = self._final()
        content, self._held = self._held[:final], self._held[final:]
        return content

    def finish(self) -> Parsed:
        """The rest of the content, and the calls."""
        return _tagged(self._held) if self._tagged else _bare(self._held)

    def _final(self) -> int:
        """How many of the characters held cannot belong to a call."""
        if not self._tagged:
            start = self._held.lstrip()
            self._open = start.removeprefix(_LLAMA)[:1] == "{"
            if not self._prose and (self._open or _LLAMA.startswith(start)):
                return 0
            self._open, self._prose = False, True
            return len(self._held)
        begin = self._held.find(OPEN)
        self._open = begin >= 0
        if self._open:
            return begin
        partial = next(size for size in range(len(OPEN) - 1, -1, -1) if self._held.endswith(OPEN[:size]))
        return len(self._held) - partial


def parse(text: str, chat_template: str) -> Parsed:
    """Content and calls of a whole output."""
    parser = ToolParser(chat_template)
    content = parser.push(text)
    rest = parser.finish()
    return Parsed(content + rest.content, rest.calls)


def _tagged(text: str) -> Parsed:
    """Calls between tags; the last one may lack its closing tag."""
    calls = []
    content, *parts = text.split(OPEN)
    for part in parts:
        body, _, after = part.partition(CLOSE)
        call = _call(body, "arguments")
        if call is None:
            content += OPEN + part
            continue
        calls.append(call)
        content += after
    return Parsed(content.strip() if calls else content, calls)


def _bare(text: str) -> Parsed:
    """Calls that are the whole output, separated by semicolons."""
    calls = []
    rest = text.strip().removeprefix(_LLAMA)
    while rest:
        try:
            found, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            return Parsed(text, [])
        call = _described(found, "parameters") or _described(found, "arguments")
        if call is None:
            return Parsed(text, [])
        calls.append(call)
        rest = rest[end:].strip().removeprefix(";").strip()
    return Parsed("" if calls else text, calls)


def _call(text: str, arguments: str) -> CalledFunction | None:
    try:
        return _described(json.loads(text), arguments)
    except (ValueError, RecursionError):
        return None


def _described(found: Any, arguments: str) -> CalledFunction | None:
    """The call that a JSON value describes; None if it describes none."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    given = found.get(arguments, {} if found.keys() == {"name"} else None)
    if not isinstance(given, dict):
        return None
    return CalledFunction(name=found["name"], arguments=json.dumps(given, ensure_ascii=False))
