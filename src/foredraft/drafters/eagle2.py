"""EAGLE-2 (Li et al., arXiv:2406.16858): EAGLE-1's head with a dynamic tree."""

from typing import final

from foredraft.drafters.common.eagle import DynamicOptions as Options, DynamicTreeDrafter
from foredraft.drafters.context import BuildContext

__all__ = ["Eagle2", "Options"]


@final
class Eagle2(DynamicTreeDrafter):
    """EAGLE-1's head with a tree that is deep where the head is confident and wide where it is not."""


def build(options: Options, context: BuildContext) -> Eagle2:
    """eagle2:HEAD"""
    return Eagle2(options, context.head(options.rope_theta, options.taps, options.norm_output), context.ops)
