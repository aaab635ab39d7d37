"""The slot cache: keys and values of many rows of different lengths, addressed by slot.

A committed token is in the slot of its position; tree nodes are in the slots after the committed ones. Rollback needs
no work, since slots past a row's length are never attended to; keeping a branch is one move. So one mechanism serves
ragged batches, trees, rollback and continuous batching.
"""

import logging
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from foredraft.core.drafter import NO_ROOM, Room
from foredraft.core.errors import ModelError
from foredraft.core.transfer import to_device
from foredraft.model.masks import StepIn

_log = logging.getLogger(__name__)

BUCKET = 256
"""Slots are allocated in multiples of this, so that shapes change rarely."""


class SlotCache:
    """Keys and values of each layer, ``[R, heads, S, head_dim]``, allocated by the first forward that writes.

    ``rows`` and ``slots`` only grow; ``clear`` frees the memory. ``limit`` caps the number of slots. The engine
    reserves what requests may need when it admits them, so nothing is reallocated while they run. On a CPU, memory is
    committed when it is first written to, so a high limit costs a short output nothing.

    A row keeps its number but not its place: ``arrange`` moves rows, so that a forward reads them as one slice, without
    a copy.
    """

    def __init__(self, layers: int, limit: int | None = None) -> None:
        self.rows = 0
        self.slots = 0
        self._limit = limit
        self._used = 0  # slots after these have never been written to
        self._lines: list[int] = []  # where each row is in the buffers
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers

    def reserve(self, rows: int, slots: int, room: Room = NO_ROOM) -> None:
        """Make room for row numbers below ``rows`` and slots below ``slots``, keeping the contents.

        Args:
            room: what will be needed later; it is allocated now, so that nothing is reallocated in between.
        """
        limit = slots if self._limit is None else self._limit
        used, self._used = self._used, max(self._used, min(slots, limit))
        rows, slots = max(rows, room.rows, self.rows), max(bucket(max(slots, room.slots)), self.slots)
        if self._limit is not None:
            slots = min(slots, self._limit)
        if (rows, slots) == (self.rows, self.slots):
            return
        self.rows, self.slots = rows, slots
        self._lines += range(len(self._lines), rows)
        _log.debug("The cache has %d rows of %d slots.", rows, slots)
        for buffers in (self._keys, self._values):
            for layer, old in enumerate(buffers):
                if old is not None:
                    buffers[layer] = new = persistent_zeros(old, rows, old.shape[1], slots, old.shape[3])
                    new[: old.shape[0], :, :used] = old[:, :, :used]

    @property
    def room(self) -> Room:
        """What the buffers are allocated for."""
        return Room(self.rows, self.slots)

    def clear(self) -> None:
        """Drop the contents and free the memory."""
        self.rows = self.slots = self._used = 0
        self._lines = []
        self._keys = [None] * len(self._keys)
        self._values = [None] * len(self._values)

    def arrange(self, rows: Sequence[int]) -> None:
        """Move these rows to the first lines of the buffers, in this order.

        Rows that are there stay. So in a batch whose last row takes the place of one that has left, one row moves.
        """
        for line, row in enumerate(rows):
            before = self._lines[row]
            if before != line:
                other = self._lines.index(line)
                for buffer in self._buffers():
                    own, others = buffer[before, :, : self._used], buffer[line, :, : self._used]
                    kept = others.clone()
                    others.copy_(own)
                    own.copy_(kept)
                self._lines[row], self._lines[other] = line, before

    def line(self, row: int) -> int:
        """The index of a row in the buffers, until the next ``arrange``."""
        return self._lines[row]

    def lines(self, rows: Sequence[int]) -> list[int]:
        """The index of each row in the buffers, until the next ``arrange``."""
        return [self._lines[row] for row in rows]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers())

    def holds(self, layer: int) -> bool:
        """Whether this layer has been written to."""
        return self._keys[layer] is not None

    def write(
        self, layer: int, key: Float[Tensor, "B K N E"], value: Float[Tensor, "B K N F"], view: "SlotView"
    ) -> tuple[Float[Tensor, "B K S E"], Float[Tensor, "B K S F"]]:
        """Store keys and values of N nodes in their slots; return the first ``view.extent`` slots of these rows, or
        the buffers (``view.stored``)."""
        keys, values = self.buffers(layer, key, value)
        where = view.lines[:, None]
        keys[where, :, view.nodes] = key.transpose(1, 2)
        values[where, :, view.nodes] = value.transpose(1, 2)
        if view.stored:
            return keys, values
        keys, values = keys[:, :, : view.extent], values[:, :, : view.extent]
        if view.adjacent is not None:
            return keys[view.adjacent], values[view.adjacent]
        return keys.index_select(0, view.lines), values.index_select(0, view.lines)

    def stored(self, layer: int) -> tuple[Float[Tensor, "R K S E"], Float[Tensor, "R K S F"]]:
        """The key and value buffers of a layer.

        Raises:
            ModelError: nothing has been written yet.
        """
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            raise ModelError("This cache is empty: run a forward of the prompt first.")
        return keys, values

    def buffers(
        self, layer: int, key: Float[Tensor, "B K N E"], value: Float[Tensor, "B K N F"]
    ) -> tuple[Float[Tensor, "R K S E"], Float[Tensor, "R K S F"]]:
        """The key and value buffers of a layer, allocated for ``key`` and ``value`` if missing."""
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            keys = self._keys[layer] = persistent_zeros(key, self.rows, key.shape[1], self.slots, key.shape[3])
            values = persistent_zeros(value, self.rows, value.shape[1], self.slots, value.shape[3])
            self._values[layer] = values
        return keys, values

    def compact(self, rows: Sequence[int], bases: Int[Tensor, "B"], path: Int[Tensor, "B D"]) -> None:
        """Compact an accepted path: node ``path[b, i]`` moves to slot ``bases[b] + i``.

        ``bases`` are the slots of the roots; path entries of -1 move nothing.
        """
        index = torch.arange(path.shape[1], device=path.device)
        target = bases[:, None] + index
        source = torch.where(path >= 0, bases[:, None] + path, target)
        where = line_index(self.lines(rows), path.device)[0][:, None]
        for buffer in self._buffers():
            buffer[where, :, target] = buffer[where, :, source]

    def fork(self, sources: Sequence[int], targets: Sequence[int], slots: int) -> None:
        """Copy the first ``slots`` slots of each source row to its target row; all reads precede the writes."""
        read, written = self.lines(sources), self.lines(targets)
        for buffer in self._buffers():
            buffer[written, :, :slots] = buffer[read, :, :slots]

    @torch.inference_mode()
    def zero(self, rows: Sequence[int]) -> None:
        """Set these rows to zero: slots past a row's end have weight 0, but 0 times NaN would be NaN."""
        lines = self.lines(rows)
        for buffer in self._buffers():
            buffer[lines, :, : self._used] = 0

    def _buffers(self) -> Iterator[Tensor]:
        return (buffer for buffer in (*self._keys, *self._values) if buffer is not None)


