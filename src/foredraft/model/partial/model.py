"""The target's weights over a part of its KV cache: a cheap draft model.

A row's partial cache is [tokens selected before a border | all tokens after it], without gaps, so slot = position -
number of tokens left out before it. Keys keep the rotation of their own position, and the model receives positions, not
slots. A row that fits is cached as a whole. The first layers may read the selected tokens' place from the full cache
instead: all tokens before the border.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.drafter import KVSize, StepOut
from foredraft.core.errors import ModelError
from foredraft.core.transfer import to_device
from foredraft.core.tree import TokenTree
from foredraft.model.attention.slot_attention import AttentionObserver
from foredraft.model.base import TargetModel
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.hf.support import UNBOUNDED
from foredraft.model.kv.cache import PassthroughView, SlotCache, SlotView
from foredraft.model.kv.masks import StepIn, address
from foredraft.model.partial.attention_scores import AttentionScores
from foredraft.model.partial.kv_selection import Selection

_SHORT = 32
"""Rows with at most this many new tokens are copied in one indexed copy; longer ones as one slice each."""


class _Copy(NamedTuple):
    """The tokens ``begin`` to ``end`` of a row; ``left_out`` tokens before them are not in the partial cache."""

    left_out: int
    begin: int
    end: int


class _PendingSelection(NamedTuple):
    """A row whose tokens are selected in the next forward."""

    row: int
    border: int
    committed: int


@final
class PartialLM(TargetModel):
    """A model over a partial copy of its own KV cache.

    Call ``sync`` whenever rows have grown: it copies new tokens from the full cache, and evicts or reselects tokens if
    there is no room. Selection uses the newest token's query, which is known layer by layer, so the selected tokens are
    gathered during the next forward.

    Args:
        model: the target.
        full: its cache, with the same rows.
        selection: which tokens of a long row are kept.
        room: slots for tokens since the last selection and for tokens in flight.
        whole_layers: first layers that attend to all tokens, before the border in the full cache.

    Raises:
        ModelError: the model has sliding-window layers, too few layers, or does not use foredraft's attention.
    """

    def __init__(
        self, model: CausalLM, full: SlotCache, selection: Selection, room: int, whole_layers: int = 0
    ) -> None:
        if whole_layers >= model.layers:
            raise ModelError(
                f"{model.name} has {model.layers} layers, so whole_layers must be {model.layers - 1} or less, not "
                f"{whole_layers}: a layer must be left that drafts with a part of its cache."
            )
        if any(window is not None for window in model.layout.kinds.values()):
            raise ModelError(
                f"{model.name} has layers with a sliding or chunked attention window, which partial-cache drafting "
                "does not support; use a separate draft model, or prompt_lookup."
            )
        self.vocab_size = model.vocab_size
        self.max_length = model.max_length
        self.capacity = selection.budget + room
        self.most_ahead = room - selection.slack - 1
        self.cache = SlotCache(model.layers, limit=self.capacity, like=model.new_cache())
        self._model = model
        self._full = full
        self._selection = selection
        self._whole_layers = whole_layers
        self._left_out: dict[int, int] = {}  # tokens of each row that are not in the cache
        self._synced: dict[int, int] = {}  # committed tokens of each row that have been copied or left out
        self._pending: dict[int, _PendingSelection] = {}
        self._scores = AttentionScores(model.layers) if selection.counts else None
        self._probe()

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and attention scores."""
        return self.cache.nbytes + (self._scores.nbytes if self._scores is not None else 0)

    def new_cache(self) -> SlotCache:
        """The model's only cache."""
        return self.cache

    def empty_hidden(self) -> dict[int, Float[Tensor, "1 T H"]]:
        return self._model.empty_hidden()

    def left_out(self, row: int) -> int:
        """Number of the row's tokens that are not in the cache."""
        return self._left_out.get(row, 0)

    @torch.inference_mode()
    def sync(
        self, rows: Sequence[int], host_lengths: Sequence[int], ahead: int, reselect: Collection[int] = ()
    ) -> list[int]:
        """Copy newly committed tokens. The full cache holds each row's tokens except the last, the root.

        Args:
            host_lengths: number of committed tokens per row, root included.
            ahead: slots that will be written after the root's before the next call, padding included.
            reselect: rows to select tokens for again, for example because acceptance has dropped.

        Returns:
            the rows whose tokens are reselected or evicted, as requested or for lack of room.

        Raises:
            ModelError: ``ahead`` is more than the cache can ever hold.
        """
        if ahead > self.most_ahead:
            raise ModelError(f"A partial cache with room for {self.most_ahead} nodes ahead cannot take {ahead}.")
        if self._scores is not None:
            self._scores.drop()
        self.cache.reserve(rows, [length + ahead for length in host_lengths], KVSize(slots=self.capacity))
        self.cache.arrange(rows)
        self._begin([row for row in rows if row not in self._synced])
        copies: dict[int, _Copy] = {}
        evicted, selected = [], []
        for row, length in zip(rows, host_lengths, strict=True):
            left, synced, end = self.left_out(row), self._synced.get(row, 0), length - 1
            again = row in self._pending or (row in reselect and left > 0)
            fits = end - left + 1 + ahead <= self.capacity and not again
            evicts = not fits and not again and self._scores is not None and 0 < synced <= end <= left + self.capacity
            if fits or evicts:
                copies[row] = _Copy(left, synced, end)
            if evicts:
                evicted.append(row)
            elif not fits:
                border = self._selection.border(end)
                self._pending[row] = _PendingSelection(row, border, end)
                self._left_out[row] = border - self._selection.budget
                selected.append(row)
            self._synced[row] = end
        _copy_tokens(self._full, self.cache, copies, self._model.layers)
        for row in evicted:
            self._evict(row)
        return selected + evicted

    @torch.inference_mode()
    def finalize(self, accepted: Int[Tensor, "B"]) -> None:
        """Count the attention of the first ``accepted`` tokens of each chain read since ``sync``."""
        if self._scores is not None:
            self._scores.finalize(accepted)

    def rewind(self, row: int, length: int) -> None:
        """Keep only the first ``length`` tokens of a row."""
        left = self.left_out(row)
        if left and length < left + self._selection.budget:  # selected tokens may be lost
            self.forget(row)
        elif row in self._synced:
            self._synced[row] = min(self._synced[row], length)

    def forget(self, row: int) -> None:
        """Drop the state of a finished row."""
        for state in (self._left_out, self._synced, self._pending):
            state.pop(row, None)

    def clear(self) -> None:
        """Drop all rows; keys and values stay allocated."""
        for state in (self._left_out, self._synced, self._pending):
            state.clear()
        self.cache.clear()
        if self._scores is not None:
            self._scores.clear()

    def address(
        self, tree: TokenTree, bases: Int[Tensor, "B"], rows: Sequence[int], used_slots: int, *, start: int = 0
    ) -> StepIn:
        slots = self.root_slots(bases, rows)
        layout, most, left = self._model.layout, self.capacity, bases - slots
        step = address(tree, slots, rows, min(used_slots, most), layout, max_position=UNBOUNDED, start=start)
        return replace(
            step,
            positions=(step.positions + left[:, None]).clamp(max=self.max_length - 1),
            kv_extent=min(step.kv_extent, most),
        )

    def root_slots(self, bases: Int[Tensor, "B"], rows: Sequence[int]) -> Int[Tensor, "B"]:
        return bases - to_device([self.left_out(row) for row in rows], bases.device)

    def compute(self, step: StepIn, cache: SlotCache, keep: Int[Tensor, "M"] | None = None) -> StepOut:
        step = step.within(cache.slots)
        pending: dict[int, _PendingSelection] = {}
        if self._pending:
            rows = enumerate(step.rows)
            pending = {index: self._pending.pop(row) for index, row in rows if row in self._pending}
        far = self._far(step.rows) if self._whole_layers else None
        if not pending and self._scores is None and far is None:
            return self._model.forward(step, cache, keep)
        view = PassthroughView(cache, step)
        return self._model.run(step, view, keep, _GatherObserver(self, view, step.rows, pending, self._scores, far))

    def _far(self, rows: Sequence[int]) -> "_FarTokens | None":
        """What the layers that attend to all tokens read of the full cache; None if these rows fit."""
        borders = [left and left + self._selection.budget for left in map(self.left_out, rows)]
        if not any(borders):
            return None
        places = [*zip(borders, self._full.buffer_rows(rows), strict=True)]
        ends, buffer_rows = to_device(places, self.device).unbind(1)
        return _FarTokens(self._full, self._whole_layers, self._selection.budget, ends, max(borders), buffer_rows)

    def gather(self, pending: _PendingSelection, layer: int, query: Float[Tensor, "H E"], scale: float) -> None:
        """Select a row's tokens in one layer; copy them and the tokens after the border from the full cache.

        A layer that attends to all tokens needs no selection.
        """
        row, border, committed = pending
        full, own = self._full.stored(layer), self.cache.stored(layer)
        source_row, target_row = self._full.buffer_row(row), self.cache.buffer_row(row)
        budget, selected = self._selection.budget, None
        if layer >= self._whole_layers:
            keys = full[0][source_row, :, :border]
            selected = self._selection.choose(query.unflatten(0, (keys.shape[0], -1)), keys, scale)
        for source, target in zip(full, own, strict=True):
            if selected is not None:
                target[target_row, :, :budget] = source[source_row].take_along_dim(selected[..., None], 1)
            target[target_row, :, budget : budget + committed - border] = source[source_row, :, border:committed]
        if self._scores is not None:
            self._scores.reset([row], layer)

    def _begin(self, rows: list[int]) -> None:
        """Zero new rows, since their previous contents may be NaN."""
        if rows:
            self.cache.zero(rows)
            if self._scores is not None:
                self._scores.reset(rows)

    def _evict(self, row: int) -> None:
        """Reduce a row to the budget."""
        assert self._scores is not None
        budget, held, buffer_row = (
            self._selection.budget,
            self._synced[row] - self.left_out(row),
            self.cache.buffer_row(row),
        )
        for layer in range(self._model.layers):
            keys = self.cache.stored(layer)[0]  # the cache may have grown since scores were recorded
            self._scores.reserve(layer, keys)
            kept = self._selection.evict(self._scores.of(layer, row)[:, :held])
            for buffer in self.cache.stored(layer):
                buffer[buffer_row, :, :budget] = buffer[buffer_row].take_along_dim(kept[..., None], 1)
            self._scores.compact(layer, row, kept)
        self._left_out[row] = self._synced[row] - budget

    def _probe(self) -> None:
        """Run one token and check that every layer calls the observer once."""
        scratch = self._model.new_cache()
        scratch.reserve([0], 1)
        zero = torch.zeros(1, dtype=torch.long, device=self.device)
        step = self._model.address(TokenTree.root(zero), zero, (0,), 1)
        observer = _ProbeObserver(SlotView(scratch, step))
        self._model.run(step, observer.view, None, observer)
        if observer.layers != list(range(self._model.layers)):
            raise ModelError(
                f"{self._model.name} bypasses foredraft's attention, so partial-cache drafting is unavailable; use a "
                "draft that reads the whole cache."
            )


