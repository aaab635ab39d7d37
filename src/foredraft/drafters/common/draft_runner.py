"""Runs a draft model that reads each row with its own KV cache; base class of drafters with one model."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import KVSize, Needs, Plan, Rewindable, View
from foredraft.core.tree import TokenTree
from foredraft.drafters.common.dynamic_tree import TreeLimits, build_dynamic_tree
from foredraft.drafters.common.tree_builder import TreeBuilder
from foredraft.engine.nested_loop import NestedLoop
from foredraft.model.base import TargetModel, widened
from foredraft.model.kv.cache import SlotCache
from foredraft.model.native.model import engine_of
from foredraft.model.native.runner import KernelRuntime
from foredraft.model.prefill import prefill
from foredraft.model.read_rows import ReadRows
from foredraft.model.recording.replay import EAGER, PaddedSizes, Replay
from foredraft.model.recording.replay_rows import run_rows

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


class DraftRunner:
    """A draft model with its own slot cache, with the target's row numbers.

    Each draft first reads the tokens committed since the last one, accepted drafts included. So nothing has to be
    rolled back, and a row that did not draft for a while catches up.

    Args:
        model: the draft model.
        vocab_size: of the target. The draft's may differ by padding.
        replay: how steps run; a ``child`` of it runs the drafts, whose tensors are valid until the next one.
    """

    def __init__(self, model: TargetModel, vocab_size: int, replay: Replay = EAGER) -> None:
        self.model = model
        self._replay = replay.child()
        self.cache: SlotCache = model.new_cache()
        self._vocab_size = vocab_size
        self._read = ReadRows(self.cache)  # an entry is a committed token

    def read_ahead(self, row: int, prompt: Int[Tensor, "T"], kv_size: KVSize) -> None:
        """Read some of a prompt; see ``Drafter.read_ahead``."""
        self._read.read_ahead(self.model, row, prompt, kv_size)

    def fork(self, row: int, source: int, length: int) -> None:
        """Add a row with what was read of another; see ``Drafter.fork``."""
        self._read.fork(row, source, length)

    def admit(self, row: int, prompt: Int[Tensor, "T"] | None = None) -> None:
        """Add a row; what was not read of its prompt is read at its first draft, from the row itself."""
        self._read.add(row)

    def rewind(self, row: int, length: int) -> None:
        """Keep only the first ``length`` tokens of a row."""
        self._read.count[row] = min(self._read.count[row], length)

    def release(self, row: int) -> None:
        """Remove a row."""
        self._read.release(row)

    def planned(self, view: View, plan: Plan) -> Plan:
        """The plan, limited by the draft's context. Its draft is recorded if steps are."""
        plan = self._within_context(view, plan)
        return self._replay.planned(plan)

    def _within_context(self, view: View, plan: Plan) -> Plan:
        """The plan without rows that are longer than the draft's context."""
        if max(view.host_lengths) + plan.length <= self.model.max_length:
            return plan
        remaining = (self.model.max_length - length for length in view.host_lengths)
        return replace(plan, lengths=tuple(max(0, min(p, r)) for p, r in zip(plan.lengths, remaining, strict=True)))

    @torch.inference_mode()
    def draft(
        self,
        segment: str,
        view: View,
        max_nodes: int,
        function: Callable[..., T],
        *arguments: Any,
        read: View | None = None,
    ) -> T:
        """``function(view, forwards, *arguments)``: a draft with all its forwards is one segment, see ``model.replay``.

        Where it is not recorded as a whole, each of its forwards is.

        Args:
            max_nodes: the most nodes that are drafted.
            function: drafts with ``Forwards``, whose ``root`` it calls first.
            read: the rows that the model reads, if they differ from ``view``.
        """
        read = self._as_read(view if read is None else read)
        ends = [min(length, self.model.max_length) for length in read.host_lengths]
        unread = self._unread(read, ends, max_nodes)
        replay, sizes = self._read.replay(self._replay, self.model.version, len(ends))
        rows = self.cache.first(sizes.padded)

        def drafted(view: View, unread: UnreadTokens, *arguments: Any) -> T:
            filled = replace(unread, lengths=unread.lengths.clamp(min=1))  # padding has no tokens
            return function(view, Forwards(self, filled, EAGER, sizes, recorded=True), *arguments)

        def eager() -> T:
            return function(view, Forwards(self, unread, replay, sizes), *arguments)

        with self.model.running():
            reason = self.model.why_eager
            draft = run_rows(
                replay, rows, segment, drafted, view, unread, *arguments, otherwise=eager, why_eager=reason
            )
        self._read.read_to(read, ends)
        return draft

    def _as_read(self, view: View) -> View:
        """The rows as the model reads them: here, whole."""
        return view

    def _unread(self, view: View, ends: Sequence[int], max_nodes: int) -> UnreadTokens:
        """The new tokens of each row, with slots reserved for them and for ``max_nodes`` nodes."""
        slots, read = max(view.host_lengths) + max_nodes, lambda far: self._prefill(view, far, ends)
        width = self._read.catch_up(view, ends, slots, read, few=self._replay.records)
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

    def logits(
        self, tree: TokenTree, bases: Int[Tensor, "B"], kv_extent: int, start: int, last: bool
    ) -> Float[Tensor, "B F V"]:
        """A forward, which can be recorded; see ``Forwards``."""
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
    """The forwards of one draft; logits are valid until the next forward.

    Args:
        replay, sizes: how each forward runs.

    ``recorded``: the draft is recorded as a whole, so values cannot be read.
    """

    def __init__(
        self, runner: DraftRunner, unread: UnreadTokens, replay: Replay, sizes: PaddedSizes, *, recorded: bool = False
    ) -> None:
        self._runner = runner
        self._unread = unread
        self._replay = replay
        self._sizes = sizes
        self.recorded = recorded

    @property
    def engine(self) -> KernelRuntime | None:
        """That runs the model, if it is the native one."""
        return engine_of(self._runner.model)

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
        given = (tree, bases, kv_extent, start, last)
        return self._replay("draft", self._sizes, runner.logits, *given, why_eager=model.why_eager)