class SlotView(Cache):
    """A ``SlotCache`` as the ``past_key_values`` of one forward of a stock model.

    ``stored``: attention reads keys and values as the cache stores them, all rows and slots.
    """

    def __init__(
        self,
        store: SlotCache,
        rows: Sequence[int],
        nodes: Int[Tensor, "B N"],
        extent: int,
        *,
        stored: bool = False,
    ) -> None:
        super().__init__(layers=[])
        self.store = store
        self.lines, self.adjacent = line_index(store.lines(rows), nodes.device)
        self.nodes = nodes
        self.extent = extent
        self.stored = stored

    @classmethod
    def of(cls, store: SlotCache, step: StepIn, *, stored: bool = False) -> "SlotView":
        return cls(store, step.rows, step.slots, step.extent, stored=stored)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return self.store.write(layer_idx, key_states, value_states, self)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0: models derive default positions from it, but positions are always passed."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.extent, 0


class PassthroughCache(Cache):
    """The cache of a forward with an observer; it stores nothing, since the observer writes the keys and values."""

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


def line_index(lines: Sequence[int], device: torch.device) -> tuple[Int[Tensor, "B"], slice | None]:
    """Lines as a tensor, and as a slice if they follow each other (which also avoids a blocking copy)."""
    first, end = lines[0], lines[0] + len(lines)
    if list(lines) == list(range(first, end)):
        return torch.arange(first, end, device=device), slice(first, end)
    return to_device(lines, device), None


def persistent_zeros(like: Tensor, *shape: int) -> Tensor:
    """Zeros with the dtype and device of ``like`` that outlive a step.

    Tensors allocated under ``inference_mode`` cannot be written outside of it, and compilers reject them. On a CPU, the
    system hands out zero pages as they are touched; ``torch.zeros`` would touch all of them.
    """
    with torch.inference_mode(False):
        if like.device.type != "cpu" or 0 in shape:
            return torch.zeros(shape, dtype=like.dtype, device=like.device)
        untouched = np.zeros(math.prod(shape) * like.itemsize, dtype=np.uint8)
        return torch.from_numpy(untouched).view(like.dtype).view(shape)


def bucket(slots: int) -> int:
    """``slots`` rounded up to the allocation size."""
    return -(-slots // BUCKET) * BUCKET
