"""How much attention each token in a partial cache has got, by layer and group of heads: what heavy hitters are."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


class AttentionTally:
    """Sums [R, K, S] a layer, in float32. What a drafted token attended to counts once the token is accepted."""

    def __init__(self, layers: int) -> None:
        self._sums: list[Tensor | None] = [None] * layers
        self._pending: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(layers)]

    @property
    def nbytes(self) -> int:
        return sum(sums.nbytes for sums in self._sums if sums is not None)

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        self._sums = [None] * len(self._sums)
        self.drop()

    def reserve(self, layer: int, shape: tuple[int, int, int], device: torch.device) -> None:
        """Make room for so many rows, groups and slots."""
        old = self._sums[layer]
        if old is not None and old.shape == shape:
            return
        with torch.inference_mode(False):  # it outlives the step
            new = torch.zeros(shape, device=device)
        if old is not None:
            new[: old.shape[0], :, : old.shape[2]] = old
        self._sums[layer] = new

    def note(self, layer: int, rows: Int[Tensor, "B"], weights: Float[Tensor, "B K S"]) -> None:
        """The next token of a chain has attended so."""
        self._pending[layer].append((rows, weights))

    def finalize(self, accepted: Int[Tensor, "B"]) -> None:
        """Count the root and so many tokens of each chain, and forget the others."""
        for layer, pending in enumerate(self._pending):
            sums = self._sums[layer]
            for depth, (rows, weights) in enumerate(pending):
                if sums is not None:
                    sums[rows, :, : weights.shape[2]] += weights * (accepted >= depth)[:, None, None]
        self.drop()

    def drop(self) -> None:
        """Forget what has not been settled."""
        for pending in self._pending:
            pending.clear()

    def of(self, layer: int, row: int) -> Float[Tensor, "K S"]:
        """The sums of a row, as they lie."""
        sums = self._sums[layer]
        assert sums is not None, "nothing has been noted"
        return sums[row]

    def compact(self, layer: int, row: int, places: Int[Tensor, "K T"]) -> None:
        """Only these places of a row are left, and stand at its beginning."""
        sums = self.of(layer, row)
        kept = sums.gather(1, places)
        sums.zero_()
        sums[:, : places.shape[1]] = kept

    def restart(self, rows: list[int], layer: int | None = None) -> None:
        """Nothing is known of these rows, in this layer or in all."""
        for sums in self._sums if layer is None else [self._sums[layer]]:
            if sums is not None:
                sums[[row for row in rows if row < sums.shape[0]]] = 0
