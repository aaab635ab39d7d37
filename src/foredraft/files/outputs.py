"""What commands write: one process at a time, and only over what the same command has written.

A file names its command in its text or metadata, a folder in ``provenance.json`` beside the names of its files. What
names no command, or another one, is someone else's and stays as it is.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from foredraft.core.errors import OptionError, UsageError
from foredraft.files.read import read_json
from foredraft.files.write import atomic_folder, check_writable, check_writable_folder

RECORD = "provenance.json"
"""The file of a folder that names its command (``written_by``), what it was made from, and its ``files``."""
_MARKS = (
    '"written_by": "{}"',  # JSON, JSON Lines
    '<meta name="generator" content="{}">',  # HTML
    "<dc:title>{}</dc:title>",  # SVG
    "Software\0{}",  # PNG
    "/Creator ({})",  # PDF
)
_ENDS = 1 << 16
"""Bytes at each end of a file in which its mark is looked for."""


def written_by(command: str) -> dict[str, str]:
    """The mark of a JSON file, for its object or for the first line of JSON Lines."""
    return {"written_by": f"foredraft {command}"}


def generator_tag(command: str) -> str:
    """The mark of an HTML page, for its head."""
    return _MARKS[1].format(f"foredraft {command}")


def is_written_by(path: Path, command: str) -> bool:
    """Whether a file has the mark of a command near one of its ends.

    Raises:
        OptionError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            ends = file.read(_ENDS)
            file.seek(max(len(ends), path.stat().st_size - _ENDS))
            ends += file.read(_ENDS)
    except OSError as error:
        raise OptionError(f"Cannot read {path}: {error.strerror}.") from None
    return any(mark.format(f"foredraft {command}").encode() in ends for mark in _MARKS)


@contextlib.contextmanager
def output_file(path: str | Path, command: str) -> Iterator[None]:
    """Hold a file that is written whole, from before the work until its result is there.

    A missing or empty file may be written, one with the mark of ``command`` replaced. A device or a pipe is written to,
    and never read.

    Raises:
        OptionError: the file is another's, in use, or cannot be written.
    """
    path = Path(path)
    check_writable(path)
    if path.exists() and not path.is_file():
        yield
        return
    with locked(path):
        if not _empty(path) and not is_written_by(path, command):
            raise OptionError(
                f"{path} exists, and foredraft {command} did not write it: choose another file, or remove this one."
            )
        yield


@contextlib.contextmanager
def continued_file(path: str | Path) -> Iterator[None]:
    """Hold a file that is read and continued, whose contents the caller checks.

    Raises:
        OptionError: it is a device or a pipe, in use, or cannot be written.
    """
    path = Path(path)
    check_writable(path)
    if path.exists() and not path.is_file():
        raise OptionError(f"{path} is no file that could be read and continued: choose another.")
    with locked(path):
        yield


@contextlib.contextmanager
def output_folder(folder: str | Path, command: str, about: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Hold a folder that is written whole; see ``check_output_folder`` for its conditions.

    Raises:
        OptionError: the folder is another's, in use, or cannot be written.
    """
    folder = Path(folder).expanduser()
    check_writable_folder(folder)
    with locked(folder):
        check_output_folder(folder, command, about)
        yield


def check_output_folder(folder: Path, command: str, about: Mapping[str, Any] | None = None) -> frozenset[str]:
    """The names of the files in a folder that ``command`` may replace; none if the folder is missing or empty.

    Args:
        about: what the contents are made from, as in the folder's record: with other values it is another result.

    Raises:
        OptionError: the folder holds something else.
    """
    if not folder.exists() or all(each.name.startswith(".") for each in folder.iterdir()):
        return frozenset()
    record, maker = _record(folder), f"foredraft {command}"
    if record.get("written_by") != maker:
        raise OptionError(
            f"The folder {folder} holds something that {maker} did not write: choose another, or remove this one."
        )
    for name, value in (about or {}).items():
        if record.get(name) != value:
            raise OptionError(
                f"The folder {folder} was written with {name} {record.get(name)!r}, not {value!r}: choose another, or "
                "remove this one."
            )
    return _files(record)


@contextlib.contextmanager
def replaced_folder(folder: Path, command: str, about: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """Yield a temporary folder whose files become those of ``folder``, with their record, when the block ends.

    What an earlier call wrote is replaced or removed; other files stay.

    Args:
        about: goes into the record; see ``check_output_folder``.

    Raises:
        OptionError: the folder holds something else, or a file of the same name is another's.
        OSError: the folder cannot be written; then it is as it was.
    """
    with atomic_folder(folder, check_output_folder(folder, command, about)) as partial:
        yield partial
        notes = read_json(partial / RECORD, OptionError) if (partial / RECORD).exists() else {}
        files = sorted({RECORD, *(each.name for each in partial.iterdir())})
        notes = {**notes, **(about or {}), **written_by(command), "files": files}
        (partial / RECORD).write_text(json.dumps(notes, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def files_in_folder(folder: Path, command: str) -> Iterator[Path]:
    """Yield a temporary folder whose files are moved to ``folder``, each with its mark, when the block ends.

    Raises:
        OptionError: a file of the same name has not the mark of ``command``.
        OSError: the folder cannot be written; then it is as it was.
    """
    there = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    with atomic_folder(folder, [path.name for path in there if is_written_by(path, command)], keep=True) as partial:
        yield partial


@contextlib.contextmanager
def locked(path: Path, lock: str = "") -> Iterator[None]:
    """Hold the lock of a file or folder, with a file that is removed afterwards; the lock ends with the process.

    Args:
        lock: name of a lock in a folder, which is made if it is missing; by default one in a folder that exists, or
            beside a file.

    Raises:
        OptionError: another process holds it, or it cannot be made.
    """
    path, kind = path.expanduser(), "folder" if lock or path.is_dir() else "file"
    whole = path.resolve()
    file = whole / (lock or ".lock") if kind == "folder" else whole.with_name(f".{whole.name}.lock")
    missing = [each for each in file.parents if not each.exists()]
    held = FileLock(file, blocking=False)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        held.acquire()
    except Timeout:
        raise OptionError(f"Another run uses {path}: wait until it ends, or use another {kind}.") from None
    except OSError as error:
        raise OptionError(f"Cannot write to the folder {file.parent}: {error.strerror}.") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink()  # while it is held, so that no other process's is removed
        held.release()
        with contextlib.suppress(OSError):  # a folder with something in it stays
            for each in missing:
                each.rmdir()


def may_cut(torn: bytes, line: bytes) -> bool:
    """Whether the torn end of a file may be removed: it is the begin of ``line``, or begins with it."""
    return torn[: len(line)] == line[: len(torn)]


def _empty(path: Path) -> bool:
    return not path.exists() or not path.stat().st_size


def _record(folder: Path) -> dict[str, Any]:
    """The record of a folder; empty if it has none that can be read."""
    try:
        return read_json(folder / RECORD, OptionError) if (folder / RECORD).is_file() else {}
    except UsageError:
        return {}


def _files(record: Mapping[str, Any]) -> frozenset[str]:
    found = record.get("files")
    return frozenset(each for each in found if isinstance(each, str)) if isinstance(found, list) else frozenset()
