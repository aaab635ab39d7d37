"""Prompt files as they are about: questions with turns, HumanEval, chat messages, plain text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foredraft.bench.jsonl import objects
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

    ``turns`` holds all of them; ``category`` is the file's own word for the kind of question, ``name`` its number or
    its name there, ``task`` that of the file.
    """

    prompt: str | list[dict[str, str]]
    turns: tuple[str, ...]
    category: str
    name: str = ""
    task: str = ""

    @property
    def rounds(self) -> int:
        """How many turns can be played: more than one only where the prompt is a chat that the turns make."""
        return len(self.turns) if self.turns and self.prompt == [_user(self.turns[0])] else 1

    def after(self, answers: Sequence[str]) -> str | list[dict[str, str]]:
        """The prompt of the turn that comes after so many answers."""
        if not answers:
            return self.prompt
        chat: list[dict[str, str]] = []
        for turn, answer in zip(self.turns, answers, strict=False):
            chat += [_user(turn), {"role": "assistant", "content": answer}]
        return [*chat, _user(self.turns[len(answers)])]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def standard_prompts(chat: bool = False) -> list[Ask]:
    """What is asked where no file is given."""
    asks = (Ask(text, (text,), "text", str(i), "standard") for i, text in enumerate(STANDARD))
    return [_asked(ask, chat) for ask in asks]


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
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + error.object[: error.start].count(b"\n")
        raise DataError(f"{path}, line {line}: this is not UTF-8 text.") from None
    except OSError as error:
        raise DataError(f"Cannot read the prompt file {path}: {error.strerror}.") from None
    found = list(_lines(path, text) if path.suffix == ".jsonl" else _parts(text))
    if not found:
        raise DataError(f"{path}: there is no prompt in it.")
    task = path.resolve().parent.name if path.name == "question.jsonl" else path.stem
    names = _apart([ask.name or str(i) for i, ask in enumerate(found)])
    return [_asked(replace(ask, task=task, name=name), chat) for name, ask in zip(names, found, strict=True)]


def _apart(names: Sequence[str]) -> list[str]:
    """Names that files give twice, such as several files in one, told apart: 7, 7-2, 7-3."""
    found: dict[str, None] = {}
    for name in names:
        number = 1
        while (new := name if number == 1 else f"{name}-{number}") in found:
            number += 1
        found[new] = None
    return list(found)


def _parts(text: str) -> Iterator[Ask]:
    parts: list[list[str]] = [[]]
    for line in text.split("\n"):  # splitlines would part lines at form feeds, too
        if line.strip() == "---":
            parts.append([])
        else:
            parts[-1].append(line)
    for part in parts:
        joined = "\n".join(part).strip("\n")
        if joined.strip():
            yield Ask(joined, (joined,), "text")


def _lines(path: Path, text: str) -> Iterator[Ask]:
    return (_ask(where, row) for where, row in objects(path, text))


def _ask(where: str, row: dict[str, Any]) -> Ask:
    about: dict[str, Any] = {
        "category": _first_of(row, ("category", "task_id"), "text").partition("/")[0],
        "name": _first_of(row, ("question_id", "task_id"), ""),
    }
    if "messages" in row:
        messages = row["messages"]
        good = isinstance(messages, list) and messages and all(map(_is_message, messages))
        if not good:
            raise DataError(f"{where}: messages must be a list of objects with role and content, both text.")
        return Ask(messages, tuple(m["content"] for m in messages if m["role"] == "user"), **about)
    if "turns" in row:
        turns = row["turns"]
        if not (isinstance(turns, list) and turns and all(isinstance(turn, str) and turn for turn in turns)):
            raise DataError(f"{where}: turns must be a list of texts, none of them empty.")
        return Ask(turns[0], tuple(turns), **about)
    for field in ("prompt", "text"):
        if field in row:
            if not (isinstance(row[field], str) and row[field].strip()):
                raise DataError(f"{where}: {field} must be a text that is not empty.")
            return Ask(row[field].rstrip("\n"), (row[field],), **about)
    raise DataError(f"{where}: there is no field turns, messages, prompt or text.")


def _first_of(row: dict[str, Any], fields: Sequence[str], otherwise: str) -> str:
    """What the first of these fields that is there says."""
    return next((str(row[field]) for field in fields if row.get(field) is not None), otherwise)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))


def _asked(ask: Ask, chat: bool) -> Ask:
    if chat and isinstance(ask.prompt, str):
        return replace(ask, prompt=[_user(ask.prompt)], turns=(ask.prompt, *ask.turns[1:]))
    return ask
