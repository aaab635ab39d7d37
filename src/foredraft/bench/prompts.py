"""Prompt files in common formats: questions with turns, HumanEval, chat messages, plain text, tables of questions."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foredraft.core.errors import DataError
from foredraft.files.read import json_lines

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
"""The default prompts."""

LEFT_OUT = "FULL BENCHMARK DATA SHOULD BE FETCHED"
"""How turns of SPEED-Bench begin whose text its files leave out."""


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A prompt for ``Generator.generate``; the first turn if there are several.

    ``turns``: all user turns; ``category``: the file's label for the prompt; ``name``: its name or number in the file;
    ``task``: the file's name.
    """

    prompt: str | list[dict[str, str]]
    turns: tuple[str, ...]
    category: str
    name: str = ""
    task: str = ""

    @property
    def num_turns(self) -> int:
        """Number of turns to run; more than one only if the prompt is a chat made from the turns."""
        return len(self.turns) if self.turns and self.prompt == [_user(self.turns[0])] else 1

    def after(self, answers: Sequence[str]) -> str | list[dict[str, str]]:
        """The prompt of the next turn, given the answers so far."""
        if not answers:
            return self.prompt
        chat: list[dict[str, str]] = []
        for turn, answer in zip(self.turns, answers, strict=False):
            chat += [_user(turn), {"role": "assistant", "content": answer}]
        return [*chat, _user(self.turns[len(answers)])]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def standard_prompts(chat: bool = False) -> list[BenchPrompt]:
    """The default prompts."""
    prompts = (BenchPrompt(text, (text,), "text", str(i), "standard") for i, text in enumerate(STANDARD))
    return [_in_chat(prompt, chat) for prompt in prompts]


def read_prompts(path: str | Path, chat: bool = False) -> list[BenchPrompt]:
    """Read the prompts of a file.

    ``.jsonl``: objects with ``turns`` (Spec-Bench, EAGLE, DeepSpec), ``messages`` (chat), ``prompt`` (HumanEval) or
    ``text``. ``.parquet``: a table with these columns (SPEED-Bench, as its ``prepare_data.py`` writes it).
    Any other file: plain text; lines of ``---`` separate prompts.

    Args:
        chat: make ``turns``, ``prompt`` and ``text`` user turns, for the model's chat template.

    Raises:
        DataError: the file cannot be read; the message names file, line and field.
    """
    path = Path(path)
    found = list(_read(path))
    if not found:
        raise DataError(f"{path}: the file has no prompts.")
    task = path.resolve().parent.name if path.name in ("question.jsonl", "test.parquet") else path.stem
    names = _unique_names([prompt.name or str(i) for i, prompt in enumerate(found)])
    return [_in_chat(replace(prompt, task=task, name=name), chat) for name, prompt in zip(names, found, strict=True)]


def _read(path: Path) -> Iterable[BenchPrompt]:
    if path.suffix == ".parquet":
        return (_prompt(where, row) for where, row in _table(path))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + error.object[: error.start].count(b"\n")
        raise DataError(f"{path}, line {line}: not valid UTF-8.") from None
    except OSError as error:
        raise DataError(f"Cannot read the prompt file {path}: {error.strerror}.") from None
    if path.suffix == ".jsonl":
        return (_prompt(where, row) for where, row in json_lines(path, text))
    return _parts(text)


def _table(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, row) for each row of a Parquet file, without its empty cells."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"{path} needs the package pyarrow: pip install 'foredraft[train]'.") from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except OSError as error:
        raise DataError(f"Cannot read the prompt file {path}: {error.strerror or error}.") from None
    except ValueError as error:
        raise DataError(f"{path} is not a Parquet file ({error}).") from None
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", {name: value for name, value in row.items() if value is not None}


def _unique_names(names: Sequence[str]) -> list[str]:
    """Number repeated names: 7, 7-2, 7-3."""
    found: dict[str, None] = {}
    for name in names:
        number = 1
        while (new := name if number == 1 else f"{name}-{number}") in found:
            number += 1
        found[new] = None
    return list(found)


def _parts(text: str) -> Iterator[BenchPrompt]:
    parts: list[list[str]] = [[]]
    for line in text.split("\n"):  # splitlines would also split at form feeds
        if line.strip() == "---":
            parts.append([])
        else:
            parts[-1].append(line)
    for part in parts:
        joined = "\n".join(part).strip("\n")
        if joined.strip():
            yield BenchPrompt(joined, (joined,), "text")


def _prompt(where: str, row: dict[str, Any]) -> BenchPrompt:
    about: dict[str, Any] = {
        "category": _first_of(row, ("category", "task_id"), "text").partition("/")[0],
        "name": _first_of(row, ("question_id", "task_id"), ""),
    }
    if "messages" in row:
        messages = row["messages"]
        good = isinstance(messages, list) and messages and all(map(_is_message, messages))
        if not good:
            raise DataError(f"{where}: messages must be a list of objects with strings role and content.")
        return BenchPrompt(messages, tuple(m["content"] for m in messages if m["role"] == "user"), **about)
    if "turns" in row:
        turns = row["turns"]
        if not (isinstance(turns, list) and turns and all(isinstance(turn, str) and turn for turn in turns)):
            raise DataError(f"{where}: turns must be a list of non-empty strings.")
        if any(turn.startswith(LEFT_OUT) for turn in turns):
            raise DataError(f"{where}: the file leaves this prompt out; SPEED-Bench's prepare_data.py writes it whole.")
        return BenchPrompt(turns[0], tuple(turns), **about)
    for field in ("prompt", "text"):
        if field in row:
            if not (isinstance(row[field], str) and row[field].strip()):
                raise DataError(f"{where}: {field} must be a non-empty string.")
            return BenchPrompt(row[field].rstrip("\n"), (row[field],), **about)
    raise DataError(f"{where}: missing field: turns, messages, prompt or text.")


def _first_of(row: dict[str, Any], fields: Sequence[str], default: str) -> str:
    """The first of these fields that the row has, as a string."""
    return next((str(row[field]) for field in fields if row.get(field) is not None), default)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))


def _in_chat(prompt: BenchPrompt, chat: bool) -> BenchPrompt:
    if chat and isinstance(prompt.prompt, str):
        return replace(prompt, prompt=[_user(prompt.prompt)], turns=(prompt.prompt, *prompt.turns[1:]))
    return prompt
