"""Training data sources: JSON Lines of text or chats (also .gz, .xz, .bz2), text files, folders, ``datasets`` names."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from foredraft.core.errors import DataError, first_line
from foredraft.files.read import json_object
from foredraft.model.base import TargetModel
from foredraft.model.text.tokenizer import Tokenizer

_OPENERS = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


class AnsweredBy(NamedTuple):
    """The model of answers (``TargetModel.contents``) and its tokens (``Tokenizer.tokens_hash``); None if unknown."""

    model: str | None = None
    tokenizer: str | None = None

    @classmethod
    def of(cls, target: TargetModel, tokenizer: Tokenizer | None) -> "AnsweredBy":
        return cls(target.contents(), None if tokenizer is None else tokenizer.tokens_hash())

    @property
    def known(self) -> dict[str, str]:
        """As fields of a row."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def other(self, than: "AnsweredBy") -> str | None:
        """What is known to differ, as the name of a field."""
        return next((name for name, value in self.known.items() if than.known.get(name, value) != value), None)


ANYONE = AnsweredBy()
"""Of answers by an unknown model, and of texts."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One document: a text, a chat, or token ids of a prompt with the target's answer.

    ``where``: file and line, for error messages. ``by``: whose answer it is.
    """

    where: str
    text: str | None = None
    messages: list[dict[str, str]] | None = None
    ids: list[int] | None = None
    prompt_length: int = 0
    by: AnsweredBy = ANYONE


def read_sources(sources: list[str]) -> Iterator[Sample]:
    """All samples of all sources, in order.

    A source is a JSON Lines file, a text file, a folder of these, or ``datasets:NAME`` or ``datasets:NAME:SPLIT``
    (default: train) from the Hugging Face hub. A JSON line has ``text``, ``messages`` (or ShareGPT's
    ``conversations``), or ``ids`` and ``prompt_length`` (from ``foredraft answers``, with ``model`` and ``tokenizer``).

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
        return _ids_sample(row, where)
    if not isinstance(row.get("text"), str):
        raise DataError(f"{where}: no field text, messages or ids (fields: {', '.join(row) or 'none'}).")
    return Sample(where, text=row["text"])


def answers_of(samples: Iterable[Sample], by: AnsweredBy) -> Iterator[Sample]:
    """The samples; answers of another model, or in other tokens, are refused.

    Raises:
        DataError: there is one.
    """
    for sample in samples:
        if (name := sample.by.other(by)) is not None:
            raise DataError(
                f"{sample.where}: this answer is of another {name} ({sample.by.known[name]}) than the target's "
                f"({by.known[name]}): let foredraft answers write the target's own, or take the field {name} out of "
                "the lines to train on these."
            )
        yield sample


def _ids_sample(row: dict[str, Any], where: str) -> Sample:
    ids, prompt_length = row["ids"], row.get("prompt_length", 0)
    if not isinstance(ids, list) or not all(_is_index(i) and i < 2**31 for i in ids):
        raise DataError(f"{where}: ids must be a list of integers of 0 or more.")
    if not _is_index(prompt_length) or prompt_length > len(ids):
        raise DataError(f"{where}: prompt_length must be an integer from 0 to the number of ids.")
    by = AnsweredBy(row.get("model"), row.get("tokenizer"))
    if not all(isinstance(each, str) for each in by.known.values()):
        raise DataError(f"{where}: model and tokenizer of an answer must be strings.")
    return Sample(where, ids=ids, prompt_length=prompt_length, by=by)


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
