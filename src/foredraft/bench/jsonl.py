"""JSON Lines with errors that name file and line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foredraft.core.errors import DataError


def objects(path: Path, text: str, *, torn: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, object) for each non-empty line.

    Args:
        path: only for error messages.
        torn: skip the last line if a crash left it incomplete.

    Raises:
        DataError: a line is not JSON, or not an object.
    """
    lines = text.split("\n")  # splitlines would split inside JSON strings
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            if torn and number == len(lines):
                return
            raise DataError(f"{where}: invalid JSON ({error.msg}, column {error.colno}).") from None
        if not isinstance(found, dict):
            raise DataError(f"{where}: expected a JSON object.")
        yield where, found
