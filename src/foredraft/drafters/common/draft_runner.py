"""Runs a draft model that reads each row with its own KV cache; base class of drafters with one model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar, final, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.drafter import Needs, Plan, Rewindable, Room, View
from foredraft.core.tree import TokenTree
from foredraft.drafters.common.read_rows import ReadRows
from foredraft.drafters.common.tree_builder import TreeBuilder
from foredraft.drafters.common.tree_ops import ranked
from foredraft.model.base import TargetModel, widened
from foredraft.model.cache import SlotCache
from foredraft.model.prefill import CATCH_UP, CHUNK, prefill
from foredraft.model.replay import EAGER, Replay


class DraftRunner:
    """A draft model with its own slot cache, with the target's row numbers.

    Each ``read`` first reads the tokens committed since the last one, accepted drafts included. So nothing has to be
    rolled back, and a row that did not draft for a while catches up.

    Args:
        model: the draft model.
        vocab_size: of the target. The draft's may differ by padding.
        replay: how steps run; a ``child`` of it runs the forwards, whose logits are valid until the next one.
    """

    def __init__(self, model: TargetModel, vocab_size: int, replay: Replay = EAGER) -> None:
        self.model = model
        self._replay = replay.child()
        self.cache: SlotCache = model.new_cache()
        self._vocab_size = vocab_size
        self._read = ReadRows(self.cache)  # an entry is a committed token

    @property
    def rows(self) -> frozenset[int]:
        """The admitted rows."""
        return frozenset(self._read.count)

    def read_ahead(self, row: int, prompt: Int[Tensor, "T"], room: Room) -> None:
        """Read some of a prompt; see ``Drafter.read_ahead``."""
        begin = self._read.add(row)
        end = min(begin + CHUNK, len(prompt), self.model.max_length - 1)
        if begin < end:
            self.cache.reserve(row + 1, end + CATCH_UP, room)
            if not begin:  # an earlier request in the row may have left NaN
                self.cache.zero([row])
            prefill(self.model, self.cache, [row], self.clip_ids(prompt[None, begin:end]), [begin])
            self._read.count[row] = end

    def fork(self, row: int, source: int, length: int) -> None:
        """Add a row with what was read of another; see ``Drafter.fork``."""
        self._read.fork(row, source, length)

    def admit(self, row: int) -> None:
        """Add a row; what was not read of its prompt is read at its first draft."""
        self._read.add(row)

    def rewind(self, row: int, length: int) -> None:
        """Keep only the first ``length`` tokens of a row."""
        self._read.count[row] = min(self._read.count[row], length)

    def release(self, row: int) -> None:
        """Remove a row."""
        self._read.release(row)

    def within_context(self, view: View, plan: Plan) -> Plan:
        """The plan, limited by the draft's context; rows longer than it are not drafted for."""
        if max(view.extents) + plan.length <= self.model.max_length:
            return plan
        rooms = (self.model.max_length - extent for extent in view.extents)
        return replace(plan, lengths=tuple(max(0, min(p, r)) for p, r in zip(plan.lengths, rooms, strict=True)))

    def read(self, view: View, room: int) -> Float[Tensor, "B 1 V"]:
        """Read the new tokens of each row, up to its root; return the logits after the root.

        Args:
            room: drafted nodes to reserve slots for after the root.
        """
        extents = [min(extent, self.model.max_length) for extent in view.extents]
        slots, read = max(view.extents) + room, lambda far: self._prefill(view, far, extents)
        width = self._read.catch_up(view, extents, slots, read, few=self._replay.records)
        lengths = view.lengths.clamp(max=self.model.max_length)
        bases = (lengths - width).clamp(min=0)
        index = bases[:, None] + torch.arange(width, device=lengths.device)
        chain = TokenTree.chain(view.history.gather(1, index.clamp(max=view.history.shape[1] - 1)))
        if min(extents) >= width:
            logits = self._forward(self._replay, chain, bases, max(extents), last=True)
        else:  # some rows end before the last node
            logits = self._forward(EAGER, chain, bases, max(max(extents), width))
            places = lengths.clamp(max=width) - 1
            logits = logits.gather(1, places[:, None, None].expand(-1, 1, logits.shape[2]))
        self._read.count.update(zip(view.rows, extents, strict=True))
        return logits

    def read_next(self, view: View, tokens: Int[Tensor, "B"], index: int) -> Float[Tensor, "B 1 V"]:
        """Logits after drafted token ``index`` (from 1 on) of a chain whose earlier tokens have been read."""
        chain = TokenTree.chain(tokens[:, None])
        return self._forward(self._replay, chain, view.lengths - 1 + index, max(view.extents) + index)

    def read_level(self, view: View, tree: TokenTree, start: int) -> Float[Tensor, "B F V"]:
        """Logits after the nodes of a tree from ``start`` on; earlier nodes have been read."""
        reach = max(view.extents) - 1 + tree.tokens.shape[1]
        return self._forward(self._replay, tree, view.lengths - 1, reach, start)

    def clip_ids(self, tokens: Int[Tensor, "B N"]) -> Int[Tensor, "B N"]:
        """Token ids clipped to the draft's vocabulary; only padding ids are ever beyond it."""
        return tokens.clamp(max=self.model.vocab_size - 1)

    def widened(self, logits: Float[Tensor, "B N v"]) -> Float[Tensor, "B N V"]:
        """The draft's logits over the target's vocabulary; finite even if the draft's are not."""
        return widened(logits, self._vocab_size)

    @torch.inference_mode()
    def _forward(
        self,
        replay: Replay,
        tree: TokenTree,
        bases: Int[Tensor, "B"],
        reach: int,
        start: int = 0,
        *,
        last: bool = False,
    ) -> Float[Tensor, "B F V"]:
        """Logits after the nodes from ``start`` on, or after the last one; the rows are the first ones of the cache."""
        extent = self.model.extent(reach, tree.tokens.shape[1] - start, self.cache.slots)
        replay, sizes = self._read.replay(replay, self.model.version, len(bases))
        with self.model.running():
            return replay(
                "draft", sizes, self._logits, tree, bases, extent, start, last, why_eager=self.model.why_eager
            )

    def _logits(
        self, tree: TokenTree, bases: Int[Tensor, "B"], extent: int, start: int, last: bool
    ) -> Float[Tensor, "B F V"]:
        """The forward, which can be recorded."""
        tree = replace(tree, tokens=self.clip_ids(tree.tokens))
        step = self.model.address(tree, bases, self.cache.first(len(bases)), extent, start=start)
        keep = torch.full((1,), tree.tokens.shape[1] - 1, device=bases.device) if last else None
        return self.widened(self.model.compute(step, self.cache, keep).logits)

    def _prefill(self, view: View, far: Sequence[int], extents: Sequence[int]) -> None:
        """Read all but the last token of the rows that are far behind."""
        rows = [view.rows[b] for b in far]
        starts = [self._read.count[row] for row in rows]
        counts = [extents[b] - 1 - start for b, start in zip(far, starts, strict=True)]
        tokens = torch.zeros(len(far), max(counts), dtype=torch.long, device=view.history.device)
        for line, (b, start, count) in enumerate(zip(far, starts, counts, strict=True)):
            tokens[line, :count] = view.history[b, start : start + count]
        prefill(self.model, self.cache, rows, self.clip_ids(tokens), starts)


