"""The slot cache: keys and values of many rows of different lengths, addressed by slot.

A committed token stands in the slot of its position; the nodes of a tree stand in the slots behind. Rollback is
forgetting (what lies behind a row's length is never attended to), and keeping a branch is one move. Ragged
batches, trees, rollback and continuous batching are therefore one mechanism.
"""

import logging
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from foredraft.core.errors import ModelError
from foredraft.model.masks import StepIn

_log = logging.getLogger(__name__)

BUCKET = 256
"""Slots are added in multiples of this, so that the shapes of a forward change rarely."""


class SlotCache:
    """Keys and values of each layer, ``[R, heads, S, head_dim]``, allocated by the first forward that writes.

    ``rows`` and ``slots`` only ever grow; ``clear`` gives the memory back. With ``limit`` there are never more slots
    than that, whatever is asked for.
    """

    def __init__(self, layers: int, limit: int | None = None) -> None:
        self.rows = 0
        self.slots = 0
        self._limit = limit
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers

    def reserve(self, rows: int, slots: int) -> None:
        """Make room for row numbers below ``rows`` and slots below ``slots``; what is stored stays."""
        rows, slots = max(rows, self.rows), max(bucket(slots), self.slots)
        if self._limit is not None:
            slots = min(slots, self._limit)
        if (rows, slots) == (self.rows, self.slots):
            return
        self.rows, self.slots = rows, slots
        _log.debug("The cache has %d rows of %d slots.", rows, slots)
        for buffers in (self._keys, self._values):
            for layer, old in enumerate(buffers):
                if old is not None:
                    buffers[layer] = self._grown(old)

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        self.rows = self.slots = 0
        self._keys = [None] * len(self._keys)
        self._values = [None] * len(self._values)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self._keys, *self._values) if buffer is not None)

    def holds(self, layer: int) -> bool:
        """Whether anything was ever written to this layer."""
        return self._keys[layer] is not None

    def write(
        self, layer: int, key: Float[Tensor, "B K N E"], value: Float[Tensor, "B K N F"], view: "SlotView"
    ) -> tuple[Float[Tensor, "B K S E"], Float[Tensor, "B K S F"]]:
        """Store keys and values of N nodes in their slots; return the first ``view.extent`` slots of these rows."""
        keys, values = self.buffers(layer, key, value)
        where = view.rows[:, None]
        keys[where, :, view.nodes] = key.transpose(1, 2)
        values[where, :, view.nodes] = value.transpose(1, 2)
        keys, values = keys[:, :, : view.extent], values[:, :, : view.extent]
        if view.prefix is not None:
            return keys[: view.prefix], values[: view.prefix]
        return keys.index_select(0, view.rows), values.index_select(0, view.rows)

    def stored(self, layer: int) -> tuple[Float[Tensor, "R K S E"], Float[Tensor, "R K S F"]]:
        """All keys and values of a layer, as they lie.

        Raises:
            ModelError: nothing has been written yet.
        """
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            raise ModelError("There is nothing in this cache yet: read the text first.")
        return keys, values

    def buffers(
        self, layer: int, key: Float[Tensor, "B K N E"], value: Float[Tensor, "B K N F"]
    ) -> tuple[Float[Tensor, "R K S E"], Float[Tensor, "R K S F"]]:
        """The same; what is not there yet is allocated for keys and values of this shape."""
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            keys = self._keys[layer] = lasting_zeros(key, self.rows, key.shape[1], self.slots, key.shape[3])
            values = lasting_zeros(value, self.rows, value.shape[1], self.slots, value.shape[3])
            self._values[layer] = values
        return keys, values

    def compact(self, rows: Int[Tensor, "B"], bases: Int[Tensor, "B"], path: Int[Tensor, "B D"]) -> None:
        """Move the nodes of an accepted path together: node ``path[b, i]`` goes to slot ``bases[b] + i``.

        ``bases`` are the slots of the roots; entries of -1 move nothing.
        """
        index = torch.arange(path.shape[1], device=path.device)
        target = bases[:, None] + index
        source = torch.where(path >= 0, bases[:, None] + path, target)
        where = rows[:, None]
        for buffer in (*self._keys, *self._values):
            if buffer is not None:
                buffer[where, :, target] = buffer[where, :, source]

    def fork(self, sources: Sequence[int], targets: Sequence[int], slots: int) -> None:
        """Copy the first ``slots`` slots of each source row to its target row; all are read before any is written."""
        for buffer in (*self._keys, *self._values):
            if buffer is not None:
                buffer[list(targets), :, :slots] = buffer[list(sources), :, :slots]

    @torch.inference_mode()
    def zero(self, rows: Sequence[int]) -> None:
        """Set these rows to zero: what lies behind a row's end has no weight, but 0 times NaN would be NaN."""
        for buffer in (*self._keys, *self._values):
            if buffer is not None:
                buffer[list(rows)] = 0

    def _grown(self, old: Tensor) -> Tensor:
        new = lasting_zeros(old, self.rows, old.shape[1], self.slots, old.shape[3])
        new[: old.shape[0], :, : old.shape[2]] = old
        return new


class SlotView(Cache):
    """One forward's window on a ``SlotCache``: what a stock model is handed as ``past_key_values``."""

    def __init__(
        self, store: SlotCache, rows: Int[Tensor, "B"], prefix: int | None, nodes: Int[Tensor, "B N"], extent: int
    ) -> None:
        super().__init__(layers=[])
        self.store = store
        self.rows = rows
        self.prefix = prefix  # rows are 0 .. prefix-1, so that no copy is needed; None: any rows
        self.nodes = nodes
        self.extent = extent

    @classmethod
    def of(cls, store: SlotCache, step: StepIn) -> "SlotView":
        return cls(store, step.rows, step.prefix, step.slots, step.extent)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return self.store.write(layer_idx, key_states, value_states, self)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: models derive default positions from it, and positions are always given."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.extent, 0


class Unwritten(Cache):
    """What a watched forward is handed as its cache: the watch writes, when it knows the query."""

    def __init__(self, extent: int) -> None:
        super().__init__(layers=[])
        self._extent = extent

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._extent, 0


def lasting_zeros(like: Tensor, *shape: int) -> Tensor:
    """Zeros of this type and device that outlive a step.

    What is allocated under ``inference_mode`` may not be written to outside of it, and compilers refuse it.
    """
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=like.dtype, device=like.device)


def bucket(slots: int) -> int:
    """So many slots, rounded up to what is allocated."""
    return -(-slots // BUCKET) * BUCKET
