"""Where a run stands, on disk: whole or not at all, whenever it is killed, and one run at a time."""

import contextlib
import errno
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foredraft.core.errors import DataError, OptionError
from foredraft.core.io import atomic_save, atomic_write_text, read_json, write_json

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

REPORTING = frozenset({"validate", "checkpoint", "report"})
"""Options of the loop that change nothing in the weights: a run may go on with others."""
_TAKEN = {errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK}  # what systems say where somebody else has the lock


@dataclass(frozen=True, slots=True)
class RunState:
    """``step``: optimizer steps done; ``seconds``: of training so far."""

    step: int = 0
    seconds: float = 0.0


@contextlib.contextmanager
def alone(folder: Path, lock: str = ".lock") -> Iterator[None]:
    """Keep every other run off a folder while inside; the folder is made where there is none.

    The lock is the system's: it ends with the process, however that ends, and the empty file that stays behind locks
    nothing. Where a file system has no locks, nobody is kept off.

    Args:
        lock: the file that is locked.

    Raises:
        OptionError: another run is at work there, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / lock).open("ab")
    except OSError as error:
        raise OptionError(f"Nothing can be written to the folder {folder}: {error.strerror}.") from None
    with file:
        try:
            _lock(file.fileno())
        except OSError as error:
            if error.errno in _TAKEN:
                raise OptionError(
                    f"Another run is at work in {folder}: wait until it has ended, or take another folder."
                ) from None
        yield


def _lock(number: int) -> None:
    """Lock an open file until it is closed; an ``OSError`` at once where that cannot be."""
    if sys.platform == "win32":
        msvcrt.locking(number, msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _begun_otherwise(folder: Path, changed: set[str]) -> OptionError:
    return OptionError(
        f"{folder} was begun with another {', '.join(sorted(changed))}; give the same options to go on, or another "
        "folder to begin anew."
    )


def check_resume(folder: Path, terms: dict[str, Any], write: bool) -> None:
    """Refuse to go on where a run in this folder was begun on other terms; what is not written down is not compared.

    Args:
        terms: what a run is made of besides the options of the loop, as JSON can hold it.
        write: write the terms down where a run begins: one process does.

    Raises:
        OptionError: the terms are others.
        DataError: those that were written down cannot be read, or these cannot be written.
    """
    path = folder / "run.json"
    terms = json.loads(json.dumps(terms))
    if (folder / "checkpoint.pt").exists():
        remedy = "delete it to go on with the options given now, or take another folder"
        begun = read_json(path, "what the run was begun with,", remedy, DataError) if path.exists() else {}
        if changed := {key for key, value in terms.items() if begun.get(key, value) != value}:
            raise _begun_otherwise(folder, changed)
    elif write:
        write_json(path, terms, DataError)


class Checkpoints:
    """One file with net, optimizer and place, replaced at once. ``options`` must be those that the run began with, but
    for ``REPORTING``."""

    def __init__(self, path: Path, net: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> None:
        self._path = path
        self._net = net
        self._optimizer = optimizer
        self._options = options

    def resume(self) -> RunState:
        """Load what is there; the beginning if nothing is.

        Raises:
            OptionError: the run was begun with other options.
            DataError: the file cannot be read.
        """
        if not self._path.exists():
            return RunState()
        try:
            saved = torch.load(self._path, map_location="cpu", weights_only=True)
            net, optimizer, begun = (saved[name] for name in ("net", "optimizer", "options"))
            if not all(isinstance(part, dict) for part in (net, optimizer, begun)):
                raise TypeError("parts of a checkpoint are dictionaries")
            state = RunState(int(saved["step"]), float(saved["seconds"]))
        except Exception as error:  # torch raises many kinds for a broken file
            raise DataError(f"The checkpoint {self._path} cannot be read; delete it to begin again.") from error
        changed = {key for key in self._options.keys() - REPORTING if begun.get(key) != self._options[key]}
        if changed:
            raise _begun_otherwise(self._path.parent, changed)
        try:
            self._net.load_state_dict(net)
            self._optimizer.load_state_dict(optimizer)
        except (RuntimeError, ValueError, KeyError) as error:
            raise _begun_otherwise(self._path.parent, {"head"}) from error
        return state

    def save(self, step: int, seconds: float) -> None:
        """Replace the file. A full disk leaves the one that was there, and is told."""
        saved = {
            "net": self._net.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "options": self._options,
            "step": step,
            "seconds": seconds,
        }
        try:
            atomic_save(self._path, saved)
        except (OSError, RuntimeError) as error:
            raise DataError(f"The checkpoint cannot be written to {self._path.parent}: {error}.") from error


class Log:
    """JSON Lines that are appended to. Lines after the checkpoint that a run goes on from are dropped first."""

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        if path.exists():
            text = path.read_text(encoding="utf-8", errors="replace")
            lines = [line for line in text.splitlines() if _step_of(line) <= step]
            atomic_write_text(path, "".join(line + "\n" for line in lines))

    def write(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # a line that was cut off
        return float("inf")
