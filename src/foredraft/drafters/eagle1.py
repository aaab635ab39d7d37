"""EAGLE-1 (Li et al., arXiv:2401.15077): a head that predicts the target's next features, and a static tree."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, View
from foredraft.drafters.common.build_context import BuildContext
from foredraft.drafters.common.drawn_tree import build_static_tree
from foredraft.drafters.common.eagle import EagleDrafter, EagleOptions
from foredraft.drafters.common.templates import Template
from foredraft.drafters.common.tree_builder import Level, TreeBuilder
from foredraft.heads.nets.eagle import EagleNet
from foredraft.model.cpu_linear import any_weight
from foredraft.model.replay import EAGER, Replay


@dataclass(frozen=True, slots=True)
class Options(EagleOptions):
    """The shape of the tree.

    tree: eagle (the published tree of 25 nodes), medusa (63 nodes), or children by level, such as 4x2x1.
    """

    tree: str = "eagle"

    @property
    def law(self) -> Law:
        return Law.WITHOUT_REPLACEMENT

    def __post_init__(self) -> None:
        Template.of(self.tree)


@final
class Eagle1(EagleDrafter):
    """Builds a static tree level by level."""

    def __init__(self, options: Options, net: EagleNet, replay: Replay = EAGER) -> None:
        template = Template.of(options.tree)
        self._levels = Level.all_of(template, any_weight(net).device)
        super().__init__(net, Needs(net.taps, template.nodes, template.depth, ahead=True), replay)

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        depth = len(self._levels) if self._state.records else plan.length  # recordings should be few
        return self._draft(view, plan, 1 + self.needs.max_nodes, self._tree, depth)

    def _tree(self, builder: TreeBuilder, allowed: Int[Tensor, "B"], depth: int) -> Draft:
        return build_static_tree(builder, self._levels[:depth], allowed)


def build(options: Options, context: BuildContext) -> Eagle1:
    """eagle1:HEAD"""
    return Eagle1(options, context.head(options.rope_theta, options.taps), context.replay)
