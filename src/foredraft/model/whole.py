"""Files that are there whole or not at all, whenever a process is killed."""

import os
from pathlib import Path
from typing import Any

import torch


def save_whole(path: Path, saved: Any) -> None:
    """``torch.save`` into a file beside, then in one move into its place; what was there stays until then.

    Raises:
        OSError, RuntimeError: it cannot be written; the file that was there is left, and nothing beside it.
    """
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            torch.save(saved, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, RuntimeError):
        partial.unlink(missing_ok=True)
        raise
