"""JSON Lines: one object a line, and a sentence that names file and line where there is something else."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foredraft.core.errors import DataError


def objects(path: Path, text: str, *, torn: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a text, each with the words for where it stands; empty lines are left out.

    Args:
        path: for the sentences alone.
        torn: the last line may be the beginning of one that was being written when the machine went down; then it does
            not count.

    Raises:
        DataError: a line is no JSON, or no object.
    """
    lines = text.split("\n")  # splitlines would part lines inside JSON's strings
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            if torn and number == len(lines):
                return
            raise DataError(f"{where}: this is not JSON ({error.msg}, column {error.colno}).") from None
        if not isinstance(found, dict):
            raise DataError(f"{where}: this is not an object.")
        yield where, found
