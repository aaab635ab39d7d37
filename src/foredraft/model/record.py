"""Small JSON files that commands write for people and for ``load``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foredraft.core.errors import DrafterError, OptionError


def write_record(path: str | Path, record: Mapping[str, Any]) -> None:
    """Write an object, or raise an ``OptionError``."""
    try:
        Path(path).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"Cannot write {path}: {error.strerror}.") from None


def read_record(path: str | Path, what: str) -> dict[str, Any]:
    """The object in a file; empty where it is JSON of another kind.

    Args:
        what: it should be, for the sentence.

    Raises:
        DrafterError: it cannot be read, or is not JSON.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DrafterError(f"Cannot read {what} {path}: {error.strerror}.") from None
    except ValueError as error:
        raise DrafterError(f"{path} is not JSON: {error}.") from None
    return record if isinstance(record, dict) else {}
