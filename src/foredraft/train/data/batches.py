"""From windows of text to lessons: which texts a step reads, and what the target makes of them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from foredraft.core.errors import DataError
from foredraft.model.hf import CausalLM
from foredraft.train.data.tokens import TokenStore
from foredraft.train.recipe import Lesson

HELD_OUT = 16
"""Windows of text that are never trained on, for validation."""


@runtime_checkable
class Source(Protocol):
    """Where hidden states come from: the target itself, or a store of what it has said before."""

    def read(self, windows: list[int], tokens: Tensor, taps: tuple[int, ...]) -> dict[int, Tensor]: ...


class Lessons:
    """Batches by number. Each pass over the texts has an order of its own, drawn from the seed."""

    def __init__(self, store: TokenStore, source: Source, taps: tuple[int, ...], length: int, device: Any) -> None:
        count = store.windows(length)
        if count <= HELD_OUT:
            raise DataError(
                f"There are {len(store.ids)} tokens of training text, too few for {HELD_OUT + 1} windows of {length}."
            )
        self._store = store
        self._source = source
        self._taps = taps
        self._length = length
        self.device = torch.device(device)
        fixed = torch.randperm(count, generator=torch.Generator().manual_seed(1234))
        self._held_out, self._learned = fixed[:HELD_OUT], fixed[HELD_OUT:]
        self._order: tuple[tuple[int, int], Tensor] = ((-1, -1), self._learned)

    def tokens_a_step(self, options: Any, processes: int) -> int:
        return options.batch * options.accumulate * options.length * processes

    def steps(self, options: Any, processes: int) -> int:
        return max(1, options.tokens // self.tokens_a_step(options, processes))

    def lesson(self, number: int, options: Any, share: tuple[int, int]) -> Lesson:
        """Batch ``number`` of the process ``share = (index, of)``."""
        index, processes = share
        first = (number * processes + index) * options.batch
        windows = [self._window(place, options.seed) for place in range(first, first + options.batch)]
        lesson = self._read(windows, options.seed + 1_000_003 * (number * processes + index) + 1, self._taps)
        return replace(lesson, done=number // options.accumulate / self.steps(options, processes))

    def held_out(self, count: int, taps: tuple[int, ...] | None = None) -> list[Lesson]:
        """Lessons of one text each that are never trained on; with other taps than the recipe's, if given."""
        wanted = self._taps if taps is None else taps
        return [self._read([int(window)], seed, wanted) for seed, window in enumerate(self._held_out[:count])]

    def every(self, batch: int) -> Iterator[tuple[list[int], Lesson]]:
        """All texts in their order, ``batch`` at once, with the numbers of their windows."""
        for first in range(0, len(self._learned) + HELD_OUT, batch):
            windows = list(range(first, min(first + batch, len(self._learned) + HELD_OUT)))
            yield windows, self._read(windows, 0, self._taps)

    def _window(self, place: int, seed: int) -> int:
        turn, offset = divmod(place, len(self._learned))
        if self._order[0] != (seed, turn):
            chance = torch.Generator().manual_seed(seed * 7919 + turn)
            self._order = ((seed, turn), self._learned[torch.randperm(len(self._learned), generator=chance)])
        return int(self._order[1][offset])

    def _read(self, windows: list[int], seed: int, taps: tuple[int, ...]) -> Lesson:
        pieces = [self._store.window(window, self._length) for window in windows]
        tokens = torch.stack([ids for ids, _ in pieces]).to(self.device)
        weights = torch.stack([counts for _, counts in pieces]).to(self.device)
        return Lesson(tokens, weights, self._source.read(windows, tokens, taps) if taps else {}, seed)


class Live:
    """The target reads each text when it is wanted.

    States are rounded to bfloat16, in which a store keeps them, so that a lesson is the same with a store and without.
    """

    def __init__(self, target: CausalLM, autocast: Any) -> None:
        self._target = target
        self._autocast = autocast

    def read(self, windows: list[int], tokens: Tensor, taps: tuple[int, ...]) -> dict[int, Tensor]:
        with self._autocast():
            states = self._target.read(tokens, taps)
        return {tap: each.to(torch.bfloat16).float() for tap, each in states.items()}
