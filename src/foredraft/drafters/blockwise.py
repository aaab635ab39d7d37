"""Blockwise parallel decoding (Stern et al., arXiv:1811.03115): every head says its own likeliest token; one chain."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law, Verdict
from foredraft.core.drafter import Drafter, Needs, Plan, StepOut, View
from foredraft.core.tree import TokenTree
from foredraft.drafters.last_state import LastState
from foredraft.nets.medusa import Blockwise, Medusa
from foredraft.nets.parts import FINAL


@dataclass(frozen=True, slots=True)
class Options:
    """num_assistant_tokens_schedule: constant; heuristic, transformers' up and down of the length; cost, what the
    measured costs make best; auto is cost.
    """

    num_assistant_tokens_schedule: str = "auto"

    @property
    def law(self) -> Law:
        return Law.FIXED


@final
class BlockwiseDrafter(Drafter):
    """A chain, one token a head. Greedy rows accept as the paper does; sampled ones losslessly too."""

    def __init__(self, options: Options, net: Blockwise | Medusa) -> None:
        self._net = net
        self._state = LastState()
        self.needs = Needs(hidden_layers=(FINAL,), max_nodes=net.count, max_depth=net.count)

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:
        self._state.admit(row, hidden)

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        self._state.commit(view, verdict, out)

    def release(self, row: int) -> None:
        self._state.release(row)

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        hidden, known = self._state.of(view)
        heads = range(min(plan.length, self._net.count))
        said = [self._net.logits(self._net.states(hidden, head), head)[:, 0].argmax(-1) for head in heads]
        allowed = torch.tensor(plan.lengths, device=hidden.device) * known
        return Draft(TokenTree.chain(torch.stack([view.roots, *said], 1), allowed + 1), Law.FIXED)
