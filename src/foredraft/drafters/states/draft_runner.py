"""A draft model that reads each row with its own KV cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.drafter import Needs, Plan, RowState, View
from foredraft.core.tree import TokenTree
from foredraft.drafters.states.read_rows import ReadRows
from foredraft.heads.glide_model import GlideLM
from foredraft.model.base import TargetModel, widened
from foredraft.model.kv.cache import SlotCache
from foredraft.model.ops import Ops
from foredraft.model.prefill import prefill
from foredraft.model.recording.segment import Segment, SegmentRows

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UnreadTokens:
    """The last tokens of each row up to the root, among them all that the draft model has not read.

    ``lengths``: of the rows. ``kv_extent``: the slots that the draft's forwards are addressed for. ``full``: no row is
    shorter than W; otherwise shorter ones end before the last column.
    """

    tokens: Int[Tensor, "B W"]
    lengths: Int[Tensor, "B"]
    kv_extent: int
    full: bool


class DraftRunner(RowState):
    """A draft model with its own slot cache, with the target's row numbers.

    Each draft first reads the tokens committed since the last one, accepted drafts included. So nothing has to be
    rolled back, and a row that did not draft for a while catches up.

    Args:
        model: the draft model.
        vocab_size: of the target. The draft's may differ by padding.
    """

    def __init__(self, model: TargetModel, vocab_size: int) -> None:
        self.model = model
        self.cache: SlotCache = model.new_cache()
        self._vocab_size = vocab_size
        self._read = ReadRows(self.cache, model)  # an entry is a committed token
        self._segments = SegmentRows(self.cache, lambda: model.version, self._read.give_up)
        self.logits = Segment("draft", self._logits, self._segments, model=model, of_view=False)
        self.states: tuple[RowState, ...] = (self._read,)
        shares = isinstance(model, GlideLM)
        self.needs = Needs(target_cache=shares, ahead=not shares)

    def within_context(self, view: View, plan: Plan) -> Plan:
        """The plan without rows that are longer than the draft's context."""
        if max(view.host_lengths) + plan.length <= self.model.max_length:
            return plan
        remaining = (self.model.max_length - length for length in view.host_lengths)
        return replace(plan, lengths=tuple(max(0, min(p, r)) for p, r in zip(plan.lengths, remaining, strict=True)))

    def drafting(self, name: str, function: Callable[..., T]) -> Segment[T]:
        """A draft for ``draft``: ``function(view, forwards, *arguments)`` calls ``forwards.root`` first.

        A draft with all its forwards is one segment; where it is not recorded as a whole, each of its forwards is.
        """

        def drafted(view: View, unread: UnreadTokens, *arguments: Any) -> T:
            return function(view, Forwards(self, view, unread), *arguments)

        return Segment(name, drafted, self._segments, model=self.model)

    @torch.inference_mode()
    def draft(self, drafting: Segment[T], view: View, max_nodes: int, *arguments: Any, read: View | None = None) -> T:
        """Draft after the new tokens of each row.

        Args:
            drafting: of this runner.
            max_nodes: the most nodes that are drafted.
            arguments: of its function.
            read: the rows that the model reads, if they differ from ``view``.
        """
        read = self._as_read(view if read is None else read)
        ends = [min(length, self.model.max_length) for length in read.host_lengths]
        unread = self._unread(read, ends, max_nodes)
        with self.model.running():
            draft = drafting(view, unread, *arguments)
        self._read.read_to(read, ends)
        return draft

    def _as_read(self, view: View) -> View:
        """The rows as the model reads them: here, whole."""
        return view

    def _unread(self, view: View, ends: Sequence[int], max_nodes: int) -> UnreadTokens:
        """The new tokens of each row, with slots reserved for them and for ``max_nodes`` nodes."""
        slots, read = max(view.host_lengths) + max_nodes, lambda far: self._prefill(view, far, ends)
        width = self._read.catch_up(view, ends, slots, read)
        lengths = view.lengths.clamp(max=self.model.max_length)
        index = (lengths - width).clamp(min=0)[:, None] + torch.arange(width, device=lengths.device)
        tokens = view.history.gather(1, index.clamp(max=view.history.shape[1] - 1))
        used_slots = max(max(ends) + max_nodes, width)
        full = min(ends) - view.slack >= width
        return UnreadTokens(tokens, lengths, self.model.kv_extent(used_slots, 1, self.cache.slots), full)

    def clip_ids(self, tokens: Int[Tensor, "B N"]) -> Int[Tensor, "B N"]:
        """Token ids clipped to the draft's vocabulary; only padding ids are ever beyond it."""
        return tokens.clamp(max=self.model.vocab_size - 1)

    def widened(self, logits: Float[Tensor, "B N v"]) -> Float[Tensor, "B N V"]:
        """The draft's logits over the target's vocabulary; finite even if the draft's are not."""
        return widened(logits, self._vocab_size)

    def _logits(
        self, tree: TokenTree, bases: Int[Tensor, "B"], kv_extent: int, start: int, last: bool
    ) -> Float[Tensor, "B F V"]:
        """A forward; see ``Forwards``."""
        tree = replace(tree, tokens=self.clip_ids(tree.tokens))
        step = self.model.address(tree, bases, self.cache.first(len(bases)), kv_extent, start=start)
        keep = torch.full((1,), tree.tokens.shape[1] - 1, device=bases.device) if last else None
        return self.widened(self.model.compute(step, self.cache, keep).logits)

    def _prefill(self, view: View, far: Sequence[int], host_lengths: Sequence[int]) -> None:
        """Read all but the last token of the rows that are far behind."""
        rows = [view.rows[b] for b in far]
        starts = [self._read.count[row] for row in rows]
        counts = [host_lengths[b] - 1 - start for b, start in zip(far, starts, strict=True)]
        tokens = torch.zeros(len(far), max(counts), dtype=torch.long, device=view.history.device)
        for line, (b, start, count) in enumerate(zip(far, starts, counts, strict=True)):
            tokens[line, :count] = view.history[b, start : start + count]
        prefill(self.model, self.cache, rows, self.clip_ids(tokens), starts)


