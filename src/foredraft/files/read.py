"""Reads JSON and JSON Lines, with errors that name the file and the line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foredraft.core.errors import DataError, DrafterError, UsageError, first_line


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


def json_object(text: str, where: str) -> dict[str, Any]:
    """Parse a line of JSON Lines; raise a ``DataError`` that begins with ``where`` if it is no object."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: invalid JSON ({error.msg}, column {error.colno}).") from None
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
    except ValueError:
        return False
    return True
