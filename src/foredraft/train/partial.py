"""Intermediate results on disk, of computations that are no training but take as long."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from foredraft.core.errors import DataError
from foredraft.files.write import atomic_save
from foredraft.train.interruptions import Interruptions


class ResumableState:
    """The ``state`` of a computation: what an earlier call has saved with the same terms, else ``start``.

    As a context, saves the state when the computation is interrupted.

    Args:
        path: of the file; None keeps nothing.
        terms: what the results depend on, in types that ``torch.load`` reads with ``weights_only``.
        seconds: most seconds between savings.
    """

    def __init__(self, path: Path | None, terms: dict[str, Any], start: dict[str, Any], seconds: float = 120.0) -> None:
        self._path, self._terms, self._seconds = path, terms, seconds
        self._interruptions = Interruptions()
        self._saved, self._changed = time.monotonic(), False
        self.state: dict[str, Any] = start
        if path is not None and path.exists():
            with contextlib.suppress(Exception):  # torch raises many kinds for a broken file; then it starts over
                found = torch.load(path, map_location="cpu", weights_only=True)
                self.state = found["state"] if found["terms"] == terms else start

    def __enter__(self) -> "ResumableState":
        self._interruptions.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is not None and issubclass(kind, KeyboardInterrupt) and self._changed:
                with self._interruptions.deferred():
                    self._save()
        finally:
            self._interruptions.__exit__()

    @contextlib.contextmanager
    def update(self) -> Iterator[dict[str, Any]]:
        """Change the state, which no interruption cuts in half; then save it if the file is old."""
        with self._interruptions.deferred():
            yield self.state
            self._changed = True
            if time.monotonic() - self._saved >= self._seconds:
                self._save()

    def remove(self) -> None:
        """Remove the file, after the computation's result has been written."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _save(self) -> None:
        if self._path is None:
            return
        try:
            atomic_save(self._path, {"terms": self._terms, "state": self.state})
        except (OSError, RuntimeError) as error:
            raise DataError(f"Cannot write {self._path}: {error}.") from error
        self._saved, self._changed = time.monotonic(), False
