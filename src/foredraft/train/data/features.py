"""Hidden states kept on disk, so that the target reads each text once for all recipes and all passes.

One file of bfloat16 states, a fixed place for each window of text, and a byte a window that says whether it is there.
The file is sparse: it takes what has been written. A window is marked after its states are written, so a run that is
killed leaves nothing half done; a disk that is full, or the bound, ends storing and not the training.

States are rounded to bfloat16 whether they come from the disk or not, and without a store, too: a lesson does not
depend on what was kept.
"""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foredraft.train.data.batches import Source

_SPARE = 1 << 30  # bytes that are left free on the disk


class Stored:
    """Reads states from disk where they are, else from the target, and keeps these.

    Args:
        parent: where the folder with the file is, or will be; one for each target and text.
        live: the target.
        taps: the hidden layers that are wanted. A folder that an earlier run has made with more of them is taken.
        shape: windows, their length, and the width of a state.
        bound: most bytes on disk.
        owner: which target this is; states that another of the same name has left there are not taken.
    """

    def __init__(
        self,
        parent: Path,
        live: Source,
        taps: tuple[int, ...],
        shape: tuple[int, int, int],
        *,
        bound: int,
        owner: str = "",
    ) -> None:
        self._live = live
        self._shape = shape
        self._taps = tuple(sorted(set(taps)))
        try:
            self._open(_owned(parent, owner))
            self._most = bound // self._bytes_a_window()
        except OSError:
            self._most, self._there = 0, np.zeros(shape[0], np.uint8)

    def read(self, windows: list[int], tokens: Tensor, taps: tuple[int, ...]) -> dict[int, Tensor]:
        known = set(taps) <= set(self._taps)
        if known and all(self._there[window] for window in windows):
            states = torch.stack([torch.from_numpy(np.array(self._states[w])).view(torch.bfloat16) for w in windows])
            return {tap: states[:, self._taps.index(tap)].to(tokens.device).float() for tap in taps}
        keep = known and int(self._there.sum()) + len(windows) <= self._most
        hidden = self._live.read(windows, tokens, self._taps if keep else taps)
        hidden = {tap: states.to(torch.bfloat16) for tap, states in hidden.items()}
        if keep:
            self._keep(windows, torch.stack([hidden[tap] for tap in self._taps], 1))
        return {tap: hidden[tap].float() for tap in taps}

    def _bytes_a_window(self) -> int:
        _, length, width = self._shape
        return 2 * len(self._taps) * length * width

    def _open(self, parent: Path) -> None:
        self._taps = _taps_there(parent, self._shape, self._taps) or self._taps
        windows, length, width = self._shape
        self._folder = parent / _name(self._shape, self._taps)
        self._folder.mkdir(exist_ok=True)
        self._states = _mapped(self._folder / "states.bin", np.int16, (windows, len(self._taps), length, width))
        self._there = _mapped(self._folder / "there.bin", np.uint8, (windows,))

    def _keep(self, windows: list[int], states: Tensor) -> None:
        raw = states.detach().cpu().contiguous().view(torch.int16).numpy()
        try:
            if shutil.disk_usage(self._folder).free < _SPARE + raw.nbytes:
                self._most = 0
                return
            size = self._bytes_a_window()
            pieces = {window * size: values for window, values in zip(windows, raw, strict=True)}
            _put(self._folder / "states.bin", pieces)
            _put(self._folder / "there.bin", {window: np.ones(1, np.uint8) for window in windows})
        except OSError:
            self._most = 0


def fingerprint(model: nn.Module) -> str:
    """The same for models with the same weights, as far as a few of each can tell."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        some = weight.detach().flatten()[:: max(1, weight.numel() // 64)]
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(some.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _owned(parent: Path, owner: str) -> Path:
    """The folder, or one beside it if this one is another target's."""
    note = parent / "target.txt"
    if note.exists() and note.read_text(encoding="utf-8") != owner:
        parent = parent.with_name(f"{parent.name}-{owner}")
        note = parent / "target.txt"
    parent.mkdir(parents=True, exist_ok=True)
    if not note.exists():
        note.write_text(owner, encoding="utf-8")
    return parent


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
    """A file of that size to look into. Several processes may make it at once: none cuts what another has written."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if os.fstat(number).st_size < size:
            os.ftruncate(number, size)
    finally:
        os.close(number)
    return np.memmap(path, dtype=dtype, mode="r", shape=shape)


def _put(path: Path, pieces: dict[int, np.ndarray]) -> None:
    """Write at these places. Not through the map: where a disk is full, that would kill the process."""
    with path.open("r+b") as file:
        for place, values in pieces.items():
            file.seek(place)
            file.write(values.tobytes())
