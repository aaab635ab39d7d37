"""EAGLE-3 (Li et al., arXiv:2503.01840): a head on three fused layers of the target, and EAGLE-2's tree."""

from typing import final

from foredraft.drafters.common.build_context import BuildContext
from foredraft.drafters.common.dynamic_tree import DynamicTree, Options

__all__ = ["Eagle3Drafter", "Options"]


@final
class Eagle3Drafter(DynamicTree):
    """EAGLE-2's tree on an EAGLE-3 head, whose features are fused and whose vocabulary may be smaller."""


def build(options: Options, context: BuildContext) -> Eagle3Drafter:
    """eagle3:HEAD"""
    return Eagle3Drafter(options, context.head(options.law, options.rope_theta, options.taps))
