"""How much of each row the KV cache of a draft model or head holds."""

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.drafter import Fused, KVSize, Needs, RowState, View
from foredraft.model.base import TargetModel
from foredraft.model.kv.cache import SlotCache, bucket
from foredraft.model.prefill import CATCH_UP, CHUNK, prefill


class ReadRows(RowState):
    """The number of entries of each row that a drafter has read into its KV cache.

    A released row keeps its entries until another request takes its number or a recording needs the space, so that a
    prompt that begins alike can take them over, as it does in the target's prefix cache.

    Args:
        model: reads prompts ahead; its entries are tokens. None: they are not read here.
    """

    needs = Needs(ahead=True)

    def __init__(self, cache: SlotCache, model: TargetModel | None = None) -> None:
        self.count: dict[int, int] = {}
        """Entries by row, of the rows in flight."""
        self._cache = cache
        self._model = model
        self._left: dict[int, int] = {}  # of released rows

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Fused) -> None:
        """Start a row, unless it is there; what was not read of its prompt is read at its first draft."""
        self._left.pop(row, None)
        self.count.setdefault(row, 0)

    def ahead(self, row: int, most: int, kv_size: KVSize) -> tuple[int, int]:
        """Make room for the next entries of a row, at most ``CHUNK`` and none beyond ``most``.

        Returns:
            the first of them and the one after the last; equal ones if all have been read.
        """
        self._left.pop(row, None)
        begin = self.count.setdefault(row, 0)
        end = max(min(begin + CHUNK, most), begin)
        if begin < end:
            self._make_room({row: end + CATCH_UP}, kv_size)
            if not begin:  # an earlier request in the row may have left NaN
                self._cache.zero([row])
        return begin, end

    @torch.inference_mode()
    def read_ahead(self, row: int, prompt: Int[Tensor, "T"], hidden: Fused, kv_size: KVSize) -> None:
        model = self._model
        if model is None:
            return
        begin, end = self.ahead(row, min(len(prompt), model.max_length - 1), kv_size)
        if begin < end:
            tokens = prompt[None, begin:end].clamp(max=model.vocab_size - 1)
            prefill(model, self._cache, [row], tokens, [begin])
            self.count[row] = end

    @torch.inference_mode()
    def fork(self, row: int, source: int, length: int) -> None:
        """Start a row with the first entries of another, or those that its last request left: at most ``length``."""
        count = min(self.count.get(source, self._left.get(source, 0)), length)
        self._left.pop(row, None)
        if count > 0 and row != source:
            rows = self._cache.rows  # doubled, so that rows that arrive one by one do not copy everything each time
            self._cache.reserve([row], count, KVSize(rows if row < rows else max(row + 1, 2 * rows)))
            self._cache.zero([row])  # an earlier request in the row may have left NaN
            self._cache.fork([source], [row], count)
        self.count[row] = max(count, 0)

    def rewind(self, row: int, length: int) -> None:
        self.count[row] = min(self.count[row], length)

    def release(self, row: int) -> None:
        """Drop a row; its entries stay for ``fork``."""
        if row in self.count:
            self._left[row] = self.count.pop(row)

    def give_up(self, rows: Sequence[int]) -> bool:
        """Whether none of these rows is in flight; then what released ones have left is forgotten."""
        if any(row in self.count for row in rows):
            return False
        for row in rows:
            self._left.pop(row, None)
        return True

    def read_to(self, view: View, ends: Sequence[int]) -> None:
        """All rows were read to their ends, of which these are upper bounds: ``view.slack`` less is sure."""
        self.count.update((row, end - view.slack) for row, end in zip(view.rows, ends, strict=True))

    def prepare(self, view: View, slots: int) -> None:
        """Make room for rows of ``slots`` slots, in the first rows of the buffers; clear new ones."""
        rows, cache = view.rows, self._cache
        if not any(self.count.values()) and cache.slots > bucket(max(slots, view.kv_size.slots)):
            cache.clear()  # of longer requests; none of them is in flight
            self._left.clear()
        beyond = slots - max(view.host_lengths)
        self._make_room(dict(zip(rows, (length + beyond for length in view.host_lengths), strict=True)), view.kv_size)
        cache.arrange(rows)
        fresh = [row for row in rows if self.count[row] == 0]
        if fresh:  # an earlier request in the row may have left NaN
            cache.zero(fresh)

    def _make_room(self, slots: Mapping[int, int], kv_size: KVSize) -> None:
        """Reserve so many slots of rows. Where memory is limited, released rows are given up for it, the first ones
        first, and then what rows in flight do not need."""
        cache = self._cache
        if kv_size.most is not None and cache.lazy and cache.total_with(slots) > kv_size.most:
            others = [row for row in range(cache.rows) if row not in self.count and row not in self._left]
            for row in (*others, *self._left, *slots):
                cache.trim([row], slots.get(row, 0))
                self._left.pop(row, None)
                if cache.total_with(slots) <= kv_size.most:
                    break
        cache.reserve(list(slots), list(slots.values()), kv_size)

    def catch_up(self, view: View, ends: Sequence[int], slots: int, read: Callable[[list[int]], object]) -> int:
        """Prepare a forward that reads what was committed since the last one.

        Args:
            ends: read each row up to this entry.
            slots: to reserve, besides some padding; new rows are cleared.
            read: reads all but the last of these entries, for the rows with these indices, which are far behind.

        Returns:
            the number of entries to read, the same for all rows: the last ones, or those from 0 on if there are fewer.
        """
        rows = view.rows
        self.prepare(view, slots + CATCH_UP)
        far = [b for b, row in enumerate(rows) if ends[b] - self.count[row] > CATCH_UP]
        if far:
            read(far)
            self.count.update({rows[b]: ends[b] - 1 for b in far})
        width = CATCH_UP
        if view.lengths.device.type == "cpu":
            width = max(max(end - self.count[row], 1) for row, end in zip(rows, ends, strict=True))
            width = 1 << (width - 1).bit_length() if view.static else width
        return width