class _FarTokens(NamedTuple):
    """The tokens before the border of B rows in the full cache, for the first ``layers`` layers, which read them in
    place of the ``budget`` selected ones.

    ``ends``: the borders; 0 for a row that fits. ``extent``: the largest of them.
    """

    full: SlotCache
    layers: int
    budget: int
    ends: Int[Tensor, "B"]
    extent: int
    buffer_rows: Int[Tensor, "B"]

    def before(
        self, layer: int, kept: tuple[Float[Tensor, "B K S E"], Float[Tensor, "B K S F"]]
    ) -> tuple[Float[Tensor, "B K T E"], Float[Tensor, "B K T F"]]:
        """Keys and values of the far tokens, before those of the partial cache; T is ``extent`` + S."""
        keys, values = (
            torch.cat([source[:, :, : self.extent].index_select(0, self.buffer_rows), own], dim=2)
            for source, own in zip(self.full.stored(layer), kept, strict=True)
        )
        return keys, values

    def mask(self, mask: Float[Tensor, "B 1 M S"]) -> Float[Tensor, "B 1 M T"]:
        """A mask over the slots of the partial cache becomes one over ``before``."""
        index, least = torch.arange(max(self.extent, mask.shape[3]), device=mask.device), torch.finfo(mask.dtype).min
        ends = self.ends[:, None, None, None]
        beyond = index[: self.extent] >= ends
        far = torch.zeros_like(beyond, dtype=mask.dtype).masked_fill(beyond, least)
        selected = (index[: mask.shape[3]] < self.budget) & (ends > 0)
        return torch.cat([far.expand(-1, -1, mask.shape[2], -1), mask.masked_fill(selected, least)], dim=3)


