"""GLIDE (Du et al., arXiv:2402.02082): a draft layer that attends to the target's keys and values."""

from typing import final

from foredraft.drafters.common.build_context import BuildContext
from foredraft.drafters.common.draft_runner import DraftRunner, DynamicModelDrafter
from foredraft.drafters.common.dynamic_tree import TreeOptions as Options
from foredraft.heads.glide_model import GlideLM
from foredraft.model.recording.replay import EAGER, Replay

__all__ = ["Glide", "Options"]


@final
class Glide(DynamicModelDrafter):
    """Drafts dynamic trees with a GLIDE head; for ``vocab_size`` and ``replay`` see ``DraftRunner``."""

    def __init__(self, options: Options, model: GlideLM, vocab_size: int, replay: Replay = EAGER) -> None:
        super().__init__(options.limits, DraftRunner(model, vocab_size, replay), target_cache=True)


def build(options: Options, context: BuildContext) -> Glide:
    """glide:HEAD"""
    return Glide(options, context.glide(), context.vocab_size, context.replay)
