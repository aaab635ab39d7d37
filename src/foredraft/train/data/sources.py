"""Training data sources: JSON Lines of text or chats (also .gz, .xz, .bz2), text files, folders, ``datasets`` names."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.core.errors import DataError, first_line
from foredraft.files.read import json_object

_OPENERS = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


@dataclass(frozen=True, slots=True)
class Sample:
    """One document: a text, a chat, or token ids of a prompt with the target's answer.

    ``where``: file and line, for error messages.
    """

    where: str
    text: str | None = None
    messages: list[dict[str, str]] | None = None
    ids: list[int] | None = None
    prompt_length: int = 0


def read_sources(sources: list[str]) -> Iterator[Sample]:
    """All samples of all sources, in order.

    A source is a JSON Lines file, a text file, a folder of these, or ``datasets:NAME`` or ``datasets:NAME:SPLIT``
    (default: train) from the Hugging Face hub. A JSON line has ``text``, ``messages`` (or ShareGPT's
    ``conversations``), or ``ids`` and ``prompt_length`` (from ``foredraft answers``).

    Raises:
        DataError: missing source or invalid line; the message names file, line and field.
    """
    for source in sources:
        if source.startswith("datasets:"):
            yield from _hub(source)
            continue
        path = Path(source)
        if not path.exists():
            raise DataError(f"Training data not found: {source!r}.")
        if not (files := files_of(path)):
            raise DataError(f"The folder {source!r} has no files.")
        for file in files:
            yield from _file(file)


def files_of(path: Path) -> list[Path]:
    """The files of a source, sorted: the file itself, or all non-hidden files of a folder."""
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
                        where = f"{path}:{number}"
                        yield sample_of(json_object(line.rstrip("\r\n"), where), where)
            else:
                yield Sample(str(path), text=lines.read())
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not valid UTF-8 (byte {error.start}).") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"Cannot read {path}: {error}.") from error


def sample_of(row: dict[str, Any], where: str) -> Sample:
    """A sample from one row of data."""
    if "messages" in row or "conversations" in row:
        return Sample(where, messages=_messages(row.get("messages", row.get("conversations")), where))
    if "ids" in row:
        return _ids_sample(row["ids"], row.get("prompt_length", 0), where)
    if not isinstance(row.get("text"), str):
        raise DataError(f"{where}: no field text, messages or ids (fields: {', '.join(row) or 'none'}).")
    return Sample(where, text=row["text"])


def _ids_sample(ids: Any, prompt_length: Any, where: str) -> Sample:
    if not isinstance(ids, list) or not all(_is_index(i) and i < 2**31 for i in ids):
        raise DataError(f"{where}: ids must be a list of integers of 0 or more.")
    if not _is_index(prompt_length) or prompt_length > len(ids):
        raise DataError(f"{where}: prompt_length must be an integer from 0 to the number of ids.")
    return Sample(where, ids=ids, prompt_length=prompt_length)


def _is_index(value: Any) -> bool:
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
            raise DataError(f"{where}: turn {number} needs role and content, both strings.")
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
    except Exception as error:  # datasets raises many exception types
        raise DataError(f"Cannot read the dataset {name!r}: {first_line(error)}") from error


def template_error(sample: Sample, error: Exception) -> DataError:
    """The error for a chat that the target's chat template rejects."""
    return DataError(f"{sample.where}: the chat template rejects this chat: {first_line(error)}")
