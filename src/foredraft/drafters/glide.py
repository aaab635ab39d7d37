"""GLIDE (Du et al., arXiv:2402.02082): a draft layer that attends to the target's keys and values."""

from typing import final

from foredraft.drafters.common.model_trees import DynamicModelDrafter
from foredraft.drafters.context import BuildContext
from foredraft.drafters.states.draft_runner import DraftRunner
from foredraft.drafters.trees.shapes import TreeOptions as Options
from foredraft.heads.glide_model import GlideLM

__all__ = ["Glide", "Options"]


@final
class Glide(DynamicModelDrafter):
    """Drafts dynamic trees with a GLIDE head; for ``vocab_size`` see ``DraftRunner``."""

    def __init__(self, options: Options, model: GlideLM, vocab_size: int) -> None:
        super().__init__(options.limits, DraftRunner(model, vocab_size))


def build(options: Options, context: BuildContext) -> Glide:
    """glide:HEAD"""
    return Glide(options, context.glide(), context.vocab_size)
