"""A small model drafts: speculative sampling (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318).

It drafts a chain (see ``trees/chain.py``), or a tree with a few children per node (RSD-C, arXiv:2402.14160), level by
level.
"""

from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import ByRow, Needs, Plan, Rewindable, Trainable, View
from foredraft.core.errors import OptionError
from foredraft.core.options import check_bounds, option
from foredraft.core.transfer import to_device
from foredraft.core.tree import TokenTree
from foredraft.drafters.common.model_trees import RunnerTreeBuilder
from foredraft.drafters.context import BuildContext
from foredraft.drafters.states.draft_runner import DraftRunner, Forwards
from foredraft.drafters.states.read_rows import ReadRows
from foredraft.drafters.trees.chain import ChainLimits, ChainOptions, build_chain
from foredraft.drafters.trees.shapes import Template, TreeLimits, TreeShape
from foredraft.drafters.trees.static import build_static_tree
from foredraft.engine.beam.speculative import BeamDrafter
from foredraft.model.base import TargetModel


@dataclass(frozen=True, slots=True)
class Options(ChainOptions):
    """Shape of the draft and context of the draft model, in addition to ``ChainOptions``."""

    branching: tuple[int, ...] | None = option(
        None, "children per node by level, such as 4x2x1; if not given, a chain with siblings.", unset="a chain"
    )
    window: int | None = option(
        None,
        "the draft model reads at most this many tokens: the first and the latest, drafted ones included. It can then "
        "draft beyond its own context, at constant cost. If not given, it reads everything, up to its context.",
        unset="no window",
    )
    sinks: int = option(4, "number of first tokens in the window.")
    ahead: int = option(
        0, "inside another drafter, the number of tokens that it drafts; the window keeps room for them."
    )

    @property
    def law(self) -> Law:
        """The law of drafts for sampled rows."""
        return Law.CHAIN if self.branching is None else Law.WITHOUT_REPLACEMENT

    def __post_init__(self) -> None:
        ChainOptions.__post_init__(self)  # super() does not work in a dataclass with slots
        if self.branching is not None and (not self.branching or min(self.branching) < 1):
            raise OptionError("branching must be whole numbers of 1 or more, one per level, such as 4x2x1.")
        check_bounds(self, least={"ahead": 0})


@final
class DraftModel(Rewindable, BeamDrafter, Trainable):
    """Drafts with a small model; see ``DraftRunner``.

    Args:
        model: the draft model.
        vocab_size: of the target. The draft's may differ by padding.
    """

    def __init__(self, options: Options, model: TargetModel, vocab_size: int) -> None:
        self._shape: TreeShape | None = None
        nodes = depth = options.num_assistant_tokens
        if options.branching is not None:
            self._shape = TreeShape.of(Template.regular(options.branching), model.device)
            nodes, depth = self._shape.limits.nodes, self._shape.limits.depth
        if options.window is None:
            self._runner = DraftRunner(model, vocab_size)
        else:
            window = (options.window, options.sinks, nodes, options.ahead)
            self._runner = WindowedRunner(model, vocab_size, *window)
        needs = Needs(max_nodes=nodes, max_depth=depth, scored=self._shape is not None, ahead=True)
        super().__init__(needs, self._runner)
        self._chain = self._runner.drafting("chain", drafted_chain)
        self._tree = self._runner.drafting("tree", self._build)

    def beam_model(self) -> TargetModel:
        return self._runner.model

    @property
    def network(self) -> TargetModel:
        return self._runner.model

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        plan = self._runner.within_context(view, plan)
        depth = min(plan.length, self.needs.longest)
        if depth == 0:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        max_nodes, device = self.needs.max_nodes, view.lengths.device
        if self._shape is not None:
            limits = self._shape.limits.within(plan, view)
            return self._runner.draft(self._tree, view, limits.expanded, plan.on(device), limits)
        return self._runner.draft(self._chain, view, max_nodes, ChainLimits.of(plan, depth, device))

    def _build(self, view: View, forwards: Forwards, allowed: Int[Tensor, "B"], limits: TreeLimits) -> Draft:
        assert self._shape is not None
        return build_static_tree(RunnerTreeBuilder(forwards, view), self._shape.levels, allowed, limits)


def drafted_chain(view: View, forwards: Forwards, limits: ChainLimits) -> Draft:
    """A chain of a draft model."""
    return build_chain(view, limits, forwards.root(), forwards.next, forwards.ops)


