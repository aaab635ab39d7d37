"""The target's weights over a part of its keys and values: a cheap draft of the target itself.

The partial cache of a row is [what a selection keeps of the text before a border | everything since]. Kept tokens stand
close together, so slot = position - how many tokens have been left out before it; keys keep the rotation of their own
position, and the model is told positions, not slots. A text that fits has nothing left out: it is the whole cache.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.drafter import StepOut
from foredraft.core.errors import ModelError
from foredraft.core.tree import TokenTree
from foredraft.model.attention import AttentionObserver
from foredraft.model.base import TargetModel
from foredraft.model.cache import SlotCache, SlotView, Unwritten
from foredraft.model.hf import CausalLM
from foredraft.model.masks import StepIn, address
from foredraft.model.partial.attention_scores import AttentionTally
from foredraft.model.partial.kv_copy import New, take_in
from foredraft.model.partial.kv_selection import Selection
from foredraft.model.support import UNBOUNDED


class _Due(NamedTuple):
    """A row whose tokens are to be chosen in the next forward, and where it stands."""

    row: int
    border: int
    committed: int


@final
class PartialLM(TargetModel):
    """A model over a partial copy of its own cache, behind the same forward: rows, trees and lengths as ever.

    ``sync`` comes first, whenever the texts have grown: it copies what is new from the full cache, as the model
    itself wrote it, and lets go of what there is no more room for. Tokens are chosen by the query of the newest token;
    since that is known layer by layer, they are gathered inside the forward that follows.

    Args:
        model: the target.
        full: its cache, row for row the same as this one's.
        selection: what is kept of a long text.
        room: slots for what has come since tokens were last chosen, and for what is in flight.

    Raises:
        ModelError: layers with a window of their own, or attention that is the model's own affair.
    """

    def __init__(self, model: CausalLM, full: SlotCache, selection: Selection, room: int) -> None:
        if any(reach is not None for reach in model.layout.kinds.values()):
            raise ModelError(
                f"{model.name} has layers that see a window of the text only, which a partial cache cannot keep apart "
                "from what it leaves out; draft for it with a model of its own, or with prompt_lookup."
            )
        self.vocab_size = model.vocab_size
        self.max_length = model.max_length
        self.capacity = selection.budget + room
        self.most_ahead = room - selection.slack - 1
        self.cache = SlotCache(model.layers, limit=self.capacity)
        self._model = model
        self._full = full
        self._selection = selection
        self._left: dict[int, int] = {}  # tokens of each row that have been left out
        self._copied: dict[int, int] = {}  # committed tokens of each row that have been taken in or left out
        self._due: dict[int, _Due] = {}
        self._tally = AttentionTally(model.layers) if selection.counts else None
        self._probe()

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    @property
    def nbytes(self) -> int:
        """Of keys and values, and of what is known about them."""
        return self.cache.nbytes + (self._tally.nbytes if self._tally is not None else 0)

    def new_cache(self) -> SlotCache:
        """The one partial cache that this model has."""
        return self.cache

    def empty_hidden(self, rows: int) -> dict[int, Float[Tensor, "B T H"]]:
        return self._model.empty_hidden(rows)

    def left_out(self, row: int) -> int:
        """How many tokens of a row's text are not in the cache."""
        return self._left.get(row, 0)

    @torch.inference_mode()
    def sync(self, rows: Sequence[int], extents: Sequence[int], ahead: int, anew: Collection[int] = ()) -> list[int]:
        """Take in what has been committed; the full cache holds each row's text but its last token, the root.

        Args:
            extents: lengths of the texts, root included.
            ahead: slots that will be written behind the root's before the next call, padding included.
            anew: rows whose tokens shall be chosen again, because they serve no longer.

        Returns:
            the rows whose tokens are chosen anew, for that reason or for want of room.

        Raises:
            ModelError: there is never room for so many nodes.
        """
        if ahead > self.most_ahead:
            raise ModelError(f"A partial cache with room for {self.most_ahead} nodes ahead cannot take {ahead}.")
        if self._tally is not None:
            self._tally.drop()
        self.cache.reserve(max(rows) + 1, max(extents) + ahead)
        self._begin([row for row in rows if row not in self._copied])
        copies: dict[int, New] = {}
        evicted, chosen = [], []
        for row, extent in zip(rows, extents, strict=True):
            left, copied, end = self.left_out(row), self._copied.get(row, 0), extent - 1
            again = row in self._due or (row in anew and left > 0)
            fits = end - left + 1 + ahead <= self.capacity and not again
            evicts = not fits and not again and self._tally is not None and 0 < copied <= end <= left + self.capacity
            if fits or evicts:
                copies[row] = New(left, copied, end)
            if evicts:
                evicted.append(row)
            elif not fits:
                border = self._selection.border(end)
                self._due[row] = _Due(row, border, end)
                self._left[row] = border - self._selection.budget
                chosen.append(row)
            self._copied[row] = end
        take_in(self._full, self.cache, copies, range(self._model.layers))
        for row in evicted:
            self._evict(row)
        return chosen + evicted

    @torch.inference_mode()
    def finalize(self, accepted: Int[Tensor, "B"]) -> None:
        """Of the chain that was read since ``sync``, so many tokens a row stand: only their attention counts."""
        if self._tally is not None:
            self._tally.finalize(accepted)

    def rewind(self, row: int, length: int) -> None:
        """Only the first so many tokens of a text stand."""
        left = self.left_out(row)
        if left and length < left + self._selection.budget:  # it may have lost some that were kept
            self.forget(row)
        elif row in self._copied:
            self._copied[row] = min(self._copied[row], length)

    def forget(self, row: int) -> None:
        """A text has ended."""
        for known in (self._left, self._copied, self._due):
            known.pop(row, None)

    def clear(self) -> None:
        """Forget all texts and give the memory back."""
        for known in (self._left, self._copied, self._due):
            known.clear()
        self.cache.clear()
        if self._tally is not None:
            self._tally.clear()

    def address(
        self, tree: TokenTree, bases: Int[Tensor, "B"], rows: Sequence[int], reach: int, *, start: int = 0
    ) -> StepIn:
        left = torch.tensor([self.left_out(row) for row in rows], device=bases.device)
        layout, most = self._model.layout, self.capacity
        step = address(
            tree, bases - left, rows, min(reach, most), layout, dtype=self.dtype, max_position=UNBOUNDED, start=start
        )
        return replace(
            step,
            positions=(step.positions + left[:, None]).clamp(max=self.max_length - 1),
            masks={kind: mask[..., :most] for kind, mask in step.masks.items()},
            extent=min(step.extent, most),
        )

    @torch.inference_mode()
    def forward(self, step: StepIn, cache: SlotCache, keep: Int[Tensor, "M"] | None = None) -> StepOut:
        due: dict[int, _Due] = {}
        if self._due:
            due = {line: self._due.pop(row) for line, row in enumerate(step.rows.tolist()) if row in self._due}
        if not due and self._tally is None:
            return self._model.forward(step, cache, keep)
        view = SlotView.of(cache, step)
        return self._model.run(step, Unwritten(step.extent), keep, _Gathering(self, view, due, self._tally))

    def gather(self, due: _Due, layer: int, query: Float[Tensor, "H E"], scale: float) -> None:
        """Choose a row's tokens in one layer, and take them and what has come since from the full cache."""
        row, border, committed = due
        full, own = self._full.stored(layer), self.cache.stored(layer)
        keys = full[0][row, :, :border]
        chosen = self._selection.choose(query.unflatten(0, (keys.shape[0], -1)), keys, scale)
        budget = self._selection.budget
        for source, target in zip(full, own, strict=True):
            target[row, :, :budget] = _picked(source[row], chosen)
            target[row, :, budget : budget + committed - border] = source[row, :, border:committed]
        if self._tally is not None:
            self._tally.restart([row], layer)

    def _begin(self, rows: list[int]) -> None:
        """Clear rows for new texts: whoever had them before may have left NaN behind."""
        if rows:
            self.cache.zero(rows)
            if self._tally is not None:
                self._tally.restart(rows)

    def _evict(self, row: int) -> None:
        """Keep the budget of what the cache holds of a row."""
        assert self._tally is not None
        budget, held = self._selection.budget, self._copied[row] - self.left_out(row)
        for layer in range(self._model.layers):
            keys = self.cache.stored(layer)[0]  # it may have grown since anything was noted
            self._tally.reserve(layer, (keys.shape[0], keys.shape[1], keys.shape[2]), keys.device)
            kept = self._selection.evict(self._tally.of(layer, row)[:, :held])
            for buffer in self.cache.stored(layer):
                buffer[row, :, :budget] = _picked(buffer[row], kept)
            self._tally.compact(layer, row, kept)
        self._left[row] = self._copied[row] - budget

    def _probe(self) -> None:
        """Run a token through the model and see that every layer shows its query, once."""
        scratch = self._model.new_cache()
        scratch.reserve(1, 1)
        place = torch.zeros(1, dtype=torch.long, device=self.device)
        step = self._model.address(TokenTree.root(place), place, (0,), 1)
        seen = _Seen(SlotView.of(scratch, step))
        self._model.run(step, seen.view, None, seen)
        if seen.layers != list(range(self._model.layers)):
            raise ModelError(
                f"{self._model.name} does not attend by foredraft's attention function, once a layer and over keys as "
                "they are cached, so nobody sees which of them its queries ask for; use a draft that reads all of them."
            )


