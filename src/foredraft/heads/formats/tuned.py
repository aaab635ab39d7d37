"""What ``foredraft tune`` found, as a small JSON file that ``load`` takes for a drafter: ``--drafter tuned.json``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.core.errors import DrafterError, OptionError
from foredraft.core.io import read_json, write_json

SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class Tuned:
    """A choice.

    ``drafter``: as ``load`` takes it; "none" where nothing pays. ``off_from``: with so many texts at once, or more,
    nothing is drafted; 0 is never. ``facts``: how it was found; for people. ``learned``: the state of its policy, see
    ``Policy.state``.
    """

    model: str
    drafter: str
    off_from: int = 0
    facts: dict[str, Any] | None = None
    learned: dict[str, Any] | None = None


def write_tuned(path: str | Path, tuned: Tuned) -> None:
    """Write it, or fail with a sentence."""
    record = {"model": tuned.model, "drafter": tuned.drafter, "off_from": tuned.off_from, "facts": tuned.facts or {}}
    if tuned.learned:
        record["learned"] = tuned.learned
    if Path(path).suffix != SUFFIX:
        raise OptionError(f"{path}: a tuned drafter is a file that ends in {SUFFIX}.")
    write_json(path, record)


def read_tuned(path: str | Path) -> Tuned:
    """Read it.

    Raises:
        DrafterError: it is not there, or it is something else.
    """
    found = read_json(path, "the tuned drafter", "run foredraft tune again")
    wrong = [name for name in ("model", "drafter") if not isinstance(found.get(name), str)]
    if type(off_from := found.get("off_from")) is not int or off_from < 0:
        wrong.append("off_from")
    if not isinstance(learned := found.get("learned"), dict | None):
        wrong.append("learned")
    if wrong:
        raise DrafterError(f"{path} is not what foredraft tune writes: {', '.join(wrong)} must be there.")
    return Tuned(found["model"], found["drafter"], found["off_from"], found.get("facts"), learned)