@final
class Forwards:
    """The forwards of one draft; logits are valid until the next forward."""

    def __init__(self, runner: DraftRunner, view: View, unread: UnreadTokens) -> None:
        self._runner = runner
        self._view = view
        self._unread = unread if view.host_lengths else replace(unread, lengths=unread.lengths.clamp(min=1))  # padding

    @property
    def ops(self) -> Ops:
        """Of the model."""
        return self._runner.model.ops

    def root(self) -> Float[Tensor, "B 1 V"]:
        """Read the new tokens of each row; return the logits after the root."""
        tokens, lengths, full = self._unread.tokens, self._unread.lengths, self._unread.full
        width = tokens.shape[1]
        logits = self._forward(TokenTree.chain(tokens), (lengths - width).clamp(min=0), last=full)
        if full:
            return logits
        places = lengths.clamp(max=width) - 1
        return logits.gather(1, places[:, None, None].expand(-1, 1, logits.shape[2]))

    def next(self, tokens: Int[Tensor, "B"], index: int) -> Float[Tensor, "B 1 V"]:
        """Logits after drafted token ``index`` (from 1 on) of a chain whose earlier tokens have been read."""
        return self._forward(TokenTree.chain(tokens[:, None]), self._unread.lengths - 1 + index)

    def level(self, tree: TokenTree, start: int) -> Float[Tensor, "B F V"]:
        """Logits after the nodes of a tree from ``start`` on; earlier nodes have been read."""
        return self._forward(tree, self._unread.lengths - 1, start)

    def _forward(
        self, tree: TokenTree, bases: Int[Tensor, "B"], start: int = 0, *, last: bool = False
    ) -> Float[Tensor, "B F V"]:
        """Logits after the nodes from ``start`` on, or after the last one; the rows are the first ones of the cache."""
        runner, model = self._runner, self._runner.model
        kv_extent = model.kv_extent(self._unread.kv_extent, tree.tokens.shape[1] - start, runner.cache.slots)
        return runner.logits(self._view, tree, bases, kv_extent, start, last)
