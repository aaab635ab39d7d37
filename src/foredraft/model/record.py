"""Small JSON files that commands write for people, for ``load``, and to go on from."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foredraft.core.errors import DrafterError, OptionError, UsageError
from foredraft.model.whole import write_text_whole


def write_record(path: str | Path, record: Mapping[str, Any], error: type[UsageError] = OptionError) -> None:
    """Write an object, whole or not at all, or raise an error of this kind."""
    try:
        write_text_whole(Path(path), json.dumps(record, indent=2) + "\n")
    except OSError as found:
        raise error(f"Cannot write {path}: {found.strerror}.") from None


def read_record(path: str | Path, what: str, remedy: str, error: type[UsageError] = DrafterError) -> dict[str, Any]:
    """The object in a file.

    Args:
        what: it should be, for the sentence.
        remedy: what to do about a file that was cut short or holds something else, for the sentence.
        error: the kind that is raised.

    Raises:
        UsageError: it cannot be read, or is no JSON object; of the kind ``error``.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as found:
        raise error(f"Cannot read {what} {path}: {found.strerror}.") from None
    except (ValueError, RecursionError) as found:
        raise error(f"{path} is not JSON ({found}), so it may have been cut short; {remedy}.") from None
    if not isinstance(record, dict):
        raise error(f"{path} is not a JSON object; {remedy}.")
    return record
