"""GLIDE (Du et al., arXiv:2402.02082): a draft layer that attends to the target's keys and values."""

from dataclasses import dataclass
from typing import final

from foredraft.core.options import SizedOptions, check_bounds
from foredraft.drafters.common.build_context import BuildContext
from foredraft.drafters.common.draft_runner import DraftRunner, DynamicModelDrafter
from foredraft.drafters.common.dynamic_tree import TreeLimits
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
class Glide(DynamicModelDrafter):
    """Drafts dynamic trees with a GLIDE head; for ``vocab_size`` and ``replay`` see ``DraftRunner``."""

    def __init__(self, options: Options, model: GlideLM, vocab_size: int, replay: Replay = EAGER) -> None:
        limits = TreeLimits(options.nodes, options.depth, options.top_k)
        super().__init__(limits, DraftRunner(model, vocab_size, replay), target_cache=True)


def build(options: Options, context: BuildContext) -> Glide:
    """glide:HEAD"""
    return Glide(options, context.glide(), context.vocab_size, context.replay)
