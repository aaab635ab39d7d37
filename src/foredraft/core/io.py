"""Files that jobs leave: atomic writes, small JSON files, provenance."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from foredraft.core.errors import DrafterError, OptionError, UsageError
from foredraft.core.version import __version__


def atomic_write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Fill a file beside, then move it into its place at once; what was there stays until then.

    Raises:
        OSError, RuntimeError: it cannot be written. Then, and after an interrupt, the file that was there is left, and
            nothing beside it.
    """
    if path.exists() and not path.is_file():  # a pipe or a device is written to, never replaced
        with path.open("wb") as file:
            write(file)
        return
    path = path.resolve()  # through a link to the file that it names
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def atomic_write_text(path: Path, text: str) -> None:
    """The same for a text, in UTF-8."""
    atomic_write(path, lambda file: file.write(text.encode("utf-8")))


def atomic_save(path: Path, saved: Any) -> None:
    """The same for ``torch.save``."""
    atomic_write(path, lambda file: torch.save(saved, file))


def write_json(path: str | Path, record: Mapping[str, Any], error: type[UsageError] = OptionError) -> None:
    """Write an object, whole or not at all, or raise an error of this kind."""
    try:
        atomic_write_text(Path(path), json.dumps(record, indent=2) + "\n")
    except OSError as found:
        raise error(f"Cannot write {path}: {found.strerror}.") from None


def read_json(path: str | Path, what: str, remedy: str, error: type[UsageError] = DrafterError) -> dict[str, Any]:
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


def provenance(command: str | None = None) -> dict[str, Any]:
    """Facts about this very process. Paths in the command are cut to their last two parts: machines differ."""
    words = sys.argv if command is None else command.split()
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "command": " ".join(["foredraft", *map(_without_folders, words[1:])]),
        "foredraft": __version__,
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else processor(),
    }


def stored_acceptance_length(folder: str) -> float | None:
    """Tokens a target forward that a head or draft had when it was trained, greedy; None where no file says so."""
    try:
        validation = json.loads((Path(folder) / "provenance.json").read_text(encoding="utf-8"))["validation"]
        return max(float(validation["acceptance_length"]), 1.0)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def short(word: str) -> str:
    """A path without what depends on the machine."""
    return Path(word).name if word.startswith("/") else word


def _without_folders(word: str) -> str:
    """A word of a command, each absolute path in it (NAME=METHOD:PATH,...) cut to its last two parts."""
    parts = re.split(r"([:=,])", word)
    return "".join("/".join(Path(each).parts[1:][-2:]) if each.startswith("/") else each for each in parts)


def processor() -> str:
    """The processor's own name where Linux tells it, such as AMD EPYC."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _commit() -> str | None:
    """The commit of the source tree, with a plus where there are changes; None for an installed package."""
    here = Path(__file__).parents[1]
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
        state = subprocess.run(["git", "status", "--porcelain", "."], cwd=here, capture_output=True, text=True)
    except OSError:
        return None
    return None if head.returncode else head.stdout.strip() + ("+" if state.stdout.strip() else "")
