"""Tool calls in a model's output.

JSON between ``<tool_call>`` tags (Hermes, Qwen); behind ``[TOOL_CALLS]`` (Mistral), as a JSON list or as a name,
``[ARGS]`` and JSON; or alone (Llama 3). JSON is an object or a list of objects in all of them.
"""

import json
import re
from contextlib import suppress
from typing import Any, NamedTuple

from foredraft.serve.answers import CalledFunction

OPEN, CLOSE = "<tool_call>", "</tool_call>"
LIST = "[TOOL_CALLS]"
_LLAMA = "<|python_tag|>"
_ID, _ARGUMENTS = "[CALL_ID]", "[ARGS]"
MARKS = (OPEN, CLOSE, LIST, _ID, _ARGUMENTS, _LLAMA)
"""What calls are marked with; in many vocabularies special tokens, which are otherwise no text."""
_BARE = ("{", "[{", _LLAMA)
_NAMED = re.compile(r"\s*([^\s\[{]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")


class Parsed(NamedTuple):
    """Text for the reader, and calls."""

    content: str
    calls: list[CalledFunction]


def mark_of(chat_template: str) -> str:
    """What begins calls in the format of a chat template; empty for none."""
    return next((mark for mark in (OPEN, LIST) if mark in chat_template), "")


class ToolParser:
    """Takes the text of one output as it comes. What may belong to a call is held back until the end.

    Text that looks like a call but is none, such as broken JSON, is content.

    Args:
        chat_template: decides the format.
    """

    def __init__(self, chat_template: str) -> None:
        self._mark = mark_of(chat_template)
        self._held = ""
        self._open = False  # everything from here on is held
        self._prose = self._mark == OPEN  # no call can be the whole output

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
        if self._mark == OPEN:
            return _tagged(self._held)
        if self._mark and self._mark in self._held:
            return _marked(self._held, self._mark)
        return Parsed(self._held, []) if self._prose else _bare(self._held)

    def _final(self) -> int:
        """How many of the characters held cannot belong to a call."""
        if not self._prose:
            start = "".join(self._held[:64].split())
            self._open = start.startswith(_BARE)
            if self._open or any(each.startswith(start) for each in _BARE):
                return 0
            self._prose = True
        if not self._mark:
            return len(self._held)
        begin = self._held.find(self._mark)
        self._open = begin >= 0
        if self._open:
            return begin
        mark = self._mark
        partial = next(size for size in range(len(mark) - 1, -1, -1) if self._held.endswith(mark[:size]))
        return len(self._held) - partial


def parse(text: str, chat_template: str) -> Parsed:
    """Content and calls of a whole output."""
    parser = ToolParser(chat_template)
    content = parser.push(text)
    rest = parser.finish()
    return Parsed(content + rest.content, rest.calls)


def _tagged(text: str) -> Parsed:
    """Calls between tags; the last one may lack its closing tag."""
    calls: list[CalledFunction] = []
    content, *parts = text.split(OPEN)
    for part in parts:
        body, _, after = part.partition(CLOSE)
        found = _calls(body)
        if found.calls and not found.content.strip():
            calls += found.calls
            content += after
        else:
            content += OPEN + part
    return Parsed(content.strip() if calls else content, calls)


def _marked(text: str, mark: str) -> Parsed:
    """Calls behind each mark; what follows them is content."""
    calls: list[CalledFunction] = []
    content, *parts = text.split(mark)
    for part in parts:
        named = _NAMED.match(part)
        found = _calls(part) if named is None else _arguments_of(named[1], part[named.end() :])
        calls += found.calls
        content += found.content if found.calls else mark + part
    return Parsed(content.strip() if calls else content, calls)


def _bare(text: str) -> Parsed:
    """Calls that are the whole output."""
    found = _calls(text.strip().removeprefix(_LLAMA))
    return Parsed(text, []) if found.content.strip() or not found.calls else found


def _calls(text: str) -> Parsed:
    """Calls at the beginning of a text, in a list, or one by one with semicolons between them; and what follows."""
    rest, calls = text.strip(), []
    listed = rest.startswith("[")
    rest = rest.removeprefix("[")
    while rest := rest.lstrip():
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            break
        call = _described(value)
        if call is None:
            break
        calls.append(call)
        rest = rest[end:].lstrip()
        if listed and rest.startswith("]"):
            rest = rest[1:]
            break
        rest = rest.removeprefix("," if listed else ";")
    return Parsed(rest, calls)


def _arguments_of(name: str, text: str) -> Parsed:
    """The call of a name whose arguments begin a text; and what follows."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return Parsed(text, [])
    return Parsed(text[end:], [_called(name, value)])


def _described(found: Any) -> CalledFunction | None:
    """The call that a JSON value describes; None if it describes none."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    key = next((key for key in ("arguments", "parameters") if key in found), None)
    if key is None and found.keys() != {"name"}:
        return None
    given = as_arguments(found.get(key or ""))
    return _called(found["name"], given) if isinstance(given, dict) else None


def as_arguments(given: Any) -> Any:
    """Arguments of a call as JSON: those given as text, or an empty object for none. What is no JSON stays text."""
    if isinstance(given, str) and given.strip():
        with suppress(ValueError, RecursionError):
            given = json.loads(given)
    blank = given is None or (isinstance(given, str) and not given.strip())
    return {} if blank else given


def _called(name: str, arguments: Any) -> CalledFunction:
    return CalledFunction(name=name, arguments=json.dumps(arguments, ensure_ascii=False))
