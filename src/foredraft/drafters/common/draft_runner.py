"""What the drafters on a whole model have in common: it reads each text beside the target, in a cache of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar, final, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.drafter import Needs, Plan, Rewindable, View
from foredraft.core.tree import TokenTree
from foredraft.drafters.common.tree_builder import TreeBuilder
from foredraft.drafters.common.tree_ops import ranked
from foredraft.model.base import TargetModel, widened
from foredraft.model.cache import SlotCache
from foredraft.model.prefill import prefill

_CATCH_UP = 16
"""A row that is further behind than this is brought up on its own; the others need not read along."""


class DraftRunner:
    """A draft model with a slot cache, row for row beside the target's.

    Each ``read`` first reads what was committed since the last one, be it an accepted draft or not. So nothing has to
    be rolled back, and a row that was not drafted for a while catches up.

    Args:
        model: the draft.
        vocab_size: of the target. The draft's may be narrower or wider, as padded vocabularies are.
    """

    def __init__(self, model: TargetModel, vocab_size: int) -> None:
        self.model = model
        self.cache: SlotCache = model.new_cache()
        self._vocab_size = vocab_size
        self._known: dict[int, int] = {}  # committed tokens of each row that the cache holds

    @property
    def rows(self) -> frozenset[int]:
        """The texts that are being read."""
        return frozenset(self._known)

    def admit(self, row: int) -> None:
        """A text begins; it is read when it is first drafted for."""
        self._known[row] = 0

    def rewind(self, row: int, length: int) -> None:
        """Only the first so many tokens of a text stand."""
        self._known[row] = min(self._known[row], length)

    def release(self, row: int) -> None:
        """Forget a text; the last one takes the cache with it."""
        self._known.pop(row, None)
        if not self._known:
            self.cache.clear()

    def within_context(self, view: View, plan: Plan) -> Plan:
        """The plan without what the draft's context has no room for: a text that has outgrown it goes on alone."""
        if max(view.extents) + plan.length <= self.model.max_length:
            return plan
        rooms = (self.model.max_length - extent for extent in view.extents)
        return replace(plan, lengths=tuple(max(0, min(p, r)) for p, r in zip(plan.lengths, rooms, strict=True)))

    def read(self, view: View, room: int) -> Float[Tensor, "B 1 V"]:
        """Read what is new in each row, up to its root; return the logits after the root.

        Args:
            room: drafted nodes for which there will have to be slots behind it.
        """
        self.cache.reserve(max(view.rows) + 1, max(view.extents) + room + _CATCH_UP)
        fresh = [row for row in view.rows if self._known[row] == 0]
        if fresh:  # whoever had the row before may have left NaN behind
            self.cache.zero(fresh)
        limit = self.model.max_length
        extents = [min(extent, limit) for extent in view.extents]
        far = [b for b, row in enumerate(view.rows) if extents[b] - self._known[row] > _CATCH_UP]
        if far:
            self._catch_up(view, far, extents)
        width = max(max(extents[b] - self._known[row], 1) for b, row in enumerate(view.rows))
        starts = [max(extent - width, 0) for extent in extents]
        offsets = [extent - 1 - start for extent, start in zip(extents, starts, strict=True)]
        bases = torch.tensor(starts, device=view.lengths.device)
        index = bases[:, None] + torch.arange(width, device=bases.device)
        tokens = self.mine(view.history.gather(1, index.clamp(max=view.history.shape[1] - 1)))
        wanted = sorted(set(offsets))
        step = self.model.address(TokenTree.chain(tokens), bases, view.rows, max(starts) + width)
        out = self.model.forward(step, self.cache, keep=torch.tensor(wanted, device=bases.device))
        for row, extent in zip(view.rows, extents, strict=True):
            self._known[row] = extent
        places = torch.tensor([wanted.index(offset) for offset in offsets], device=bases.device)
        return self.widened(out.logits.gather(1, places[:, None, None].expand(-1, 1, out.logits.shape[-1])))

    def read_on(self, view: View, tokens: Int[Tensor, "B"], index: int) -> Float[Tensor, "B 1 V"]:
        """Logits after drafted token ``index`` (from 1 on) of a chain; those before it have been read."""
        chain = TokenTree.chain(self.mine(tokens[:, None]))
        step = self.model.address(chain, view.lengths - 1 + index, view.rows, max(view.extents) + index)
        return self.widened(self.model.forward(step, self.cache).logits)

    def read_level(self, view: View, tree: TokenTree, start: int) -> Float[Tensor, "B F V"]:
        """Logits after the nodes of a tree from ``start`` on; those before it have been read."""
        mine = replace(tree, tokens=self.mine(tree.tokens))
        reach = max(view.extents) - 1 + tree.tokens.shape[1]
        step = self.model.address(mine, view.lengths - 1, view.rows, reach, start=start)
        return self.widened(self.model.forward(step, self.cache).logits)

    def mine(self, tokens: Int[Tensor, "B N"]) -> Int[Tensor, "B N"]:
        """Token ids that the draft can look up; only padding of a vocabulary is ever beyond."""
        return tokens.clamp(max=self.model.vocab_size - 1)

    def widened(self, logits: Float[Tensor, "B N v"]) -> Float[Tensor, "B N V"]:
        """The draft's logits over the target's vocabulary, and numbers whatever the draft computed."""
        return widened(logits, self._vocab_size)

    def _catch_up(self, view: View, far: Sequence[int], extents: Sequence[int]) -> None:
        """Read all but the last token of the rows that are far behind, without the others."""
        rows = [view.rows[b] for b in far]
        starts = [self._known[row] for row in rows]
        counts = [extents[b] - 1 - start for b, start in zip(far, starts, strict=True)]
        tokens = torch.zeros(len(far), max(counts), dtype=torch.long, device=view.history.device)
        for line, (b, start, count) in enumerate(zip(far, starts, counts, strict=True)):
            tokens[line, :count] = view.history[b, start : start + count]
        prefill(self.model, self.cache, rows, self.mine(tokens), starts)
        self._known.update({row: extents[b] - 1 for row, b in zip(rows, far, strict=True)})


