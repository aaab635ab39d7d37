"""Medusa (Cai et al., arXiv:2401.10774): heads on the target's last state, each for one token further ahead.

The tree has a fixed shape, filled with the likeliest tokens of each head: picked tokens, hence lossless at every
temperature. Medusa's own typical acceptance is another matter: ``verifier="typical"`` runs it, marked as lossy.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law, Verdict
from foredraft.core.drafter import Drafter, Needs, Plan, StepOut, View
from foredraft.core.errors import OptionError
from foredraft.core.tree import PAD, ROOT, TokenTree
from foredraft.drafters.last_state import LastState
from foredraft.drafters.templates import Template, template_for
from foredraft.nets.medusa import Medusa
from foredraft.nets.parts import FINAL


@dataclass(frozen=True, slots=True)
class Options:
    """The shape of the tree.

    tree: its name (medusa: the published one of 63 nodes; eagle: of 25), children by level, such as 4x2x1, or
        measured: the best one for how often the heads were right when they were trained, as written beside them.
    nodes: how many nodes a measured tree has.
    num_assistant_tokens_schedule: constant; heuristic, transformers' up and down of the depth; cost, what the measured
        costs make best; auto is cost.
    """

    tree: str = "measured"
    nodes: int = 24
    num_assistant_tokens_schedule: str = "auto"

    @property
    def law(self) -> Law:
        return Law.FIXED

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise OptionError("nodes must be 1 or more.")
        if self.tree != "measured":
            Template.of(self.tree)


@final
class MedusaDrafter(Drafter):
    """Fills the tree in one go: head i says what stands on level i + 1, whatever stands above it."""

    def __init__(self, options: Options, net: Medusa) -> None:
        self._net = net
        self._template = template_for(options.tree, options.nodes, net.config.accuracies, net.count)
        self._state = LastState()
        self.needs = Needs(
            hidden_layers=(FINAL,), max_nodes=self._template.nodes, max_depth=self._template.depth, scored=True
        )
        self._parents = torch.tensor((ROOT, *self._template.parents))
        self._depths = torch.tensor([0, *(len(path) for path in self._template.paths)])

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:
        self._state.admit(row, hidden)

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        self._state.commit(view, verdict, out)

    def release(self, row: int) -> None:
        self._state.release(row)

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        hidden, known = self._state.of(view)
        device = hidden.device
        tokens = [view.roots[:, None]]
        scores = [torch.zeros_like(view.roots, dtype=torch.float32)[:, None]]  # log-probability of each path
        depth = min(plan.length, self._template.depth)
        for level in range(1, depth + 1):
            ranks = self._template.ranks(self._template.level(level))
            logits = self._net.logits(self._net.states(hidden, level - 1), level - 1)[:, 0]
            best = logits.float().nan_to_num().log_softmax(-1).topk(min(max(ranks) + 1, logits.shape[-1]), dim=-1)
            column = torch.tensor(ranks, device=device).clamp(max=best.indices.shape[1] - 1)
            tokens.append(best.indices[:, column])
            above = torch.tensor(self._template.above(level), device=device)
            scores.append(scores[-1][:, above] + best.values[:, column])
        filled = torch.cat(tokens, 1)
        size = filled.shape[1]
        allowed = torch.tensor(plan.lengths, device=device) * known
        exist = self._depths[:size].to(device) <= allowed[:, None]
        if plan.node_worth:
            exist = exist & (
                (torch.cat(scores, 1) >= math.log(plan.node_worth)) | (self._depths[:size].to(device) == 0)
            )
        parents = torch.where(exist, self._parents[:size].to(device), PAD)
        linear = self._template.nodes == self._template.depth
        return Draft(TokenTree(filled, parents, depth=depth, linear=linear), Law.FIXED)
