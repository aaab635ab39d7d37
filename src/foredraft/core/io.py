"""File output: atomic writes, small JSON files, provenance."""

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from foredraft.core.errors import DataError, DrafterError, OptionError, UsageError
from foredraft.core.version import __version__


def atomic_write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write to a temporary file in the same folder, then rename it to ``path``.

    Raises:
        OSError, RuntimeError: it cannot be written. After an error or interrupt the previous file is unchanged and the
            temporary file is removed.
    """
    if path.exists() and not path.is_file():  # write to a pipe or device; do not replace it
        with path.open("wb") as file:
            write(file)
        return
    path = path.resolve()  # replace a link's target, not the link
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
    """Write a string atomically, in UTF-8."""
    atomic_write(path, lambda file: file.write(text.encode("utf-8")))


def atomic_save(path: Path, saved: Any) -> None:
    """``torch.save`` atomically."""
    atomic_write(path, lambda file: torch.save(saved, file))


def check_writable(path: str | Path, *, parents: bool = False) -> None:
    """Refuse a file that cannot be written, before the work whose result it is to hold. Leaves no trace.

    Args:
        parents: missing folders will be made.

    Raises:
        OptionError: it cannot be written.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise OptionError(f"Cannot write {path}: it is a folder.")
        if path.exists():
            path.open("ab").close()
        if not path.exists() or path.is_file():  # else it is a device, or a pipe
            _try_folder(path.parent, parents)
    except FileNotFoundError:
        raise OptionError(f"Cannot write {path}: there is no such folder.") from None
    except OSError as error:
        raise OptionError(f"Cannot write {path}: {error.strerror}.") from None


def check_writable_folder(folder: str | Path) -> None:
    """The same for a folder, which will be made if it is missing."""
    try:
        _try_folder(Path(folder), parents=True)
    except OSError as error:
        raise OptionError(f"Cannot write to the folder {folder}: {error.strerror}.") from None


def _try_folder(folder: Path, parents: bool) -> None:
    """Write a file without a name in a folder, or in the parent that it will be made in."""
    while parents and not folder.exists():
        folder = folder.parent
    with tempfile.TemporaryFile(dir=folder):
        pass


def write_text(path: str | Path, text: str, error: type[UsageError] = OptionError) -> None:
    """Write a string atomically; raise ``error`` if the file cannot be written."""
    try:
        atomic_write_text(Path(path), text)
    except OSError as found:
        raise error(f"Cannot write {path}: {found.strerror}.") from None


def write_json(path: str | Path, record: Mapping[str, Any], error: type[UsageError] = OptionError) -> None:
    """Write a JSON object atomically; raise ``error`` if the file cannot be written."""
    write_text(path, json.dumps(record, indent=2) + "\n", error)


def read_json(path: str | Path, what: str, remedy: str, error: type[UsageError] = DrafterError) -> dict[str, Any]:
    """Read a JSON object from a file.

    Args:
        what: what the file should be, for the error message.
        remedy: what to do about a truncated or wrong file, for the error message.
        error: the exception class to raise.

    Raises:
        UsageError: the file cannot be read or is not a JSON object (an ``error``).
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as found:
        raise error(f"Cannot read {what} {path}: {found.strerror}.") from None
    except (ValueError, RecursionError) as found:
        raise error(f"{path} is not JSON ({found}) and may be truncated; {remedy}.") from None
    if not isinstance(record, dict):
        raise error(f"{path} is not a JSON object; {remedy}.")
    return record


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


def provenance(command: str | None = None) -> dict[str, Any]:
    """Versions, hardware, commit and command of this process. Absolute paths are cut to their last two parts."""
    words = sys.argv if command is None else command.split()
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "command": " ".join(["foredraft", *map(shortened, words[1:])]),
        "foredraft": __version__,
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else processor(),
    }


def fingerprint(net: nn.Module) -> str:
    """A hash of the names, shapes and some values of all weights, rounded to bfloat16, so that it does not depend on
    the precision in which the network is loaded."""
    digest = hashlib.sha256()
    for name, weight in net.named_parameters():
        some = weight.detach().flatten()[:: max(1, weight.numel() // 1024)].bfloat16().float().cpu()
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(some.numpy().tobytes())
    return digest.hexdigest()[:16]


def stored_acceptance_length(folder: str) -> float | None:
    """The greedy acceptance length that training recorded for a head or draft model; None if not recorded."""
    try:
        validation = json.loads((Path(folder) / "provenance.json").read_text(encoding="utf-8"))["validation"]
        return max(float(validation["acceptance_length"]), 1.0)
    except (OSError, ValueError, KeyError, TypeError):
        return None


CALIBRATION = "calibration.json"
"""In the folder of a head or draft model: by method, the weights of its acceptance model; see ``Policy.state``."""


def stored_calibration(folder: str, method: str) -> dict[str, Any]:
    """What ``store_calibration`` has stored for a method, as a policy's state; empty if there is nothing."""
    try:
        return {"weights": json.loads((Path(folder) / CALIBRATION).read_text(encoding="utf-8"))[method]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def store_calibration(folder: str, method: str, weights: Mapping[str, Any]) -> Path:
    """Store the acceptance weights of a method, by temperature, beside those of other methods and temperatures.

    Raises:
        OptionError: the file cannot be written.
    """
    path = Path(folder) / CALIBRATION
    try:
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        rounded = {heat: [round(weight, 4) for weight in each] for heat, each in weights.items()}
        atomic_write_text(path, json.dumps({**known, method: {**known.get(method, {}), **rounded}}, indent=2) + "\n")
    except OSError as error:
        raise OptionError(f"Cannot write {path}: {error.strerror}; remove --calibrate.") from None
    return path


def short(word: str) -> str:
    """The file name of an absolute path; other strings unchanged."""
    return Path(word).name if word.startswith("/") else word


def relative_name(name: str, folder: Path) -> str:
    """A model's folder as a path from another folder, so that both can be moved together; other names unchanged."""
    return os.path.relpath(Path(name).expanduser(), folder) if Path(name).expanduser().is_dir() else name


def shortened(word: str) -> str:
    """A word of a command or a spec (NAME=METHOD:PATH+PATH,...) with each absolute path cut to its last two parts."""
    parts = re.split(r"([:=,+\[\]])", word)
    return "".join("/".join(Path(each).parts[1:][-2:]) if each.startswith("/") else each for each in parts)


def processor() -> str:
    """The processor's model name, from /proc/cpuinfo on Linux."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _commit() -> str | None:
    """The commit of the source tree, with "+" if there are changes; None for an installed package."""
    here = Path(__file__).parents[1]
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
        state = subprocess.run(["git", "status", "--porcelain", "."], cwd=here, capture_output=True, text=True)
    except OSError:
        return None
    return None if head.returncode else head.stdout.strip() + ("+" if state.stdout.strip() else "")
