"""Blockwise parallel decoding (Stern et al., arXiv:1811.03115): each head predicts one token of a chain."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, View
from foredraft.core.options import SizedOptions
from foredraft.core.tree import TokenTree
from foredraft.drafters.common.build_context import BuildContext
from foredraft.drafters.common.head import HeadDrafter
from foredraft.drafters.common.last_hidden import LastHidden
from foredraft.heads.nets.medusa import Blockwise, Medusa
from foredraft.heads.nets.target_parts import FINAL
from foredraft.model.replay import EAGER, Replay


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """No options of its own; the number of heads is the draft length."""


@final
class BlockwiseDrafter(HeadDrafter[LastHidden]):
    """A chain with one token per head. Greedy rows accept as in the paper; sampled rows are lossless too."""

    def __init__(self, options: Options, net: Blockwise | Medusa, replay: Replay = EAGER) -> None:
        heads = net.config.num_heads
        super().__init__(LastHidden(replay), Needs((FINAL,), max_nodes=heads, max_depth=heads, ahead=True))
        self._net = net

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        hidden, known = self._state.extend(view, 0)
        depth = self.needs.longest if self._state.records else min(plan.length, self.needs.longest)
        return self._state.run("tree", self._pick, view, hidden, plan.on(hidden.device) * known, depth)

    def _pick(self, view: View, hidden: Float[Tensor, "B 1 H"], allowed: Int[Tensor, "B"], depth: int) -> Draft:
        """The chain of ``depth`` tokens; can be recorded."""
        tokens = [self._net.logits(hidden, head)[:, 0].argmax(-1) for head in range(depth)]
        return Draft(TokenTree.chain(torch.stack([view.roots, *tokens], 1), allowed + 1), Law.FIXED)


def build(options: Options, context: BuildContext) -> BlockwiseDrafter:
    """blockwise:HEAD"""
    return BlockwiseDrafter(options, context.head(options.law), context.replay)