@final
class _GatherObserver(AttentionObserver):
    """Observer of a ``PartialLM`` forward: gathers the tokens of pending rows, then writes the new ones."""

    def __init__(
        self,
        model: PartialLM,
        view: SlotView,
        rows: Sequence[int],
        pending: dict[int, _PendingSelection],
        scores: AttentionScores | None,
        far: _FarTokens | None,
    ) -> None:
        self.wants_weights = scores is not None
        self._model = model
        self._view = view
        self._rows = to_device(rows, model.device)
        self._pending = pending
        self._scores = scores
        self._far = far

    def attend_to(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        keys, _ = self._model.cache.buffers(layer, key, value)
        if self._scores is not None:
            self._scores.reserve(layer, keys)
        for index, pending in self._pending.items():
            self._model.gather(pending, layer, query[index, :, 0], scale)
        kept = self._view.store.write(layer, key, value, self._view)
        far = self._far_of(layer)
        return kept if far is None else far.before(layer, kept)

    def mask(self, layer: int, mask: Tensor) -> Tensor:
        far = self._far_of(layer)
        return mask if far is None else far.mask(mask)

    def _far_of(self, layer: int) -> _FarTokens | None:
        """The tokens that a layer reads of the full cache, if it does."""
        return self._far if self._far is not None and layer < self._far.layers else None

    def record_weights(self, layer: int, weights: Tensor) -> None:
        if self._scores is not None and self._far_of(layer) is None:
            self._scores.add_pending(layer, self._rows, weights)


@final
class _ProbeObserver(AttentionObserver):
    """Records which layers call it with their cached keys and values."""

    def __init__(self, view: SlotView) -> None:
        self.layers: list[int] = []
        self.view = view

    def attend_to(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        keys, values = self.view.store.stored(layer)
        kv_extent = self.view.kv_extent
        if torch.equal(key, keys[:, :, :kv_extent]) and torch.equal(value, values[:, :, :kv_extent]):
            self.layers.append(layer)
        return key, value

    def record_weights(self, layer: int, weights: Tensor) -> None: ...


def _copy_tokens(full: SlotCache, part: SlotCache, copies: Mapping[int, _Copy], layers: int) -> None:
    """Copy keys and values of new tokens, by row, from the full to the partial cache, overwriting their slots."""
    short: dict[int, _Copy] = {}
    long: dict[_Copy, list[int]] = {}
    for row, copy in copies.items():
        if copy.end - copy.begin > _SHORT:
            long.setdefault(copy, []).append(row)
        elif copy.end > copy.begin:
            short[row] = copy
    if not short and not long:
        return
    table = _copy_table(full, part, short) if short else None
    for layer in range(layers):
        stored = full.stored(layer)
        for source, target in zip(stored, part.buffers(layer, *stored), strict=True):
            if table is not None:
                source_rows, target_rows, read, written = table
                target[target_rows, :, written] = source[source_rows, :, read]
            for (left_out, begin, end), group in long.items():
                copied = source[full.buffer_rows(group), :, begin:end]
                target[part.buffer_rows(group), :, begin - left_out : end - left_out] = copied


def _copy_table(
    full: SlotCache, part: SlotCache, copies: Mapping[int, _Copy]
) -> tuple[Int[Tensor, "B 1"], Int[Tensor, "B 1"], Int[Tensor, "B W"], Int[Tensor, "B W"]]:
    """Lines and slots to read and to write, of each; rows with fewer tokens repeat their last one.

    Returns:
        lines read, lines written, slots read, slots written.
    """
    entries = [
        (full.buffer_row(row), part.buffer_row(row), copy.left_out, copy.begin, copy.end - 1)
        for row, copy in copies.items()
    ]
    width = max(last + 1 - begin for *_, begin, last in entries)
    table = to_device(entries, full.stored(0)[0].device)[..., None]
    sources, targets, left_out, begin, last = table.unbind(1)
    read = (begin + torch.arange(width, device=table.device)).minimum(last)
    return sources, targets, read, read - left_out
