"""Checkpoints, logs and locks of a run: atomic writes, one run per folder."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foredraft.core.errors import DataError, OptionError
from foredraft.files.outputs import is_written_by, written_by
from foredraft.files.read import read_json
from foredraft.files.write import atomic_save, atomic_write_text, write_json

Report = Callable[[dict[str, Any]], None]
"""Called with each line of a log."""
REPORTING = frozenset({"validate", "checkpoint", "checkpoint_seconds", "report"})
"""Loop options that do not affect the weights and may change when a run resumes."""


@dataclass(frozen=True, slots=True)
class RunState:
    """``step``: optimizer steps done; ``seconds``: training time so far."""

    step: int = 0
    seconds: float = 0.0


_LABELS = {"accumulate": "product of accumulate and the number of processes"}


def _settings_changed(folder: Path, changed: set[str]) -> OptionError:
    names = ", ".join(_LABELS.get(name, name) for name in sorted(changed))
    return OptionError(
        f"The run in {folder} started with another {names}; use the same options to resume it, or another folder for a "
        "new run."
    )


def check_resume(folder: Path, terms: dict[str, Any], write: bool) -> None:
    """Refuse to resume a run with other settings; settings that its file lacks are not compared.

    Args:
        terms: the run's settings besides the loop options, JSON-serializable.
        write: write the settings of a new run; true in one process.

    Raises:
        OptionError: the settings differ, or the folder has files of these names that no run wrote.
        DataError: the settings file cannot be read or written.
    """
    path = folder / "run.json"
    if (folder / "checkpoint.pt").exists():
        if changed := changed_terms(path, terms):
            raise _settings_changed(folder, changed)
    elif write:
        _check_new(folder)
        write_json(path, {**terms, **written_by("train")}, DataError)


def changed_terms(path: Path, terms: dict[str, Any]) -> set[str]:
    """The settings of a run that differ from those in its file; what the file lacks is not compared.

    Raises:
        DataError: the file cannot be read.
    """
    remedy = "delete it to resume with the current options, or use another folder"
    stored = read_json(path, DataError, remedy=remedy) if path.exists() else {}
    terms = json.loads(json.dumps(terms))
    return {key for key, value in terms.items() if stored.get(key, value) != value}


def _check_new(folder: Path) -> None:
    """Refuse files that a new run would replace, unless an earlier one wrote them.

    Raises:
        OptionError: there are such files.
    """
    path, log = folder / "run.json", folder / "log.jsonl"
    if path.exists() and not is_written_by(path, "train"):
        raise OptionError(f"{path} exists, and foredraft train did not write it: use another folder.")
    if log.exists() and log.stat().st_size and not path.exists():
        raise OptionError(f"{log} exists without the run.json of its run: use another folder, or remove the log.")


def resumable(folder: Path) -> bool:
    """Whether a run in the folder, or one of its parts, would continue from something that an earlier one has saved."""
    return any(path.is_file() for pattern in ("*.pt", "*/*.pt") for path in folder.glob(pattern))


class Checkpoints:
    """One file with net, optimizer and step, replaced atomically. Apart from ``REPORTING``, ``options`` must not change
    during a run.

    ``step``: the step in the file; 0 without one.
    """

    def __init__(self, path: Path, net: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> None:
        self._path = path
        self._net = net
        self._optimizer = optimizer
        self._options = options
        self.step = 0
        self._saved = time.monotonic()

    @property
    def age(self) -> float:
        """Seconds since the file was written, or since the run began."""
        return time.monotonic() - self._saved

    def resume(self) -> RunState:
        """Load the checkpoint, if there is one.

        Raises:
            OptionError: the run started with other options.
            DataError: the file cannot be read.
        """
        if not self._path.exists():
            return RunState()
        try:
            saved = torch.load(self._path, map_location="cpu", weights_only=True)
            net, optimizer, options = (saved[name] for name in ("net", "optimizer", "options"))
            if not all(isinstance(part, dict) for part in (net, optimizer, options)):
                raise TypeError("parts of a checkpoint are dictionaries")
            state = RunState(int(saved["step"]), float(saved["seconds"]))
        except Exception as error:  # torch raises many kinds for a broken file
            raise DataError(f"Cannot read the checkpoint {self._path}; delete it to start over.") from error
        changed = {key for key in self._options.keys() - REPORTING if options.get(key) != self._options[key]}
        if changed:
            raise _settings_changed(self._path.parent, changed)
        try:
            self._net.load_state_dict(net)
            self._optimizer.load_state_dict(optimizer)
        except (RuntimeError, ValueError, KeyError) as error:
            raise _settings_changed(self._path.parent, {"head"}) from error
        self.step = state.step
        return state

    def save(self, step: int, seconds: float) -> None:
        """Replace the file; on failure the old one remains.

        Raises:
            DataError: the file cannot be written, e.g. because the disk is full.
        """
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
            raise DataError(f"Cannot write the checkpoint to {self._path.parent}: {error}.") from error
        self.step, self._saved = step, time.monotonic()


class Log:
    """A JSON Lines log, whose lines are also reported. Lines after the resumed checkpoint are dropped first.

    ``validated``: the step of the last validation in it.

    Args:
        place: progress so far. A resumed run is logged and reported; a finished or a new one is only reported.
    """

    def __init__(self, path: Path, place: dict[str, Any], report: Report) -> None:
        self._path = path
        self._report = report
        self.validated = 0
        if path.exists():
            text = path.read_text(encoding="utf-8", errors="replace")
            lines = [line for line in text.splitlines() if _step_of(line) <= place["step"]]
            self.validated = max((int(_step_of(line)) for line in lines if '"validation"' in line), default=0)
            atomic_write_text(path, "".join(line + "\n" for line in lines))
        if not place["step"]:
            report({"begun": True, **place})
        else:
            (self.write if place["step"] < place["steps"] else report)({"resumed": True, **place})

    def write(self, line: dict[str, Any]) -> None:
        """Append a line and report it."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._report(line)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # an incomplete line
        return float("inf")
