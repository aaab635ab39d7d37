"""Blockwise parallel decoding (Stern et al., arXiv:1811.03115): each head predicts one token of a chain.

The paper's approximate acceptance is a verification rule of its own: ``verifier="approximate,top_k=2"``, marked as
lossy.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Drafter, Needs, Plan, View
from foredraft.core.options import SizedOptions
from foredraft.core.tree import TokenTree
from foredraft.drafters.context import BuildContext
from foredraft.drafters.states.last_hidden import LastHidden
from foredraft.drafters.trees.chain import ChainLimits, build_chain
from foredraft.heads.nets.medusa import Blockwise, Medusa
from foredraft.model.base import widened
from foredraft.model.ops import TORCH, Ops
from foredraft.model.recording.segment import Segment


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """No options of its own; the number of heads is the draft length."""

    law = Law.CHAIN


@final
class BlockwiseDrafter(Drafter):
    """A chain with one token per head."""

    def __init__(self, options: Options, net: Blockwise | Medusa, ops: Ops = TORCH) -> None:
        heads = net.config.num_heads
        self._state = LastHidden()
        super().__init__(Needs(max_nodes=heads, max_depth=heads, ahead=True), self._state)
        self._net = net
        self._ops = ops
        self._chain = Segment("tree", self._pick, self._state.rows)

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        if not plan.length:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        hidden, known = self._state.extend(view, 0)
        depth = min(plan.length, self.needs.longest)  # also the number of nodes
        limits = ChainLimits(plan.on(hidden.device) * known, None, depth, siblings=True)
        return self._chain(view, hidden, limits)

    def _pick(self, view: View, hidden: Float[Tensor, "B 1 H"], limits: ChainLimits) -> Draft:
        def read(tokens: Int[Tensor, "B"], head: int) -> Float[Tensor, "B 1 V"]:
            return widened(self._net.logits(hidden, head), self._net.target.vocab_size)

        return build_chain(view, limits, read(view.roots, 0), read, self._ops)


def build(options: Options, context: BuildContext) -> BlockwiseDrafter:
    """blockwise:HEAD"""
    return BlockwiseDrafter(options, context.head(), context.ops)
