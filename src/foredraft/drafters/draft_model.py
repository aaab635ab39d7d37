"""A small model drafts: speculative sampling (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318).

It drafts a chain (see ``common/chain.py``), or a tree with a few children per node (RSD-C, arXiv:2402.14160), level by
level.
"""

from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, Trainable, View
from foredraft.core.errors import OptionError
from foredraft.core.tree import TokenTree
from foredraft.drafters.common.build_context import BuildContext
from foredraft.drafters.common.chain import ChainLimits, ChainOptions, build_chain
from foredraft.drafters.common.draft_runner import DraftRunner, Forwards, RunnerDrafter, RunnerTreeBuilder
from foredraft.drafters.common.drawn_tree import TreeShape, build_static_tree
from foredraft.drafters.common.dynamic_tree import TreeLimits
from foredraft.drafters.common.templates import Template
from foredraft.drafters.common.windowed_runner import WindowedRunner
from foredraft.engine.beam.speculative import BeamDrafter
from foredraft.model.base import TargetModel
from foredraft.model.recording.replay import EAGER, Replay


@dataclass(frozen=True, slots=True)
class Options(ChainOptions):
    """Shape of the draft and context of the draft model, in addition to ``ChainOptions``.

    branching: children per node by level, such as 4x2x1; if not given, a chain with siblings.
    window: the draft model reads at most this many tokens: the first and the latest, drafted ones included. It can then
        draft beyond its own context, at constant cost. If not given, it reads everything, up to its context.
    sinks: number of first tokens in the window.
    ahead: inside another drafter, the number of tokens that it drafts; the window keeps room for them.
    """

    branching: tuple[int, ...] | None = field(default=None, metadata={"unset": "a chain"})
    window: int | None = field(default=None, metadata={"unset": "no window"})
    sinks: int = 4
    ahead: int = 0

    @property
    def law(self) -> Law:
        """The law of drafts for sampled rows."""
        return Law.CHAIN if self.branching is None else Law.WITHOUT_REPLACEMENT

    def __post_init__(self) -> None:
        ChainOptions.__post_init__(self)  # super() does not work in a dataclass with slots
        if self.branching is not None and (not self.branching or min(self.branching) < 1):
            raise OptionError("branching must be whole numbers of 1 or more, one per level, such as 4x2x1.")
        if self.ahead < 0:
            raise OptionError("ahead must be 0 or more.")


@final
class DraftModel(RunnerDrafter[DraftRunner], BeamDrafter, Trainable):
    """Drafts with a small model; see ``DraftRunner``.

    Args:
        model: the draft model.
        vocab_size: of the target. The draft's may differ by padding.
        replay: how its drafts run; see ``DraftRunner``.
    """

    def __init__(self, options: Options, model: TargetModel, vocab_size: int, replay: Replay = EAGER) -> None:
        self._shape: TreeShape | None = None
        nodes = depth = options.num_assistant_tokens
        if options.branching is not None:
            self._shape = TreeShape.of(Template.regular(options.branching), model.device)
            nodes, depth = self._shape.limits.nodes, self._shape.limits.depth
        if options.window is None:
            runner = DraftRunner(model, vocab_size, replay)
        else:
            window = (options.window, options.sinks, nodes, options.ahead)
            runner = WindowedRunner(model, vocab_size, *window, replay=replay)
        scored, ahead = self._shape is not None, options.window is None
        super().__init__(Needs(max_nodes=nodes, max_depth=depth, scored=scored, ahead=ahead), runner)

    def beam_model(self) -> TargetModel:
        return self._runner.model

    @property
    def network(self) -> TargetModel:
        return self._runner.model

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        plan = self._runner.planned(view, plan)
        depth = min(plan.length, self.needs.longest)
        if depth == 0:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        room, device = self.needs.max_nodes, view.lengths.device
        if self._shape is not None:
            limits = self._shape.limits.within(plan)
            return self._runner.draft("tree", view, limits.expanded, self._tree, plan.on(device), limits)
        return self._runner.draft("chain", view, room, drafted_chain, ChainLimits.of(plan, depth, device))

    def _tree(self, view: View, forwards: Forwards, allowed: Int[Tensor, "B"], limits: TreeLimits) -> Draft:
        assert self._shape is not None
        return build_static_tree(RunnerTreeBuilder(forwards, view), self._shape.levels, allowed, limits)


def drafted_chain(view: View, forwards: Forwards, limits: ChainLimits) -> Draft:
    """A chain of a draft model."""
    logits, engine = forwards.root(), forwards.engine
    return build_chain(view, limits, logits, forwards.next, recorded=forwards.recorded, engine=engine)


def build(options: Options, context: BuildContext) -> DraftModel:
    """draft_model:PATH"""
    return DraftModel(options, context.model(context.path), context.vocab_size, context.replay)
