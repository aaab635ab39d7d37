"""Hidden states kept on disk, so that the target reads each text once for all recipes and all passes.

One file of bfloat16 states, a fixed place for each window of text, and a byte a window that says whether it is there.
The file is sparse: it takes what has been written. A window is marked after its states are written, so a run that is
killed leaves nothing half done; a disk that is full, or the bound, ends storing and not the training.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.train.lessons import Live

_SPARE = 1 << 30  # bytes that are left free on the disk


class Stored:
    """Reads states from disk where they are, else from the target, and keeps these.

    Args:
        parent: where the folder with the file is, or will be; one for each target and text.
        live: the target.
        taps: the hidden layers that are wanted. A folder that an earlier run has made with more of them is taken.
        shape: windows, their length, and the width of a state.
        bound: most bytes on disk.
    """

    def __init__(
        self, parent: Path, live: Live, taps: tuple[int, ...], shape: tuple[int, int, int], *, bound: int
    ) -> None:
        windows, length, width = shape
        self._live = live
        self._taps = _taps_there(parent, shape, taps) or tuple(sorted(set(taps)))
        self._shape = (windows, len(self._taps), length, width)
        self._folder = parent / _name(shape, self._taps)
        self._left = bound // (2 * len(self._taps) * length * width)
        self._open()

    def read(self, windows: list[int], tokens: Tensor, taps: tuple[int, ...]) -> dict[int, Tensor]:
        known = set(taps) <= set(self._taps)
        if known and all(self._there[window] for window in windows):
            states = torch.stack([torch.from_numpy(np.array(self._file[w])).view(torch.bfloat16) for w in windows])
            return {tap: states[:, self._taps.index(tap)].to(tokens.device) for tap in taps}
        if not known or self._left < len(windows):
            return self._live.read(windows, tokens, taps)
        hidden = self._live.read(windows, tokens, self._taps)
        self._keep(windows, torch.stack([hidden[tap] for tap in self._taps], 1))
        return {tap: hidden[tap] for tap in taps}

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = _mapped(self._folder / "states.bin", np.int16, self._shape)
        self._there = _mapped(self._folder / "there.bin", np.uint8, self._shape[:1])
        self._left -= int(self._there.sum())

    def _keep(self, windows: list[int], states: Tensor) -> None:
        if shutil.disk_usage(self._folder).free < _SPARE:
            self._left = 0
            return
        raw = states.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy()
        for window, values in zip(windows, raw, strict=True):
            self._file[window] = values
            self._there[window] = 1
        self._left -= len(windows)


def _name(shape: tuple[int, int, int], taps: tuple[int, ...]) -> str:
    return "-".join(map(str, ("states", *shape, "taps", *(str(tap).replace("-1", "final") for tap in taps))))


def _taps_there(parent: Path, shape: tuple[int, int, int], wanted: tuple[int, ...]) -> tuple[int, ...] | None:
    """The taps of a folder that has all that is wanted; None if there is none."""
    for folder in sorted(parent.glob("states-*-taps-*")):
        taps = tuple(int(tap.replace("final", "-1")) for tap in folder.name.split("-taps-")[1].split("-"))
        if set(wanted) <= set(taps) and folder.name == _name(shape, taps):
            return taps
    return None


def _mapped(path: Path, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    return np.memmap(path, dtype=dtype, mode="r+" if path.exists() else "w+", shape=shape)
