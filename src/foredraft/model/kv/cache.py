"""The slot cache: keys and values of many rows of different lengths, addressed by slot.

A committed token is in the slot of its position; tree nodes are in the slots after the committed ones. Rollback needs
no work, since slots past a row's length are never attended to; keeping a branch is one move. So one mechanism serves
ragged batches, trees, rollback and continuous batching.
"""

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from foredraft.core.drafter import EMPTY_KV, KVSize
from foredraft.core.errors import ModelError
from foredraft.core.transfer import to_device
from foredraft.model.kv.masks import GRAIN, StepIn
from foredraft.model.memory import give_back, zero_pages

_log = logging.getLogger(__name__)

BUCKET = 256
"""Slots are allocated in multiples of this, so that shapes change rarely."""


class _Kind(NamedTuple):
    """Buffers of one kind share an allocation."""

    heads: int
    width: int
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True)
class _Group:
    """Buffers of one kind in one allocation: ``buffer[i]`` is that of ``places[i]``, a list of buffers and a layer."""

    kind: _Kind
    places: list[tuple[list[Tensor | None], int]]
    buffer: Float[Tensor, "G R K S E"]
    starts: Int[Tensor, "G R K"]
    """Where each head's slots begin in the buffer, in slots."""

    @classmethod
    def allocate(cls, kind: _Kind, places: list[tuple[list[Tensor | None], int]], rows: int, slots: int) -> "_Group":
        shape = (len(places), rows, kind.heads)
        like = torch.empty(0, dtype=kind.dtype, device=kind.device)
        buffer = persistent_zeros(like, *shape, slots, kind.width)
        with torch.inference_mode(False):
            starts = (torch.arange(math.prod(shape), device=kind.device) * slots).view(shape)
            for (buffers, layer), own in zip(places, buffer, strict=True):
                buffers[layer] = own
        return cls(kind, places, buffer, starts)

    def resized(self, rows: int, slots: int, held: Sequence[int]) -> "_Group":
        """A larger one with the contents of the first ``held[i]`` slots of row i; the old one is freed first if both do
        not fit."""
        old = self.buffer[:, :, :, : max(held, default=0)]
        try:
            group = _Group.allocate(self.kind, self.places, rows, slots)
        except torch.OutOfMemoryError:
            old = old.cpu()
            for buffers, layer in self.places:
                buffers[layer] = None
            del self.buffer
            group = _Group.allocate(self.kind, self.places, rows, slots)
        for row, count in enumerate(held):
            group.buffer[:, row, :, :count] = old[:, row, :, :count]
        return group

    def swap(self, row: int, other: int, counts: tuple[int, int]) -> None:
        """Exchange two rows, which hold so many slots."""
        own, others = self.buffer[:, row], self.buffer[:, other]
        kept = others[:, :, : counts[1]].clone()
        others[:, :, : counts[0]] = own[:, :, : counts[0]]
        own[:, :, : counts[1]] = kept

    def give_back(self, row: int, begin: int, end: int) -> None:
        """Give back the memory of slots of a row, on a CPU."""
        of_slot = self.buffer.stride(3) * self.buffer.itemsize
        parts = self.buffer[:, row] if begin else self.buffer[:, row, :1]
        size = (end - begin if begin else self.buffer.shape[3] * self.kind.heads) * of_slot
        for of_layer in parts:
            for head in of_layer:
                give_back(head.data_ptr() + begin * of_slot, size)

    def compact(
        self, buffer_rows: slice | Int[Tensor, "B"], sources: Int[Tensor, "B D"], targets: Int[Tensor, "B D"]
    ) -> None:
        starts = self.starts[:, buffer_rows, :, None]
        states = self.buffer.view(-1, self.kind.width)
        moved = states.index_select(0, (starts + sources[:, None]).flatten())
        states.index_copy_(0, (starts + targets[:, None]).flatten(), moved)


