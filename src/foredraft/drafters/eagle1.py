"""EAGLE-1 (Li et al., arXiv:2401.15077): a head that goes on from the target's features, and a static tree."""

from dataclasses import dataclass, field
from typing import final

import torch

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, View
from foredraft.core.tree import TokenTree
from foredraft.drafters.growing import Level, fill
from foredraft.drafters.head import HeadDrafter
from foredraft.drafters.memory import HeadGrowing, Memory, eagle_memory
from foredraft.drafters.supplies import Supplies
from foredraft.drafters.teachable import Teachable
from foredraft.drafters.templates import Template
from foredraft.drafters.trainees import EagleTrainee
from foredraft.model.linear import any_weight
from foredraft.nets.eagle import EagleNet


@dataclass(frozen=True, slots=True)
class Options:
    """The shape of the tree.

    tree: eagle (the published tree of 25 nodes), medusa (63 nodes), or children by level, such as 4x2x1.
    num_assistant_tokens_schedule: auto, the depth with the most tokens a second; constant; or heuristic, transformers'
        up and down.
    rope_theta: base of the head's rotary positions, if its config is wrong.
    taps: hidden layers of the target that the head reads, such as 2x16x29, if its files are wrong or do not say.
    """

    tree: str = "eagle"
    num_assistant_tokens_schedule: str = "auto"
    rope_theta: float | None = field(default=None, metadata={"unset": "from its config"})
    taps: tuple[int, ...] | None = field(default=None, metadata={"unset": "from its files"})

    @property
    def law(self) -> Law:
        """The law of drafts for sampled rows."""
        return Law.WITHOUT_REPLACEMENT

    def __post_init__(self) -> None:
        Template.of(self.tree)


@final
class Eagle1(HeadDrafter[Memory], Teachable):
    """Fills a fixed tree level by level: with the likeliest tokens where rows are greedy, else with siblings drawn
    without replacement from the head's law, warped as the target's is."""

    def __init__(self, options: Options, net: EagleNet) -> None:
        self._net = net
        self._template = template = Template.of(options.tree)
        self._levels = Level.all_of(template, any_weight(net).device)
        super().__init__(eagle_memory(net), Needs(net.taps, template.nodes, template.depth))

    def trainee(self) -> EagleTrainee:
        return EagleTrainee(self._net)

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        levels = self._levels[: plan.length]
        if not levels:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        room = 1 + self._template.nodes
        extended = self._memory.extend(view, room)
        allowed = torch.tensor(plan.lengths, device=view.lengths.device) * extended.known
        return fill(HeadGrowing(self._net, self._memory, view, extended.states, room), levels, allowed)


def build(options: Options, supplies: Supplies) -> Eagle1:
    """eagle1:HEAD"""
    return Eagle1(options, supplies.head(options))