@final
class _Gathering(AttentionObserver):
    """One watched forward of a ``PartialLM``: rows that are due get their tokens, then all write theirs."""

    def __init__(self, model: PartialLM, view: SlotView, due: dict[int, _Due], tally: AttentionTally | None) -> None:
        self.wants_weights = tally is not None
        self._model = model
        self._view = view
        self._due = due
        self._tally = tally

    def attend_to(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        keys, _ = self._model.cache.buffers(layer, key, value)
        if self._tally is not None:
            self._tally.reserve(layer, (keys.shape[0], keys.shape[1], keys.shape[2]), keys.device)
        for line, due in self._due.items():
            self._model.gather(due, layer, query[line, :, 0], scale)
        return self._view.store.write(layer, key, value, self._view)

    def attended(self, layer: int, weights: Tensor) -> None:
        if self._tally is not None:
            self._tally.note(layer, self._view.rows, weights)


@final
class _Seen(AttentionObserver):
    """Notes which layers show their queries, over keys as they are cached."""

    def __init__(self, view: SlotView) -> None:
        self.layers: list[int] = []
        self.view = view

    def attend_to(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        keys, values = self.view.store.stored(layer)
        extent = self.view.extent
        if torch.equal(key, keys[:, :, :extent]) and torch.equal(value, values[:, :, :extent]):
            self.layers.append(layer)
        return key, value

    def attended(self, layer: int, weights: Tensor) -> None: ...


def _picked(buffer: Float[Tensor, "K S E"], places: Int[Tensor, "K T"]) -> Float[Tensor, "K T E"]:
    return buffer.gather(1, places[..., None].expand(-1, -1, buffer.shape[-1]))
