"""Where a run stands, on disk: whole or not at all, whenever it is killed."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foredraft.core.errors import DataError, OptionError


@dataclass(frozen=True, slots=True)
class RunState:
    """``step``: optimizer steps done; ``seconds``: of training so far."""

    step: int = 0
    seconds: float = 0.0


class Checkpoints:
    """One file with net, optimizer and place, replaced at once. ``options`` must be those that the run began with."""

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
        except Exception as error:  # torch raises many kinds for a broken file
            raise DataError(f"The checkpoint {self._path} cannot be read; delete it to begin again.") from error
        changed = {key for key, value in self._options.items() if saved["options"].get(key) != value}
        if changed:
            raise OptionError(
                f"{self._path.parent} was begun with another {', '.join(sorted(changed))}; give the same options to go "
                "on, or another folder to begin anew."
            )
        self._net.load_state_dict(saved["net"])
        self._optimizer.load_state_dict(saved["optimizer"])
        return RunState(saved["step"], saved["seconds"])

    def save(self, step: int, seconds: float) -> None:
        """Replace the file. A full disk leaves the one that was there, and is told."""
        saved = {
            "net": self._net.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "options": self._options,
            "step": step,
            "seconds": seconds,
        }
        partial = self._path.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                torch.save(saved, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self._path)
        except (OSError, RuntimeError) as error:
            partial.unlink(missing_ok=True)
            raise DataError(f"The checkpoint cannot be written to {self._path.parent}: {error}.") from error


class Log:
    """JSON Lines that are appended to. Lines after the checkpoint that a run goes on from are dropped first."""

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        if path.exists():
            lines = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
            path.write_text("".join(line + "\n" for line in lines))

    def write(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):  # a line that was cut off
        return float("inf")
