"""Hidden states on disk, so that the target reads each window once for all recipes and epochs.

One sparse file of bfloat16 states with a fixed slot per window, and one byte per window that marks it as stored. A
window is marked after its states are written, so a killed run leaves no partial windows. A full disk or the size limit
stops storing, not the training.

States are rounded to bfloat16 with or without a store, so batches do not depend on what is stored.
"""

import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.train.data.batches import HiddenStateSource

_SPARE = 1 << 30  # bytes to leave free on the disk


class StoredFeatures:
    """Reads states from disk if stored, else from the target, and stores them.

    Args:
        parent: parent folder of the store; one per target and data.
        live: the target.
        taps: hidden layers to store; an existing store with more of them is reused.
        shape: number of windows, their length, and hidden size.
        bound: maximum bytes on disk.
    """

    def __init__(
        self, parent: Path, live: HiddenStateSource, taps: tuple[int, ...], shape: tuple[int, int, int], *, bound: int
    ) -> None:
        self._live = live
        self._shape = shape
        self._taps = tuple(sorted(set(taps)))
        self._reader = ThreadPoolExecutor(1, "hidden-states")
        self._next: tuple[tuple[list[int], tuple[int, ...]], Future[Tensor]] | None = None
        try:
            self._open(parent)
            self._capacity = bound // self._bytes_per_window()
        except OSError:
            self._capacity, self._stored = 0, np.zeros(shape[0], np.uint8)

    def read(self, windows: list[int], tokens: Tensor, taps: tuple[int, ...]) -> dict[int, Tensor]:
        if self._has(windows, taps):
            moved = self._stored_states(windows, tokens.device, taps).to(tokens.device, non_blocking=True)
            return {tap: each.float() for tap, each in zip(taps, moved.unbind(), strict=True)}
        known = set(taps) <= set(self._taps)
        store = known and int(self._stored.sum()) + len(windows) <= self._capacity
        hidden = self._live.read(windows, tokens, self._taps if store else taps)
        hidden = {tap: states.to(torch.bfloat16) for tap, states in hidden.items()}
        if store:
            self._store(windows, torch.stack([hidden[tap] for tap in self._taps], 1))
        return {tap: hidden[tap].float() for tap in taps}

    def prefetch(self, windows: list[int], device: torch.device, taps: tuple[int, ...]) -> None:
        """Read stored states in a thread, while the step before computes."""
        if self._has(windows, taps):
            self._next = ((windows, taps), self._reader.submit(self._read_stored, windows, device, taps))

    def _has(self, windows: list[int], taps: tuple[int, ...]) -> bool:
        return set(taps) <= set(self._taps) and all(self._stored[window] for window in windows)

    def _stored_states(self, windows: list[int], device: torch.device, taps: tuple[int, ...]) -> Tensor:
        known, self._next = self._next, None
        if known is not None and known[0] == (windows, taps):
            return known[1].result()
        return self._read_stored(windows, device, taps)

    def _read_stored(self, windows: list[int], device: torch.device, taps: tuple[int, ...]) -> Tensor:
        """[taps, windows, length, width]: these taps alone, in memory that a GPU copies from without a wait."""
        shape = (len(taps), len(windows), *self._states.shape[2:])
        states = torch.empty(shape, dtype=torch.int16, pin_memory=device.type == "cuda")
        for row, tap in zip(states.numpy(), taps, strict=True):
            index = self._taps.index(tap)
            for slot, window in zip(row, windows, strict=True):
                slot[:] = self._states[window, index]
        return states.view(torch.bfloat16)

    def _bytes_per_window(self) -> int:
        _, length, width = self._shape
        return 2 * len(self._taps) * length * width

    def _open(self, parent: Path) -> None:
        self._taps = _existing_taps(parent, self._shape, self._taps) or self._taps
        windows, length, width = self._shape
        self._folder = parent / _name(self._shape, self._taps)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._states = _mapped(self._folder / "states.bin", np.int16, (windows, len(self._taps), length, width))
        self._stored = _mapped(self._folder / "there.bin", np.uint8, (windows,))

    def _store(self, windows: list[int], states: Tensor) -> None:
        raw = states.detach().cpu().contiguous().view(torch.int16).numpy()
        try:
            if shutil.disk_usage(self._folder).free < _SPARE + raw.nbytes:
                self._capacity = 0
                return
            size = self._bytes_per_window()
            pieces = {window * size: values for window, values in zip(windows, raw, strict=True)}
            _put(self._folder / "states.bin", pieces)
            _put(self._folder / "there.bin", {window: np.ones(1, np.uint8) for window in windows})
        except OSError:
            self._capacity = 0


def _name(shape: tuple[int, int, int], taps: tuple[int, ...]) -> str:
    return "-".join(map(str, ("states", *shape, "taps", *(str(tap).replace("-1", "final") for tap in taps))))


def _existing_taps(parent: Path, shape: tuple[int, int, int], needed: tuple[int, ...]) -> tuple[int, ...] | None:
    """The taps of an existing store that has all needed ones; None if there is none."""
    for folder in sorted(parent.glob("states-*-taps-*")):
        taps = tuple(int(tap.replace("final", "-1")) for tap in folder.name.split("-taps-")[1].split("-"))
        if set(needed) <= set(taps) and folder.name == _name(shape, taps):
            return taps
    return None


def _mapped(path: Path, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Map a file of that size for reading. Several processes may create it at once without truncating it."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if os.fstat(number).st_size < size:
            os.ftruncate(number, size)
    finally:
        os.close(number)
    return np.memmap(path, dtype=dtype, mode="r", shape=shape)


def _put(path: Path, pieces: dict[int, np.ndarray]) -> None:
    """Write at these offsets, not through the map: on a full disk that would kill the process."""
    with path.open("r+b") as file:
        for place, values in pieces.items():
            file.seek(place)
            file.write(values.tobytes())
