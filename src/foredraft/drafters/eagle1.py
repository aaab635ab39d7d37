"""EAGLE-1 (Li et al., arXiv:2401.15077): a head that predicts the target's next features, and a static tree."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, View
from foredraft.core.options import SizedOptions, option
from foredraft.drafters.common.eagle import EagleDrafter, EagleOptions
from foredraft.drafters.context import BuildContext
from foredraft.drafters.trees.builder import TreeBuilder
from foredraft.drafters.trees.shapes import Template, TreeLimits, TreeShape
from foredraft.drafters.trees.static import build_static_tree
from foredraft.heads.nets.eagle import EagleNet
from foredraft.model.linear.packed import any_weight
from foredraft.model.ops import TORCH, Ops


@dataclass(frozen=True, slots=True)
class Options(EagleOptions, SizedOptions):
    """The shape of the tree."""

    tree: str = option(
        "eagle", "eagle (the published tree of 25 nodes), medusa (63 nodes), or children by level, such as 4x2x1."
    )
    law = Law.WITHOUT_REPLACEMENT

    def __post_init__(self) -> None:
        Template.of(self.tree)


@final
class Eagle1(EagleDrafter):
    """Builds a static tree level by level."""

    def __init__(self, options: Options, net: EagleNet, ops: Ops = TORCH) -> None:
        self._shape = TreeShape.of(Template.of(options.tree), any_weight(net).device)
        limits = self._shape.limits
        needs = Needs(max_nodes=limits.nodes, max_depth=limits.depth, scored=True, ahead=True)
        super().__init__(net, needs, ops)

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        limits = self._shape.limits.within(plan, view, cheap=True)
        return self._draft(view, plan, 1 + limits.expanded, limits)

    def _tree(self, builder: TreeBuilder, allowed: Int[Tensor, "B"], limits: TreeLimits) -> Draft:
        return build_static_tree(builder, self._shape.levels, allowed, limits)


def build(options: Options, context: BuildContext) -> Eagle1:
    """eagle1:HEAD"""
    return Eagle1(options, context.head(options.rope_theta, options.taps, options.norm_output), context.ops)