class SlotCache:
    """Keys and values of each layer, ``[R, heads, S, head_dim]``, allocated by the first forward that writes.

    ``rows`` and ``slots`` only grow while there are rows. The engine reserves what requests may need when it admits
    them, so nothing is reallocated while they run, nor when others follow that need as much.

    On a CPU (``lazy``), this is a range of addresses, where the system commits memory page by page. Each row has memory
    for the slots that were reserved for it (``held``), however long the others are, until they are given back
    (``trim``). Elsewhere the buffers are allocated whole.

    A row keeps its number but not its place: ``arrange`` moves rows, so that a forward reads them as one slice, without
    a copy.

    ``version`` grows when buffers are allocated or freed. ``most``: slots for which memory may be taken; the engine
    keeps to it, and tells the caches of its drafter.

    Args:
        limit: the most slots.
        like: a cache of the same model that has been written to. Buffers of one kind are then one allocation, so that
            a change of rows or slots takes two kernels, not two for each layer.
    """

    def __init__(self, layers: int, limit: int | None = None, like: "SlotCache | None" = None) -> None:
        self.rows = 0
        self.slots = 0
        self.version = 0
        self.most: int | None = None
        self._limit = limit
        self._held: list[int] = []  # by row of the buffers: later slots have never been written to, or were given back
        self._buffer_rows: list[int] = []  # where each row is in the buffers
        self._order: list[int] = []  # the row at each place of the buffers
        self._changing = False  # the buffers are being allocated, or that was interrupted
        self._kinds: list[tuple[_Kind, _Kind] | None] = [None] * layers if like is None else [*like._kinds]
        self._groups: list[_Group] = []
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers

    def reserve(self, rows: Collection[int], slots: int | Sequence[int], kv_size: KVSize = EMPTY_KV) -> None:
        """Make room for the first slots of each of these rows, keeping the contents.

        Args:
            slots: of each row, or of all of them.
            kv_size: for which buffers are allocated now, so that nothing is reallocated in between.
        """
        each = [slots] * len(rows) if isinstance(slots, int) else slots
        limit = max(each) if self._limit is None else self._limit
        asked = KVSize(max(max(rows) + 1, kv_size.rows), bucket(max(*each, kv_size.slots)))
        if self._limit is not None:
            asked = KVSize(asked.rows, min(asked.slots, limit))
        if not self._buffer_rows and (asked.rows > self.rows or asked.slots != self.slots):
            self.free()
        size = max(asked.rows, self.rows), max(asked.slots, self.slots)
        self._buffer_rows += range(len(self._buffer_rows), size[0])
        self._order += range(len(self._order), size[0])
        if size != (self.rows, self.slots):
            self._resize(*size)
        for row, count in zip(rows, each, strict=True):
            place = self._buffer_rows[row]
            self._held[place] = max(self._held[place], min(grains(count), self.slots))

    def _resize(self, rows: int, slots: int) -> None:
        _log.debug("The cache has %d rows of %d slots.", rows, slots)
        self._changing = True
        self.version += 1
        self.rows, self.slots = rows, slots
        for index, group in enumerate(self._groups):
            self._groups[index] = group.resized(rows, slots, self._held)
        self._held += [0] * (rows - len(self._held))
        self._changing = False

    @property
    def lazy(self) -> bool:
        """Whether memory is committed for the slots that rows hold alone."""
        kinds = self._kinds[0]
        return kinds is not None and kinds[0].device.type == "cpu"

    def held(self, row: int) -> int:
        """How many slots of a row were reserved and not given back."""
        place = self._place(row)
        return self._held[place] if place < len(self._held) else 0

    def _place(self, row: int) -> int:
        return self._buffer_rows[row] if row < len(self._buffer_rows) else row

    def total_with(self, slots: Mapping[int, int]) -> int:
        """The slots of all rows for which memory is taken once these are reserved, by row."""
        if not self.lazy:
            rows = max(self.rows if self._buffer_rows else 0, *(row + 1 for row in slots))
            return rows * max(self.slots, *map(bucket, slots.values()))
        return sum(self._held) + sum(max(grains(count) - self.held(row), 0) for row, count in slots.items())

    def trim(self, rows: Iterable[int], slots: int = 0) -> None:
        """Give back all but the first slots of these rows, if the cache is lazy."""
        if not self.lazy:
            return
        for row in rows:
            place, kept = self._place(row), grains(slots)
            if kept < self.held(row):
                for group in self._groups:
                    group.give_back(place, kept, self._held[place])
                self._held[place] = kept

    @property
    def kv_size(self) -> KVSize:
        """What the buffers are allocated for."""
        return KVSize(self.rows, self.slots, self.most)

    def clear(self) -> None:
        """Forget all rows. The memory stays for the next ones, if these need as many slots and no more rows."""
        self._buffer_rows, self._order = [], []
        if self._changing:
            self.free()

    def free(self) -> None:
        """Forget all rows and free the memory."""
        self.version += 1
        self._buffer_rows, self._order, self._groups = [], [], []
        self.rows = self.slots = 0
        self._held = []
        for layer in range(len(self._keys)):
            self._keys[layer] = self._values[layer] = None
        self._changing = False

    def arrange(self, rows: Sequence[int]) -> None:
        """Move these rows to the first rows of the buffers, in this order.

        Rows that are there stay. So in a batch whose last row takes the place of one that has left, one row moves.
        """
        for buffer_row, row in enumerate(rows):
            before = self._buffer_rows[row]
            if before != buffer_row:
                other, counts = self._order[buffer_row], (self._held[before], self._held[buffer_row])
                for group in self._groups:
                    group.swap(before, buffer_row, counts)
                self._buffer_rows[row], self._buffer_rows[other] = buffer_row, before
                self._order[buffer_row], self._order[before] = row, other
                self._held[before] = self._held[buffer_row] = max(counts)
                self.trim([row], counts[0])
                self.trim([other], counts[1])
                self._held[buffer_row], self._held[before] = counts

    def first(self, count: int) -> tuple[int, ...]:
        """The rows in the first ``count`` rows of the buffers, until the next ``arrange``."""
        return tuple(self._order[:count])

    def buffer_row(self, row: int) -> int:
        """The index of a row in the buffers, until the next ``arrange``."""
        return self._buffer_rows[row]

    def buffer_rows(self, rows: Sequence[int]) -> list[int]:
        """The index of each row in the buffers, until the next ``arrange``."""
        return [self._buffer_rows[row] for row in rows]

    @property
    def nbytes(self) -> int:
        """Bytes of the slots that rows hold, or of the buffers, if these are allocated whole."""
        return self.slot_bytes * (sum(self._held) if self.lazy else self.rows * self.slots)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot of one row in all layers; 0 before buffers are allocated."""
        return sum(group.buffer.nbytes for group in self._groups) // max(self.rows * self.slots, 1)

    def shape_of(self, layer: int) -> tuple[int, int, int] | None:
        """Heads of a layer, and widths of its keys and values; None before a forward has shown them."""
        kinds = self._kinds[layer]
        return None if kinds is None else (kinds[0].heads, kinds[0].width, kinds[1].width)

    def holds(self, layer: int) -> bool:
        """Whether this layer has buffers."""
        return self._keys[layer] is not None

    def write(
        self, layer: int, key: Float[Tensor, "B K N E"], value: Float[Tensor, "B K N F"], view: "SlotView"
    ) -> tuple[Float[Tensor, "B K S E"], Float[Tensor, "B K S F"]]:
        """Store keys and values of N nodes in ``view.slots``; return the first ``view.kv_extent`` slots of these rows,
        or the buffers (``view.stored``)."""
        keys, values = self.buffers(layer, key, value)
        where = view.buffer_rows[:, None]
        keys[where, :, view.slots] = key.transpose(1, 2)
        values[where, :, view.slots] = value.transpose(1, 2)
        return self.read(layer, view)

    def read(self, layer: int, view: "SlotView") -> tuple[Float[Tensor, "B K S E"], Float[Tensor, "B K S F"]]:
        """The first ``view.kv_extent`` slots of these rows in a layer, or the buffers (``view.stored``)."""
        keys, values = self.stored(layer)
        if view.stored:
            return keys, values
        keys, values = keys[:, :, : view.kv_extent], values[:, :, : view.kv_extent]
        if view.adjacent is not None:
            return keys[view.adjacent], values[view.adjacent]
        return keys.index_select(0, view.buffer_rows), values.index_select(0, view.buffer_rows)

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
        if self._keys[layer] is None:
            if self._kinds[layer] is None:
                self._kinds[layer] = (_kind_of(key), _kind_of(value))
            self._allocate()
        return self.stored(layer)

    def _allocate(self) -> None:
        """Allocate the buffers of all layers whose kinds are known."""
        self._changing = True
        self.version += 1
        places: dict[_Kind, list[tuple[list[Tensor | None], int]]] = {}
        for layer, kinds in enumerate(self._kinds):
            if kinds is not None and self._keys[layer] is None:
                for kind, buffers in zip(kinds, (self._keys, self._values), strict=True):
                    places.setdefault(kind, []).append((buffers, layer))
        self._groups += [_Group.allocate(kind, each, self.rows, self.slots) for kind, each in places.items()]
        self._changing = False

    def compact(self, rows: Sequence[int], bases: Int[Tensor, "B"], path: Int[Tensor, "B D"]) -> None:
        """Compact an accepted path: node ``path[b, i]`` moves to slot ``bases[b] + i``.

        ``bases`` are the slots of the roots, which stay; path entries of -1 move nothing.
        """
        index = torch.arange(1, path.shape[1], device=path.device)
        targets = bases[:, None] + index
        sources = torch.where(path[:, 1:] >= 0, bases[:, None] + path[:, 1:], targets)
        buffer_rows = self.buffer_rows(rows)
        where = _as_slice(buffer_rows) or to_device(buffer_rows, path.device)
        for group in self._groups:
            group.compact(where, sources, targets)

    def fork(self, sources: Sequence[int], targets: Sequence[int], slots: int) -> None:
        """Copy the first ``slots`` slots of each source row to its target row; all reads precede the writes."""
        self.reserve(targets, slots)
        for group in self._groups:
            read, written = (to_device(self.buffer_rows(rows), group.kind.device) for rows in (sources, targets))
            group.buffer[:, written, :, :slots] = group.buffer[:, read, :, :slots]

    @torch.inference_mode()
    def zero(self, rows: Sequence[int]) -> None:
        """Set these rows to zero: slots past a row's end have weight 0, but 0 times NaN would be NaN."""
        for place in self.buffer_rows(rows):
            for group in self._groups:
                group.buffer[:, place, :, : self._held[place]] = 0


