"""GLIDE (Du et al., arXiv:2402.02082): a draft layer that attends to the target's keys and values."""

from dataclasses import dataclass
from typing import final

from jaxtyping import Int
from torch import Tensor

from foredraft.core.draft import Draft
from foredraft.core.drafter import Needs, View
from foredraft.core.options import SizedOptions, check_bounds
from foredraft.drafters.common.build_context import BuildContext
from foredraft.drafters.common.draft_runner import DraftRunner, ModelTreeDrafter, RunnerTreeBuilder
from foredraft.drafters.common.dynamic_tree import TreeLimits, build_dynamic_tree
from foredraft.heads.glide_model import GlideLM
from foredraft.model.recording.replay import EAGER, Replay


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """The shape of the tree; top_k=1 drafts chains.

    nodes: most nodes of the tree.
    depth: levels of the tree; each costs a forward of the head.
    top_k: nodes expanded per level, and children scored for each.
    """

    nodes: int = 23
    depth: int = 6
    top_k: int = 4

    def __post_init__(self) -> None:
        check_bounds(self, least={"nodes": 1, "depth": 1, "top_k": 1})


@final
class Glide(ModelTreeDrafter):
    """Drafts dynamic trees with a GLIDE head; for ``vocab_size`` and ``replay`` see ``DraftRunner``."""

    def __init__(self, options: Options, model: GlideLM, vocab_size: int, replay: Replay = EAGER) -> None:
        self._limits = TreeLimits(options.nodes, options.depth, options.top_k)
        depth = min(options.depth, options.nodes)
        needs = Needs(max_nodes=options.nodes, max_depth=depth, scored=True, target_cache=True)
        super().__init__(needs, DraftRunner(model, vocab_size, replay))

    def limits(self, view: View) -> TreeLimits:
        return self._limits

    def tree(self, builder: RunnerTreeBuilder, allowed: Int[Tensor, "B"], limits: TreeLimits) -> Draft:
        return build_dynamic_tree(builder, allowed, limits)


def build(options: Options, context: BuildContext) -> Glide:
    """glide:HEAD"""
    return Glide(options, context.glide(), context.vocab_size, context.replay)
