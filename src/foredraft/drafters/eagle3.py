"""EAGLE-3 (Li et al., arXiv:2503.01840): a head on fused features of three layers, with EAGLE-2's dynamic tree."""

from typing import final

from foredraft.drafters.common.eagle import DynamicOptions as Options, DynamicTreeDrafter
from foredraft.drafters.context import BuildContext

__all__ = ["Eagle3Drafter", "Options"]


@final
class Eagle3Drafter(DynamicTreeDrafter):
    """EAGLE-2's dynamic tree with an EAGLE-3 head, which fuses features and may have a smaller vocabulary."""


def build(options: Options, context: BuildContext) -> Eagle3Drafter:
    """eagle3:HEAD"""
    return Eagle3Drafter(options, context.head(options.rope_theta, options.taps, options.norm_output), context.ops)