R = TypeVar("R", bound=DraftRunner | NestedLoop)


class RunnerDrafter(Rewindable, Generic[R]):
    """A drafter with one draft model, several, or a loop of several. Subclasses implement ``propose``."""

    def __init__(self, needs: Needs, *runners: R) -> None:
        self.needs = needs
        self._runners = runners

    @property
    def _runner(self) -> R:
        """The only runner, or the first."""
        return self._runners[0]

    @torch.inference_mode()
    def read_ahead(
        self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 F G"]], kv_size: KVSize
    ) -> None:
        for runner in self._runners:
            runner.read_ahead(row, prompt, kv_size)

    @torch.inference_mode()
    def fork(self, row: int, source: int, length: int) -> None:
        for runner in self._runners:
            runner.fork(row, source, length)

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:
        for runner in self._runners:
            runner.admit(row, prompt)

    def rewind(self, row: int, length: int) -> None:
        for runner in self._runners:
            runner.rewind(row, length)

    def release(self, row: int) -> None:
        for runner in self._runners:
            runner.release(row)


@final
class RunnerTreeBuilder(TreeBuilder):
    """A tree built with a draft model."""

    def __init__(self, forwards: Forwards, view: View) -> None:
        logits = forwards.root()
        super().__init__(view, logits, logits.shape[-1], engine=forwards.engine)
        self._forwards = forwards

    def _read_level(self, tokens: Int[Tensor, "B F"], places: Int[Tensor, "B F"]) -> Float[Tensor, "B F V"]:
        return self._forwards.level(self.read, self.starts[-1])


class ModelTreeDrafter(RunnerDrafter[DraftRunner]):
    """A drafter of trees with one draft model. Subclasses say how large a tree is, and how it is built."""

    @abstractmethod
    def limits(self, view: View) -> TreeLimits:
        """The limits of a draft for these rows, apart from the plan's."""

    @abstractmethod
    def tree(self, builder: RunnerTreeBuilder, allowed: Int[Tensor, "B"], limits: TreeLimits) -> Draft:
        """The tree; ``allowed`` is the number of levels that each row may have. Can be recorded."""

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        plan = self._runner.planned(view, plan)
        if not plan.length:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        limits = self.limits(view).within(plan)
        return self._runner.draft("tree", view, limits.expanded, self._built, plan.on(view.lengths.device), limits)

    def _built(self, view: View, forwards: Forwards, allowed: Int[Tensor, "B"], limits: TreeLimits) -> Draft:
        return self.tree(RunnerTreeBuilder(forwards, view), allowed, limits)


class DynamicModelDrafter(ModelTreeDrafter):
    """A drafter of dynamic trees with one draft model, within limits that do not change.

    Args:
        ahead, target_cache: see ``Needs``.
    """

    def __init__(
        self, limits: TreeLimits, runner: DraftRunner, *, ahead: bool = False, target_cache: bool = False
    ) -> None:
        self._limits = limits
        nodes, depth = limits.nodes, min(limits.depth, limits.nodes)
        needs = Needs(max_nodes=nodes, max_depth=depth, scored=True, ahead=ahead, target_cache=target_cache)
        super().__init__(needs, runner)

    def limits(self, view: View) -> TreeLimits:
        return self._limits

    def tree(self, builder: RunnerTreeBuilder, allowed: Int[Tensor, "B"], limits: TreeLimits) -> Draft:
        return build_dynamic_tree(builder, allowed, limits)
