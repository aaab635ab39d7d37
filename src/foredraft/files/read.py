"""Reads JSON and JSON Lines, with errors that name the file and the line."""

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foredraft.core.errors import DataError, DrafterError, ModelError, UsageError, first_line


def read_json(
    path: str | Path, error: type[UsageError] = DrafterError, *, named: str = "", remedy: str = ""
) -> dict[str, Any]:
    """Read a JSON object from a file.

    Args:
        error: the class of the exception.
        named: the file in its message; by default the path.
        remedy: what to do about a file with other contents.

    Raises:
        UsageError: the file cannot be read, or is not a JSON object (an ``error``).
    """
    named, rest = named or repr(str(path)), f"; {remedy}." if remedy else "."
    begin = named[0].upper() + named[1:]
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as reason:
        raise error(f"Cannot read {named}: {reason.strerror}.") from None
    except RecursionError:
        raise error(f"{begin} is nested too deep{rest}") from None
    except ValueError as reason:
        raise error(f"{begin} is not JSON: {first_line(reason).rstrip('.')}{rest}") from None
    if not isinstance(found, dict):
        raise error(f"{begin} is not a JSON object{rest}")
    return found


_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
_OF_A_MODEL = {".json", ".safetensors", ".bin", ".pt", ".gguf", ".model", ".txt", ".jinja"}


def check_regular(path: Path, error: type[UsageError] = ModelError) -> None:
    """Raise an ``error`` if at a path is something of which a reader would wait for bytes, or never see the end."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except (OSError, ValueError):  # whoever reads it says what is wrong
        return
    if kind in _KINDS:
        raise error(f"{str(path)!r} is {_KINDS[kind]}, not a file.")


def check_model_files(folder: Path) -> None:
    """``check_regular`` for the files of a model or head in a folder.

    Raises:
        ModelError: one is something else.
        OSError: the folder cannot be read.
    """
    for path in sorted(folder.iterdir()):
        if path.suffix in _OF_A_MODEL:
            check_regular(path)


def json_object(text: str, where: str) -> dict[str, Any]:
    """Parse a line of JSON Lines; raise a ``DataError`` that begins with ``where`` if it is no object."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: invalid JSON ({error.msg}, column {error.colno}).") from None
    except RecursionError:
        raise DataError(f"{where}: nested too deep.") from None
    except ValueError:  # thousands of digits
        raise DataError(f"{where}: a number is too long.") from None
    if not isinstance(found, dict):
        raise DataError(f"{where}: expected a JSON object, not {type(found).__name__}.")
    return found


def json_lines(path: Path, text: str, *, torn: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, object) for each non-empty line of ``text``; errors as in ``json_object``.

    Args:
        path: only for error messages.
        torn: skip the last line if a crash left it incomplete.
    """
    lines = text.split("\n")  # splitlines would split inside JSON strings
    for number, line in enumerate(lines, start=1):
        if not line.strip() or (torn and number == len(lines) and not _is_json(line)):
            continue
        where = f"{path}, line {number}"
        yield where, json_object(line, where)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def read_text(path: Path, what: str) -> str:
    """The text of a file.

    Raises:
        DataError: it cannot be read, is a device, which may have no end, or is not in UTF-8.
    """
    try:
        if path.is_char_device() and not path.samefile(os.devnull):
            raise DataError(f"Cannot read {what} {path}: it is a device.")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"Cannot read {what} {path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"Cannot read {what} {path}: {error}.") from None
