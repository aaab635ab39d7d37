"""Hidden states kept on disk, so that the target reads each text once for all recipes and all passes.

One file of bfloat16 states, a fixed place for each window of text, and a byte a window that says whether it is there.
The file is sparse: it takes what has been written. A window is marked after its states are written, so a run that is
killed leaves nothing half done; a disk that is full, or the bound, ends storing and not the training.
"""

import json
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
        folder: where the file is; one folder for each target, text and length.
        live: the target.
        taps: all hidden layers that are kept. A recipe may want fewer.
        bound: most bytes on disk.
    """

    def __init__(
        self, folder: Path, live: Live, taps: tuple[int, ...], shape: tuple[int, int, int], *, bound: int
    ) -> None:
        windows, length, width = shape
        self._live = live
        self._taps = tuple(sorted(set(taps)))
        self._shape = (windows, len(self._taps), length, width)
        self._folder = folder
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
        about = self._folder / "about.json"
        facts = json.dumps({"taps": self._taps, "shape": self._shape})
        if not about.exists() or about.read_text() != facts:
            for name in ("states.bin", "there.bin"):
                (self._folder / name).unlink(missing_ok=True)
            about.write_text(facts)
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


def _mapped(path: Path, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    return np.memmap(path, dtype=dtype, mode="r+" if path.exists() else "w+", shape=shape)
