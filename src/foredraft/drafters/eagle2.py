"""EAGLE-2 (Li et al., arXiv:2406.16858): EAGLE-1's weights, and a tree that is grown by context."""

from typing import final

from foredraft.drafters.dynamic import DynamicTree, Options
from foredraft.drafters.supplies import Supplies

__all__ = ["Eagle2", "Options"]


@final
class Eagle2(DynamicTree):
    """EAGLE-1's head, with a tree that is wide where it is unsure and deep where it is sure."""


def build(options: Options, supplies: Supplies) -> Eagle2:
    """eagle2:HEAD"""
    return Eagle2(options, supplies.head(options))
