"""Files are written whole or not at all, and checked before the work whose result they are to hold."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from foredraft.core.errors import OptionError, UsageError


def user_cache() -> Path:
    """Foredraft's folder in the user's cache; it need not be there yet."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "foredraft"


def atomic_write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write to a temporary file in the same folder, which is made if it is missing, then rename it to ``path``.

    Raises:
        OSError, RuntimeError: it cannot be written. After an error or interrupt the previous file is unchanged and the
            temporary file is removed.
    """
    if path.exists() and not path.is_file():  # write to a pipe or device; do not replace it
        with path.open("wb") as file:
            write(file)
        return
    path = path.resolve()  # replace a link's target, not the link
    partial = path.with_name(partial_name(path.name))
    path.parent.mkdir(parents=True, exist_ok=True)
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
    import torch  # takes seconds; the build of a wheel has none

    atomic_write(path, lambda file: torch.save(saved, file))


def partial_name(name: str) -> str:
    """The name under which a file or folder is written before it is renamed; no other program's."""
    return f".{name}.foredraft.partial"


@contextmanager
def atomic_folder(folder: Path, owned: Collection[str] = (), *, keep: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``folder`` when the block ends.

    If there is such a folder, the new files are moved there, config.json last, so that no incomplete model is read.

    Args:
        owned: names in the folder that an earlier call wrote, which may be replaced.
        keep: keep those that are no longer written.

    Raises:
        OptionError: a file of the same name is not ``owned``.
        OSError: it cannot be written. After an error or interrupt in the block all folders are as they were.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    partial = folder.with_name(partial_name(folder.name)) if missing else folder / partial_name(folder.name)
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    try:
        partial.mkdir(parents=True)
        yield partial
        if missing:
            partial.rename(folder)
        else:
            stale = [name for name in owned if not keep and Path(name).name == name and not (partial / name).exists()]
            _move_files(partial, folder, owned)
            for name in stale:
                _remove(folder / name)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        for each in missing:
            with suppress(OSError):
                each.rmdir()
        raise


def _move_files(partial: Path, folder: Path, owned: Collection[str]) -> None:
    """Move all files of a folder's ``partial`` there."""
    names = sorted(
        (path.name for path in partial.iterdir()),
        key=lambda name: (name == "config.json", name != "provenance.json", name),
    )
    for name in names:
        if name not in owned and os.path.lexists(folder / name):
            raise OptionError(
                f"{folder / name} was not written by this command: choose another folder, or remove the file."
            )
    for name in names:
        if (folder / name).is_dir():
            _remove(folder / name)
        (partial / name).replace(folder / name)
    partial.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_writable(path: str | Path) -> None:
    """Refuse a file that cannot be written, before the work whose result it is to hold. Leaves no trace: missing
    folders are made when it is written.

    Raises:
        OptionError: it cannot be written.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise OptionError(f"Cannot write {path}: it is a folder.")
        if path.is_file():
            path.open("ab").close()
        if not path.exists() or path.is_file():
            _try_folder(path.resolve().parent)
        elif not os.access(path, os.W_OK):  # a device, or a pipe: to open it could wait for its reader
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise OptionError(f"Cannot write {path}: {error.strerror}.") from None


def check_writable_folder(folder: str | Path) -> None:
    """The same for a folder, which will be made if it is missing."""
    try:
        _try_folder(Path(folder))
    except OSError as error:
        raise OptionError(f"Cannot write to the folder {folder}: {error.strerror}.") from None


def _try_folder(folder: Path) -> None:
    """Write a file without a name in a folder, or in the parent that it will be made in."""
    while not folder.exists():
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