@runtime_checkable
class ReadsTexts(Protocol):
    """A ``DraftRunner``, or what stands before one."""

    def admit(self, row: int) -> None:
        """See ``DraftRunner.admit``."""

    def rewind(self, row: int, length: int) -> None:
        """See ``DraftRunner.rewind``."""

    def release(self, row: int) -> None:
        """See ``DraftRunner.release``."""


R = TypeVar("R", bound=ReadsTexts)


class ReadingDrafter(Rewindable, Generic[R]):
    """A drafter on one model that reads each text beside the target. Subclasses say how they ``propose``."""

    def __init__(self, reader: R, needs: Needs) -> None:
        self._reader = reader
        self.needs = needs

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:
        self._reader.admit(row)

    def rewind(self, row: int, length: int) -> None:
        self._reader.rewind(row, length)

    def release(self, row: int) -> None:
        self._reader.release(row)


@runtime_checkable
class ReadsTrees(Protocol):
    """A ``DraftRunner``, or what stands before one."""

    def read_level(self, view: View, tree: TokenTree, start: int) -> Float[Tensor, "B F V"]:
        """See ``DraftRunner.read_level``."""
        ...


@final
class ReaderGrowing(TreeBuilder):
    """A tree that grows on a model that reads along. ``DraftRunner.read`` has given the ``logits`` after the root."""

    def __init__(self, reader: ReadsTrees, view: View, logits: Float[Tensor, "B 1 V"]) -> None:
        super().__init__(view, logits)
        self._reader = reader

    def wide(self) -> Float[Tensor, "B F V"]:
        return self.logits

    def ranked(self, count: int) -> tuple[Int[Tensor, "B F K"], Float[Tensor, "B F K"]]:
        warp = self.view.warp
        return ranked(warp.processed(self.logits, self.paths), count, warp)

    def _after_newest(self) -> Float[Tensor, "B F V"]:
        return self._reader.read_level(self.view, self.read, self.begin)
