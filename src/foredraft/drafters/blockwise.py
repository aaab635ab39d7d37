"""Blockwise parallel decoding (Stern et al., arXiv:1811.03115): each head predicts one token of a chain."""

from dataclasses import dataclass
from typing import final

import torch

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, View
from foredraft.core.options import SizedOptions
from foredraft.core.tree import TokenTree
from foredraft.drafters.common.build_context import BuildContext
from foredraft.drafters.common.head import HeadDrafter
from foredraft.drafters.common.last_hidden import LastHidden
from foredraft.heads.nets.medusa import Blockwise, Medusa
from foredraft.heads.nets.target_parts import FINAL


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """No options of its own; the number of heads is the draft length."""


@final
class BlockwiseDrafter(HeadDrafter[LastHidden]):
    """A chain with one token per head. Greedy rows accept as in the paper; sampled rows are lossless too."""

    def __init__(self, options: Options, net: Blockwise | Medusa) -> None:
        super().__init__(LastHidden(), Needs(hidden_layers=(FINAL,), max_nodes=net.count, max_depth=net.count))
        self._net = net

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        hidden, known = self._state.extend(view, 0)
        heads = range(min(plan.length, self._net.count))
        tokens = [self._net.logits(self._net.states(hidden, head), head)[:, 0].argmax(-1) for head in heads]
        allowed = plan.on(hidden.device) * known
        return Draft(TokenTree.chain(torch.stack([view.roots, *tokens], 1), allowed + 1), Law.FIXED)


def build(options: Options, context: BuildContext) -> BlockwiseDrafter:
    """blockwise:HEAD"""
    return BlockwiseDrafter(options, context.head(options.law))