@runtime_checkable
class RowRunner(Protocol):
    """A ``DraftRunner`` or a wrapper of one."""

    def read_ahead(self, row: int, prompt: Int[Tensor, "T"], room: Room) -> None:
        """See ``DraftRunner.read_ahead``."""

    def fork(self, row: int, source: int, length: int) -> None:
        """See ``DraftRunner.fork``."""

    def admit(self, row: int) -> None:
        """See ``DraftRunner.admit``."""

    def rewind(self, row: int, length: int) -> None:
        """See ``DraftRunner.rewind``."""

    def release(self, row: int) -> None:
        """See ``DraftRunner.release``."""


R = TypeVar("R", bound=RowRunner)


class RunnerDrafter(Rewindable, Generic[R]):
    """A drafter with one draft model. Subclasses implement ``propose``."""

    def __init__(self, runner: R, needs: Needs) -> None:
        self._runner = runner
        self.needs = needs

    @torch.inference_mode()
    def read_ahead(
        self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 F G"]], room: Room
    ) -> None:
        self._runner.read_ahead(row, prompt, room)

    @torch.inference_mode()
    def fork(self, row: int, source: int, length: int) -> None:
        self._runner.fork(row, source, length)

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:
        self._runner.admit(row)

    def rewind(self, row: int, length: int) -> None:
        self._runner.rewind(row, length)

    def release(self, row: int) -> None:
        self._runner.release(row)


@runtime_checkable
class TreeRunner(Protocol):
    """A ``DraftRunner`` or a wrapper of one."""

    def read_level(self, view: View, tree: TokenTree, start: int) -> Float[Tensor, "B F V"]:
        """See ``DraftRunner.read_level``."""
        ...


@final
class RunnerTreeBuilder(TreeBuilder):
    """A tree built with a draft model. ``logits`` are those of ``DraftRunner.read``, after the root."""

    def __init__(self, runner: TreeRunner, view: View, logits: Float[Tensor, "B 1 V"]) -> None:
        super().__init__(view, logits, logits.shape[-1])
        self._runner = runner

    def target_logits(self) -> Float[Tensor, "B F V"]:
        return self.logits

    def ranked(self, count: int) -> tuple[Int[Tensor, "B F K"], Float[Tensor, "B F K"]]:
        warp = self.view.warp
        return ranked(warp.processed(self.logits, self.paths), count, warp)

    def _read_level(self, tokens: Int[Tensor, "B F"], places: Int[Tensor, "B F"]) -> Float[Tensor, "B F V"]:
        return self._runner.read_level(self.view, self.read, self.begin)
