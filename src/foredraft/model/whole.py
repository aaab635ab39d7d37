"""Files that are there whole or not at all, whenever a process is killed."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
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


def write_text_whole(path: Path, text: str) -> None:
    """The same for a text, in UTF-8."""
    write_whole(path, lambda file: file.write(text.encode("utf-8")))


def save_whole(path: Path, saved: Any) -> None:
    """The same for ``torch.save``."""
    write_whole(path, lambda file: torch.save(saved, file))
