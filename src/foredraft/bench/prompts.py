"""Prompt files as they are about: questions with turns, HumanEval, chat messages, plain text."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.core.errors import DataError

STANDARD = (
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""',
    "import os\n\n\ndef read_lines(path):",
    "Question: Tom has 12 apples. He eats 3 and buys 5 more. How many apples does he have?\nAnswer:",
    "The purpose of this module is to",
    "Once upon a time there was a small town by the sea, where",
    "class Stack:\n    def __init__(self):",
    "- red\n- green\n- blue\n- red\n- green\n-",
    "The three most important things to know about batteries are",
)
"""What is asked where no file is given."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt, as ``Generator.generate`` takes it: the first turn, where there are several.

    ``turns`` holds all of them; ``category`` is the file's own word for the kind of question.
    """

    prompt: str | list[dict[str, str]]
    turns: tuple[str, ...]
    category: str


def read_prompts(path: str | Path, chat: bool = False) -> list[Ask]:
    """The prompts of a file.

    ``.jsonl``: objects with ``turns`` (Spec-Bench, EAGLE), ``messages`` (chat), ``prompt`` (HumanEval) or ``text``.
    Anything else: plain text, one prompt; prompts are parted by lines of ``---``.

    Args:
        chat: ask ``turns``, ``prompt`` and texts as a user's turn in the model's chat template.

    Raises:
        DataError: it cannot be read; the sentence names file, line and field.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = 1 + error.object[: error.start].count(b"\n")
        raise DataError(f"{path}, line {line}: this is not UTF-8 text.") from None
    except OSError as error:
        raise DataError(f"Cannot read the prompt file {path}: {error.strerror}.") from None
    found = list(_lines(path, text) if path.suffix == ".jsonl" else _parts(text))
    if not found:
        raise DataError(f"{path}: there is no prompt in it.")
    return [_asked(ask, chat) for ask in found]


def _parts(text: str) -> Iterator[Ask]:
    parts: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.strip() == "---":
            parts.append([])
        else:
            parts[-1].append(line)
    for part in parts:
        joined = "\n".join(part).strip("\n")
        if joined.strip():
            yield Ask(joined, (joined,), "text")


def _lines(path: Path, text: str) -> Iterator[Ask]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{where}: this is not JSON ({error.msg}, column {error.colno}).") from None
            yield _ask(where, row)


def _ask(where: str, row: Any) -> Ask:
    if not isinstance(row, dict):
        raise DataError(f"{where}: this is not an object.")
    category = str(row.get("category", row.get("task_id", "text"))).partition("/")[0]
    if "messages" in row:
        messages = row["messages"]
        good = isinstance(messages, list) and messages and all(map(_is_message, messages))
        if not good:
            raise DataError(f"{where}: messages must be a list of objects with role and content, both text.")
        return Ask(messages, tuple(m["content"] for m in messages if m["role"] == "user"), category)
    if "turns" in row:
        turns = row["turns"]
        if not (isinstance(turns, list) and turns and all(isinstance(turn, str) and turn for turn in turns)):
            raise DataError(f"{where}: turns must be a list of texts, none of them empty.")
        return Ask(turns[0], tuple(turns), category)
    for field in ("prompt", "text"):
        if field in row:
            if not (isinstance(row[field], str) and row[field].strip()):
                raise DataError(f"{where}: {field} must be a text that is not empty.")
            return Ask(row[field].rstrip("\n"), (row[field],), category)
    raise DataError(f"{where}: there is no field turns, messages, prompt or text.")


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))


def _asked(ask: Ask, chat: bool) -> Ask:
    if chat and isinstance(ask.prompt, str):
        return Ask([{"role": "user", "content": ask.prompt}], ask.turns, ask.category)
    return ask
