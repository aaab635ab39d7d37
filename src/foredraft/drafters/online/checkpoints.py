"""Versions of a drafter that learns, on disk: each whole or not at all, the last two of them."""

import hashlib
import pickle
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from foredraft.core.errors import DataError, OptionError
from foredraft.core.io import atomic_save
from foredraft.drafters.online.trainer import OnlineTrainer, Report

_KEPT = 2
_SAMPLE = 1024  # numbers of each tensor that a fingerprint looks at
_LOG = 1000  # reports that go on from version to version


class Checkpoints:
    """A folder with the last versions, ``version-00000012.pt`` and the one before.

    Args:
        folder: made if it is not there; never that of a model.
        base: the net as it was before it learned anything.
    """

    def __init__(self, folder: Path, base: nn.Module) -> None:
        self._folder = folder.expanduser()
        self._base = fingerprint(base)
        self._number = 0
        self.reports: tuple[Report, ...] = ()
        if (self._folder / "config.json").exists():
            raise OptionError(f"{folder} is a model's folder, which is never changed; give online another one.")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"online cannot write to the folder {folder}: {error.strerror}.") from error

    def resume(self, learner: OnlineTrainer) -> bool:
        """Go on from the last version that can be read; whether there was one.

        Raises:
            OptionError: the folder is of another draft.
            DataError: there are versions, and none of them can be read.
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
                    f"{self._folder} holds versions of another draft than this one; give online another folder."
                )
            learner.resume(state["learner"])
            self._number, self.reports = number, tuple(Report(**report) for report in reports)
            return True
        if files:
            raise DataError(f"No version in {self._folder} can be read; delete them to begin with the draft as it was.")
        return False

    def save(self, learner: OnlineTrainer, report: Report) -> None:
        """Write the present version; of those before it one is left.

        Raises:
            DataError: it cannot be written; the versions that there were are left.
        """
        self._number, self.reports = self._number + 1, (*self.reports[1 - _LOG :], report)
        reports = [asdict(each) for each in self.reports]
        state = {"base": self._base, "number": self._number, "reports": reports, "learner": learner.state()}
        try:
            atomic_save(self._folder / f"version-{self._number:08d}.pt", state)
            for file in self._files()[:-_KEPT]:
                file.unlink()
        except (OSError, RuntimeError) as error:
            raise DataError(f"A version cannot be written to {self._folder}: {error}.") from error

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("version-*.pt"))


def fingerprint(net: nn.Module) -> str:
    """What tells one net from another: names, shapes and some numbers of each tensor, rounded to bfloat16, so that it
    does not matter in which precision a net is served."""
    digest = hashlib.sha256()
    for name, weight in net.named_parameters():
        flat = weight.detach().flatten()
        some = flat[:: max(1, flat.shape[0] // _SAMPLE)][:_SAMPLE].bfloat16().float().cpu()
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(some.numpy().tobytes())
    return digest.hexdigest()
