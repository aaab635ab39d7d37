"""What ``foredraft tune`` found, as a small JSON file that ``load`` takes for a drafter: ``--drafter tuned.json``."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.core.errors import DrafterError, OptionError

SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class Tuned:
    """A choice.

    ``drafter``: as ``load`` takes it; "none" where nothing pays. ``off_from``: with so many texts at once, or more,
    nothing is drafted; 0 is never. ``facts``: how it was found; for people.
    """

    model: str
    drafter: str
    off_from: int = 0
    facts: dict[str, Any] | None = None


def write_tuned(path: str | Path, tuned: Tuned) -> None:
    """Write it, or fail with a sentence."""
    record = {"model": tuned.model, "drafter": tuned.drafter, "off_from": tuned.off_from, "facts": tuned.facts or {}}
    if Path(path).suffix != SUFFIX:
        raise OptionError(f"{path}: a tuned drafter is a file that ends in {SUFFIX}.")
    try:
        Path(path).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"Cannot write {path}: {error.strerror}.") from None


def read_tuned(path: str | Path) -> Tuned:
    """Read it.

    Raises:
        DrafterError: it is not there, or it is something else.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DrafterError(f"Cannot read the tuned drafter {path}: {error.strerror}.") from None
    except ValueError as error:
        raise DrafterError(f"{path} is not JSON: {error}.") from None
    found = record if isinstance(record, dict) else {}
    wrong = [name for name in ("model", "drafter") if not isinstance(found.get(name), str)]
    if type(off_from := found.get("off_from")) is not int or off_from < 0:
        wrong.append("off_from")
    if wrong:
        raise DrafterError(f"{path} is not what foredraft tune writes: {', '.join(wrong)} must be there.")
    return Tuned(found["model"], found["drafter"], found["off_from"], found.get("facts"))
