"""Training batches: which windows a step reads, with the target's hidden states."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from foredraft.core.errors import DataError
from foredraft.model.base import TargetModel
from foredraft.train.data.tokens import TokenStore
from foredraft.train.recipe import TrainBatch

HELD_OUT = 16
"""Number of windows held out for validation."""
LEAST_WINDOWS = HELD_OUT + 1


class HiddenStateSource(Protocol):
    """A source of hidden states: the target, or a store."""

    def read(self, windows: list[int], tokens: Tensor, taps: tuple[int, ...]) -> dict[int, Tensor]: ...

    def prefetch(self, windows: list[int], device: torch.device, taps: tuple[int, ...]) -> None:
        """What the next ``read`` will ask for; the source may begin."""


class TrainBatches:
    """Batches by number. Each epoch has its own order, drawn from the seed.

    Raises:
        DataError: too few windows.
    """

    def __init__(
        self, store: TokenStore, source: HiddenStateSource, taps: tuple[int, ...], length: int, device: Any
    ) -> None:
        count = store.windows(length)
        if count < LEAST_WINDOWS:
            raise DataError(
                f"The data has {len(store.ids)} tokens, too few for {LEAST_WINDOWS} windows of {length}: add data or "
                "lower --length."
            )
        self._store = store
        self._source = source
        self._taps = taps
        self._length = length
        self.device = torch.device(device)
        fixed = torch.randperm(count, generator=torch.Generator().manual_seed(1234))
        self._held_out, self._trained = fixed[:HELD_OUT], fixed[HELD_OUT:]
        self._order: tuple[tuple[int, int], Tensor] = ((-1, -1), self._trained)

    def tokens_per_step(self, options: Any, processes: int) -> int:
        return options.batch * options.accumulate * options.length * processes

    def steps(self, options: Any, processes: int) -> int:
        return max(1, options.tokens // self.tokens_per_step(options, processes))

    def batch(self, number: int, options: Any, share: tuple[int, int]) -> TrainBatch:
        """Batch ``number`` for the process ``share = (index, number of processes)``."""
        index, processes = share
        first = (number * processes + index) * options.batch
        batch = self._read(
            self._windows(first, options), options.seed + 1_000_003 * (number * processes + index) + 1, self._taps
        )
        if self._taps:
            self._source.prefetch(self._windows(first + processes * options.batch, options), self.device, self._taps)
        step = number // options.accumulate
        return replace(batch, step=step, progress=step / self.steps(options, processes))

    def _windows(self, first: int, options: Any) -> list[int]:
        return [self._window(place, options.seed) for place in range(first, first + options.batch)]

    def held_out(self, count: int, taps: tuple[int, ...] | None = None) -> list[TrainBatch]:
        """Held-out batches of one window each; ``taps`` defaults to the recipe's."""
        chosen = self._taps if taps is None else taps
        return [self._read([int(window)], seed, chosen) for seed, window in enumerate(self._held_out[:count])]

    def windows(self, options: Any, processes: int) -> list[int]:
        """The numbers of all windows that a run with these options reads, those held out included, in order."""
        places = range(self.steps(options, processes) * options.accumulate * processes * options.batch)
        return sorted({self._window(place, options.seed) for place in places} | set(self._held_out.tolist()))

    def of(self, windows: Sequence[int], size: int) -> Iterator[tuple[list[int], TrainBatch]]:
        """These windows in batches of ``size``, with their numbers."""
        for first in range(0, len(windows), size):
            some = list(windows[first : first + size])
            yield some, self._read(some, 0, self._taps)

    def _window(self, place: int, seed: int) -> int:
        epoch, offset = divmod(place, len(self._trained))
        if self._order[0] != (seed, epoch):
            rng = torch.Generator().manual_seed(seed * 7919 + epoch)
            self._order = ((seed, epoch), self._trained[torch.randperm(len(self._trained), generator=rng)])
        return int(self._order[1][offset])

    def _read(self, windows: list[int], seed: int, taps: tuple[int, ...]) -> TrainBatch:
        pieces = [self._store.window(window, self._length) for window in windows]
        tokens = torch.stack([ids for ids, _ in pieces]).to(self.device)
        weights = torch.stack([counts for _, counts in pieces]).to(self.device)
        return TrainBatch(tokens, weights, self._source.read(windows, tokens, taps) if taps else {}, seed)


class LiveFeatures:
    """Hidden states computed by the target on demand, rounded to bfloat16 as in a store."""

    def __init__(self, target: TargetModel, autocast: Any) -> None:
        self._target = target
        self._autocast = autocast

    def read(self, windows: list[int], tokens: Tensor, taps: tuple[int, ...]) -> dict[int, Tensor]:
        with self._autocast():
            states = self._target.read(tokens, taps)
        return {tap: each.to(torch.bfloat16).float() for tap, each in states.items()}

    def prefetch(self, windows: list[int], device: torch.device, taps: tuple[int, ...]) -> None:
        """Nothing: the target's time is the training's."""
