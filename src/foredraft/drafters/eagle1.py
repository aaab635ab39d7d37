"""EAGLE-1 (Li et al., arXiv:2401.15077): a head that predicts the target's next features, and a static tree."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, Trainable, View
from foredraft.core.tree import TokenTree
from foredraft.drafters.common.build_context import BuildContext
from foredraft.drafters.common.feature_cache import FeatureCache, TreeSlots, eagle_cache
from foredraft.drafters.common.head import EagleOptions, HeadDrafter
from foredraft.drafters.common.head_tree import HeadTree, HeadTreeBuilder
from foredraft.drafters.common.templates import Template
from foredraft.drafters.common.tree_builder import Level, build_static_tree
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
class Eagle1(HeadDrafter[FeatureCache], Trainable):
    """Builds a static tree level by level: the likeliest tokens for greedy rows, else siblings drawn without
    replacement from the head's warped law."""

    def __init__(self, options: Options, net: EagleNet, replay: Replay = EAGER) -> None:
        self._net = net
        template = Template.of(options.tree)
        self._room = 1 + template.nodes
        self._levels = Level.all_of(template, any_weight(net).device)
        super().__init__(eagle_cache(net, replay), Needs(net.taps, template.nodes, template.depth, ahead=True))

    @property
    def network(self) -> EagleNet:
        return self._net

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        if not plan.length:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        depth = len(self._levels) if self._state.records else plan.length  # recordings should be few
        state = self._state.extend(view, self._room)
        allowed = plan.on(view.lengths.device) * state.known
        slots = self._state.slots_of(view, self._room)
        return self._state.run("tree", self._draft, view, state.states, allowed, depth, slots)

    def _draft(
        self, view: View, states: Float[Tensor, "B 1 H"], allowed: Int[Tensor, "B"], depth: int, slots: TreeSlots
    ) -> Draft:
        """The tree after the entries just read; can be recorded."""
        builder = HeadTreeBuilder(self._net, HeadTree(self._state, view, slots), view, states)
        return build_static_tree(builder, self._levels[:depth], allowed)


def build(options: Options, context: BuildContext) -> Eagle1:
    """eagle1:HEAD"""
    return Eagle1(options, context.head(options.law, options.rope_theta, options.taps), context.replay)
