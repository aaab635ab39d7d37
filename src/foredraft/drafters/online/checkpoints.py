"""The last two versions of an online-trained drafter on disk, written atomically."""

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from foredraft.core.errors import DataError, OptionError
from foredraft.core.io import atomic_save
from foredraft.drafters.online.trainer import OnlineTrainer, Report

_KEPT = 2
_SAMPLE = 1024  # values of each tensor in a fingerprint


class Checkpoints:
    """A folder with the last versions, ``version-00000012.pt`` and the one before.

    Args:
        folder: created if missing; must not be a model's folder.
        base: the network before any online training.
    """

    def __init__(self, folder: Path, base: nn.Module) -> None:
        self._folder = folder.expanduser()
        self._base = fingerprint(base)
        self._number = 0
        if (self._folder / "config.json").exists():
            raise OptionError(f"{folder} is a model's folder, which is never changed: give online another folder.")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"online cannot write to the folder {folder}: {error.strerror}.") from error

    def resume(self, trainer: OnlineTrainer) -> tuple[Report, ...]:
        """Load the last readable version into the trainer; return its reports, or none if there is no version.

        Raises:
            OptionError: the folder holds versions of another draft.
            DataError: there are versions, but none can be read.
        """
        files = self._files()
        for file in reversed(files):
            try:
                state = torch.load(file, map_location="cpu", weights_only=True)
                base, number, reports = state["base"], state["number"], state["reports"]
            except (OSError, EOFError, KeyError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError):
                continue
            if base != self._base:
                raise OptionError(
                    f"{self._folder} holds versions of another draft than this one: give online another folder."
                )
            trainer.resume(state["learner"])
            self._number = number
            return tuple(Report(**report) for report in reports)
        if files:
            raise DataError(f"No version in {self._folder} can be read: delete them to start from the original draft.")
        return ()

    def save(self, trainer: OnlineTrainer, reports: Sequence[Report]) -> None:
        """Write the current version and the latest reports; keep one earlier version.

        Raises:
            DataError: it cannot be written; earlier versions are kept.
        """
        self._number += 1
        state = {
            "base": self._base,
            "number": self._number,
            "reports": [asdict(report) for report in reports],
            "learner": trainer.state(),
        }
        try:
            atomic_save(self._folder / f"version-{self._number:08d}.pt", state)
            for file in self._files()[:-_KEPT]:
                file.unlink()
        except (OSError, RuntimeError) as error:
            raise DataError(f"A version cannot be written to {self._folder}: {error}.") from error

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("version-*.pt"))


def fingerprint(net: nn.Module) -> str:
    """A hash of the names, shapes and some values of each tensor, rounded to bfloat16, so that it does not depend on
    the precision in which the network is served."""
    digest = hashlib.sha256()
    for name, weight in net.named_parameters():
        flat = weight.detach().flatten()
        some = flat[:: max(1, flat.shape[0] // _SAMPLE)][:_SAMPLE].bfloat16().float().cpu()
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(some.numpy().tobytes())
    return digest.hexdigest()
