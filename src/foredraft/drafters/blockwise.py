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
from foredraft.core.drafter import Needs, Plan, View
from foredraft.core.options import SizedOptions
from foredraft.core.target_parts import FINAL
from foredraft.core.tree import TokenTree
from foredraft.drafters.common.build_context import BuildContext
from foredraft.drafters.common.chain import ChainLimits, build_chain
from foredraft.drafters.common.head import HeadDrafter
from foredraft.drafters.common.last_hidden import LastHidden
from foredraft.heads.nets.medusa import Blockwise, Medusa
from foredraft.model.base import widened
from foredraft.model.native.model import engine_of
from foredraft.model.recording.replay import EAGER, Replay


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """No options of its own; the number of heads is the draft length."""

    law = Law.CHAIN


@final
class BlockwiseDrafter(HeadDrafter[LastHidden]):
    """A chain with one token per head."""

    def __init__(self, options: Options, net: Blockwise | Medusa, replay: Replay = EAGER) -> None:
        heads = net.config.num_heads
        super().__init__(LastHidden(replay), Needs((FINAL,), max_nodes=heads, max_depth=heads, ahead=True))
        self._net = net
        self._engine = engine_of(net.target)

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        if not plan.length:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        hidden, known = self._state.extend(view, 0)
        plan = self._state.planned(plan)
        depth = min(plan.length, self.needs.longest)  # also the number of nodes, so it is the same in a recorded draft
        limits = ChainLimits(plan.on(hidden.device) * known, None, depth, siblings=True)
        return self._state.run("tree", self._pick, view, hidden, limits, plan.recorded)

    def _pick(self, view: View, hidden: Float[Tensor, "B 1 H"], limits: ChainLimits, recorded: bool) -> Draft:
        """The chain; can be recorded."""

        def read(tokens: Int[Tensor, "B"], head: int) -> Float[Tensor, "B 1 V"]:
            return widened(self._net.logits(hidden, head), self._net.target.vocab_size)

        return build_chain(view, limits, read(view.roots, 0), read, recorded=recorded, engine=self._engine)


def build(options: Options, context: BuildContext) -> BlockwiseDrafter:
    """blockwise:HEAD"""
    return BlockwiseDrafter(options, context.head(), context.replay)
