"""The result of ``foredraft tune``, a JSON file that ``load`` accepts as a drafter: ``--drafter tuned.json``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.core.errors import DrafterError, OptionError
from foredraft.files.outputs import written_by
from foredraft.files.read import read_json
from foredraft.files.write import write_json

SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class Tuned:
    """A tuned drafter.

    ``drafter``: its spec; "none" if no drafter is faster. ``off_from``: the batch size from which nothing is drafted; 0
    means no limit. ``facts``: how it was found, for information. ``learned``: the policy's state, see ``Policy.state``.
    """

    model: str
    drafter: str
    off_from: int = 0
    facts: dict[str, Any] | None = None
    learned: dict[str, Any] | None = None


def write_tuned(path: str | Path, tuned: Tuned) -> None:
    """Write a tuned file.

    Raises:
        OptionError: the path has another suffix, or cannot be written.
    """
    record = {"model": tuned.model, "drafter": tuned.drafter, "off_from": tuned.off_from, "facts": tuned.facts or {}}
    record |= written_by("tune")
    if tuned.learned:
        record["learned"] = tuned.learned
    if Path(path).suffix != SUFFIX:
        raise OptionError(f"{path}: the file name of a tuned drafter must end in {SUFFIX}.")
    write_json(path, record)


def read_tuned(path: str | Path) -> Tuned:
    """Read a tuned file.

    Raises:
        DrafterError: it does not exist, or is not a tuned file.
    """
    found = read_json(path, named=f"the tuned drafter {path}", remedy="run foredraft tune again")
    wrong = [name for name in ("model", "drafter") if not isinstance(found.get(name), str)]
    if type(off_from := found.get("off_from")) is not int or off_from < 0:
        wrong.append("off_from")
    if not isinstance(learned := found.get("learned"), dict | None):
        wrong.append("learned")
    if wrong:
        raise DrafterError(f"{path} is not a file of foredraft tune: {', '.join(wrong)} missing or invalid.")
    return Tuned(found["model"], found["drafter"], found["off_from"], found.get("facts"), learned)
