"""OPT-Tree (Wang et al., arXiv:2406.17276): a dynamic tree of a draft model's likeliest paths.

Of all scored nodes, those with the largest path probabilities form the tree, which maximises the expected acceptance
length if the probabilities are right. Nodes are picked, not drawn, so every choice among them is lossless.
"""

from dataclasses import dataclass
from typing import final

from foredraft.core.options import option
from foredraft.drafters.common.model_trees import DynamicModelDrafter
from foredraft.drafters.context import BuildContext
from foredraft.drafters.states.draft_runner import DraftRunner
from foredraft.drafters.trees.shapes import TreeOptions
from foredraft.model.base import TargetModel


@dataclass(frozen=True, slots=True)
class Options(TreeOptions):
    """More candidates than other trees have."""

    top_k: int = option(8, "nodes expanded per level, and children scored for each.")


@final
class OptTree(DynamicModelDrafter):
    """Drafts dynamic trees with a small model; see ``DraftRunner``.

    Args:
        model: the draft model.
        vocab_size: of the target. The draft's may differ by padding.
    """

    def __init__(self, options: Options, model: TargetModel, vocab_size: int) -> None:
        super().__init__(options.limits, DraftRunner(model, vocab_size))


def build(options: Options, context: BuildContext) -> OptTree:
    """opt_tree:PATH"""
    return OptTree(options, context.model(context.path), context.vocab_size)