class SlotView(Cache):
    """A ``SlotCache`` as the ``past_key_values`` of one forward of a stock model.

    ``buffer_rows``: of the rows in the cache's buffers; ``adjacent``: the same as a slice, if they follow each other.
    ``stored``: attention reads keys and values as the cache stores them, all rows and slots.
    """

    def __init__(self, store: SlotCache, step: StepIn, *, stored: bool = False) -> None:
        super().__init__(layers=[])
        self.store = store
        self.slots = step.slots
        buffer_rows, device = store.buffer_rows(step.rows), step.slots.device
        self.adjacent = _as_slice(buffer_rows)
        if self.adjacent is None:
            self.buffer_rows = to_device(buffer_rows, device)
        else:  # without a copy
            self.buffer_rows = torch.arange(self.adjacent.start, self.adjacent.stop, device=device)
        self.kv_extent = step.kv_extent
        self.stored = stored

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return self.store.write(layer_idx, key_states, value_states, self)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0: models derive default positions from it, but positions are always passed."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.kv_extent, 0


class PassthroughView(SlotView):
    """The view of a forward with an observer; it stores nothing, since the observer writes the keys and values."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def _kind_of(states: Float[Tensor, "B K N E"]) -> _Kind:
    return _Kind(states.shape[1], states.shape[3], states.dtype, states.device)


def _as_slice(indices: Sequence[int]) -> slice | None:
    """The indices as a slice, if they follow each other."""
    first, end = indices[0], indices[0] + len(indices)
    return slice(first, end) if list(indices) == list(range(first, end)) else None


def persistent_zeros(like: Tensor, *shape: int) -> Tensor:
    """Zeros with the dtype and device of ``like`` that outlive a step.

    Tensors allocated under ``inference_mode`` cannot be written outside of it, and compilers reject them. On a CPU,
    memory is committed page by page as it is written to; ``torch.zeros`` would write to all of it.
    """
    with torch.inference_mode(False):
        if like.device.type != "cpu" or 0 in shape:
            return torch.zeros(shape, dtype=like.dtype, device=like.device)
        pages = zero_pages(math.prod(shape) * like.itemsize)
        return torch.frombuffer(pages, dtype=torch.uint8).view(like.dtype).view(shape)


def bucket(slots: int) -> int:
    """``slots`` rounded up to the allocation size."""
    return -(-slots // BUCKET) * BUCKET


def grains(slots: int) -> int:
    """``slots`` rounded up to what a row's memory is counted in."""
    return -(-slots // GRAIN) * GRAIN
