"""Texts to learn from: JSON Lines of text or chats (also .gz and .xz), folders of plain text, ``datasets`` names."""

import bz2
import gzip
import json
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.core.errors import DataError

_OPENERS = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


@dataclass(frozen=True, slots=True)
class Sample:
    """One document: a text, a chat, or token ids that the target has said itself after a prompt.

    ``where`` names it in messages: file and line.
    """

    where: str
    text: str | None = None
    messages: list[dict[str, str]] | None = None
    ids: list[int] | None = None
    prompt_length: int = 0


def read_sources(sources: list[str]) -> Iterator[Sample]:
    """All samples of all sources, in order.

    A source is a file of JSON Lines, a text file, a folder of these, or ``datasets:NAME`` (``datasets:NAME:SPLIT``,
    train by default) of the Hugging Face hub. A line of JSON has ``text``, ``messages`` (or ``conversations``, as
    ShareGPT writes them), or ``ids`` and ``prompt_length``, as ``--regenerate`` writes them.

    Raises:
        DataError: nothing there, or a line that cannot be read; the sentence names file, line and field.
    """
    for source in sources:
        if source.startswith("datasets:"):
            yield from _hub(source)
            continue
        path = Path(source)
        if not path.exists():
            raise DataError(f"There is no training text at {source!r}.")
        if not (files := files_of(path)):
            raise DataError(f"The folder {source!r} has no files.")
        for file in files:
            yield from _file(file)


def files_of(path: Path) -> list[Path]:
    """The files of a source, in order: itself, or all in the folder but hidden ones; none if nothing is there."""
    if not path.is_dir():
        return [path] if path.exists() else []
    seen = (file for file in path.rglob("*") if not any(p.startswith(".") for p in file.relative_to(path).parts))
    return sorted(file for file in seen if file.is_file())


def _file(path: Path) -> Iterator[Sample]:
    kinds = [suffix for suffix in path.suffixes if suffix not in _OPENERS]
    opener: Any = _OPENERS.get(path.suffix, open)
    try:
        with opener(path, "rt", encoding="utf-8-sig") as lines:
            if kinds and kinds[-1] in (".jsonl", ".json", ".ndjson"):
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield sample_of(parsed(line, f"{path}:{number}"), f"{path}:{number}")
            else:
                yield Sample(str(path), text=lines.read())
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}).") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


def parsed(line: str, where: str) -> dict[str, Any]:
    """One line of JSON Lines."""
    try:
        row = json.loads(line.rstrip("\r\n"))
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: this line is not JSON ({error.msg}, column {error.colno}).") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: a line must be a JSON object, this is a {type(row).__name__}.")
    return row


def sample_of(row: dict[str, Any], where: str) -> Sample:
    """A sample from one row of data."""
    if "messages" in row or "conversations" in row:
        return Sample(where, messages=_messages(row.get("messages", row.get("conversations")), where))
    if "ids" in row:
        return _own_words(row["ids"], row.get("prompt_length", 0), where)
    if not isinstance(row.get("text"), str):
        raise DataError(f"{where}: there is no text, messages or ids (fields: {', '.join(row) or 'none'}).")
    return Sample(where, text=row["text"])


def _own_words(ids: Any, prompt_length: Any, where: str) -> Sample:
    if not isinstance(ids, list) or not all(_is_whole(i) and i < 2**31 for i in ids):
        raise DataError(f"{where}: ids must be a list of whole numbers from 0 on.")
    if not _is_whole(prompt_length) or prompt_length > len(ids):
        raise DataError(f"{where}: prompt_length must be a whole number from 0 to the number of ids.")
    return Sample(where, ids=ids, prompt_length=prompt_length)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_ROLES = {"human": "user", "gpt": "assistant"}


def _messages(turns: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{where}: messages must be a list of turns.")
    messages = []
    for number, turn in enumerate(turns, start=1):
        role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
        content = turn.get("content", turn.get("value")) if isinstance(turn, dict) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(f"{where}: turn {number} has no role and content.")
        messages.append({"role": _ROLES.get(role, role), "content": content})
    return messages


def _hub(source: str) -> Iterator[Sample]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{source} needs the package datasets: pip install 'foredraft[train]'.") from error
    name, _, split = source.removeprefix("datasets:").partition(":")
    try:
        rows = datasets.load_dataset(name, split=split or "train", streaming=True)
        for number, row in enumerate(rows):
            yield sample_of(dict(row), f"{name}[{number}]")
    except DataError:
        raise
    except Exception as error:  # datasets raises many kinds; each becomes one sentence
        raise DataError(f"The dataset {name!r} cannot be read: {_first_line(error)}") from error


def refused(sample: Sample, error: Exception) -> DataError:
    """What to raise where the target's chat template will not have a chat."""
    return DataError(f"{sample.where}: the chat template cannot write this chat: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return (str(error) or error.__class__.__name__).splitlines()[0]