@final
class WindowedRunner(DraftRunner):
    """A ``DraftRunner`` that reads at most ``window`` tokens of a row: the first ``sinks`` and the latest ones
    (StreamingLLM, Xiao et al., arXiv:2309.17453), for rows longer than the draft's context or than is worth reading.

    StreamingLLM moves keys to new positions, which needs keys from before their rotation, and they keep information
    about dropped tokens. Here the draft reads a shorter sequence instead: dropped tokens are not in it, positions run
    from 0 to the window's end, and the window is read again when it moves. It moves by a quarter of its size, so each
    token is read about four times. The draft's law is exactly that of the shorter sequence, for any kind of positions.

    The number of dropped tokens depends on the row's length alone. Inside another drafter, rows grow by drafted tokens
    and are rewound; a window that moved with them would be read again each time. With ``ahead``, the window keeps room
    for this many more tokens than the row has at the first read after a rewind, and moves only beyond them.

    Args:
        model, vocab_size: see ``DraftRunner``.
        window: tokens, including those being drafted.
        sinks: how many of them are the first tokens.
        max_nodes: the most nodes that are drafted.
        ahead: tokens by which a row may grow before it is rewound; at most a quarter of the window is kept free.

    Raises:
        OptionError: the window has no room for committed tokens, or is longer than the draft's context.
    """

    def __init__(
        self,
        model: TargetModel,
        vocab_size: int,
        window: int,
        sinks: int,
        max_nodes: int,
        ahead: int = 0,
    ) -> None:
        super().__init__(model, vocab_size)
        self._stride = (window - sinks - max_nodes) // 4
        if sinks < 0 or self._stride < 1:
            raise OptionError(
                f"A window of {window} tokens is too short for {sinks} sinks and {max_nodes} drafted nodes."
            )
        if window > model.max_length:
            raise OptionError(f"A window of {window} tokens is longer than the draft's {model.max_length}.")
        self._limit = window - max_nodes
        self._sinks = sinks
        self._ahead = min(ahead, self._stride)
        self._read = ReadRows(self.cache)  # of a long prompt the window reads little, so nothing ahead
        self._begins = ByRow[int]()  # length of each row at the first read after a rewind
        self._dropped = ByRow[int]()  # dropped tokens of each row at its last read
        self.states = (self._read, self._begins, self._dropped)
        self.needs = Needs()  # the window depends on lengths on the host

    def fork(self, row: int, source: int, length: int) -> None:
        """Nothing is taken over, for the same reason."""

    def rewind(self, row: int, length: int) -> None:
        self._begins.pop(row, None)
        dropped = self._dropped.get(row, 0)
        super().rewind(row, length - dropped if length > self._sinks + dropped else min(length, self._sinks))

    def within_context(self, view: View, plan: Plan) -> Plan:
        """The plan, unchanged: the window always has room."""
        return plan

    def dropped(self, length: int) -> int:
        """How many tokens after the sinks are dropped from a row of this length."""
        return -(-max(length - self._limit, 0) // self._stride) * self._stride

    def _as_read(self, view: View) -> View:
        for row, length in zip(view.rows, view.host_lengths, strict=True):
            dropped = self.dropped(self._begins.setdefault(row, length) + self._ahead) if self._ahead else 0
            if length - dropped > self._limit:
                dropped = self.dropped(length)
            if dropped != self._dropped.get(row, 0):
                self._dropped[row] = dropped
                super().rewind(row, self._sinks)
        return self._short(view)

    def _short(self, view: View) -> View:
        """The rows without their dropped tokens."""
        counts = [self._dropped.get(row, 0) for row in view.rows]
        if not any(counts):
            return view
        dropped = to_device(counts, view.lengths.device)
        host_lengths = tuple(length - count for length, count in zip(view.host_lengths, counts, strict=True))
        place = torch.arange(max(host_lengths), device=dropped.device).expand(len(counts), -1)
        place = torch.where(place < self._sinks, place, place + dropped[:, None])
        history = view.history.gather(1, place.clamp(max=view.history.shape[1] - 1))
        return replace(view, history=history, lengths=view.lengths - dropped, host_lengths=host_lengths)


def build(options: Options, context: BuildContext) -> DraftModel:
    """draft_model:PATH"""
    return DraftModel(options, context.model(context.path), context.vocab_size)
