"""Accumulated attention of each token in a partial cache, by layer and head group, for H2O's heavy hitters."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.transfer import to_device


class AttentionScores:
    """Sums [R, K, S] per layer, in float32. A drafted token's attention counts once the token is accepted."""

    def __init__(self, layers: int) -> None:
        self._sums: list[Tensor | None] = [None] * layers
        self._pending: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(layers)]

    @property
    def nbytes(self) -> int:
        return sum(sums.nbytes for sums in self._sums if sums is not None)

    def clear(self) -> None:
        """Drop all scores and free the memory."""
        self._sums = [None] * len(self._sums)
        self.drop()

    def reserve(self, layer: int, keys: Float[Tensor, "R K S E"]) -> None:
        """Make room for the rows, groups and slots of a layer's keys."""
        old, shape = self._sums[layer], keys.shape[:3]
        if old is not None and old.shape == shape:
            return
        with torch.inference_mode(False):  # it outlives the step
            new = torch.zeros(shape, device=keys.device)
        if old is not None:
            new[: old.shape[0], :, : old.shape[2]] = old
        self._sums[layer] = new

    def add_pending(self, layer: int, rows: Int[Tensor, "B"], weights: Float[Tensor, "B K S"]) -> None:
        """Store the attention weights of the next token of a chain until ``finalize``."""
        self._pending[layer].append((rows, weights))

    def finalize(self, accepted: Int[Tensor, "B"]) -> None:
        """Add the pending weights of the root and the first ``accepted`` tokens of each chain; drop the others."""
        for layer, pending in enumerate(self._pending):
            sums = self._sums[layer]
            for depth, (rows, weights) in enumerate(pending):
                if sums is not None:
                    sums[rows, :, : weights.shape[2]] += weights * (accepted >= depth)[:, None, None]
        self.drop()

    def drop(self) -> None:
        """Drop all pending weights."""
        for pending in self._pending:
            pending.clear()

    def of(self, layer: int, row: int) -> Float[Tensor, "K S"]:
        """The sums of a row (a view)."""
        sums = self._sums[layer]
        assert sums is not None, "no scores recorded"
        return sums[row]

    def compact(self, layer: int, row: int, slots: Int[Tensor, "K T"]) -> None:
        """Keep only these slots of a row, moved to its beginning."""
        sums = self.of(layer, row)
        kept = sums.gather(1, slots)
        sums.zero_()
        sums[:, : slots.shape[1]] = kept

    def reset(self, rows: list[int], layer: int | None = None) -> None:
        """Zero the sums of these rows, in one layer or in all."""
        for sums in self._sums if layer is None else [self._sums[layer]]:
            if sums is not None:
                sums[to_device([row for row in rows if row < sums.shape[0]], sums.device)] = 0
