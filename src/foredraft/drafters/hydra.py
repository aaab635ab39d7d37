"""Hydra and Hydra++ (Ankner et al., arXiv:2402.05109): Medusa's heads, each told what was drafted before it.

The tree has a fixed shape. A node's children are the likeliest tokens of the head after that node's own path; picked
tokens, hence lossless at every temperature.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law, Verdict
from foredraft.core.drafter import Drafter, Needs, Plan, StepOut, View
from foredraft.core.errors import OptionError
from foredraft.core.tree import PAD, TokenTree
from foredraft.drafters.last_state import LastState
from foredraft.drafters.memory import Memory
from foredraft.drafters.templates import Template, template_for
from foredraft.nets.hydra import Hydra
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
class HydraDrafter(Drafter):
    """Fills the tree level by level. With a prefix layer (Hydra++), that goes over the target's states first."""

    def __init__(self, options: Options, net: Hydra) -> None:
        self._net = net
        self._template = template_for(options.tree, options.nodes, net.config.accuracies, net.count)
        self._state = LastState()
        self._memory = _prefix_memory(net)
        self.needs = Needs(
            hidden_layers=(FINAL,), max_nodes=self._template.nodes, max_depth=self._template.depth, scored=True
        )

    @torch.inference_mode()
    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:
        self._state.admit(row, hidden)
        if self._memory is not None:
            self._memory.admit(row, hidden)

    @torch.inference_mode()
    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        self._state.commit(view, verdict, out)
        if self._memory is not None:
            self._memory.commit(view, verdict, out)

    def release(self, row: int) -> None:
        self._state.release(row)
        if self._memory is not None:
            self._memory.release(row)

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        hidden, known = self._hidden(view)
        template, device = self._template, hidden.device
        allowed = torch.tensor(plan.lengths, device=device) * known
        tree = TokenTree.root(view.roots)
        paths = view.roots[:, None, None]  # the tokens from the root to each inner node of a level, [B, F, K]
        scores = torch.zeros_like(paths[:, :, 0], dtype=torch.float32)  # log-probability of each of these paths
        worth = math.log(plan.node_worth) if plan.node_worth > 0 else -math.inf
        depth = min(plan.length, template.depth)
        for level in range(1, depth + 1):
            above = template.inner(level - 1)
            nodes = template.level(level)
            parents = [template.parents[node - 1] for node in nodes]
            ranks = template.ranks(nodes)
            logits = self._net.logits(hidden.expand(-1, len(above), -1), paths, level - 1)
            best = logits.float().nan_to_num().log_softmax(-1).topk(min(max(ranks) + 1, logits.shape[-1]), dim=-1)
            places = torch.tensor([above.index(parent) for parent in parents], device=device)
            column = torch.tensor(ranks, device=device).clamp(max=best.indices.shape[2] - 1)
            tokens = best.indices[:, places, column]
            scores = scores[:, places] + best.values[:, places, column]
            exist = (allowed >= level)[:, None] & (scores >= worth)
            mine = torch.where(exist, torch.tensor(parents, device=device), PAD)
            tree = TokenTree(torch.cat([tree.tokens, tokens], 1), torch.cat([tree.parents, mine], 1), depth=level)
            if level < depth:
                inner = torch.tensor([nodes.index(node) for node in template.inner(level)], device=device)
                paths = torch.cat([paths[:, places[inner]], tokens[:, inner, None]], dim=2)
                scores = scores[:, inner]
        return Draft(tree, Law.FIXED)

    def _hidden(self, view: View) -> tuple[Float[Tensor, "B 1 H"], Bool[Tensor, "B"]]:
        """What the heads read: the target's last state, or what the prefix layer makes of all of them."""
        if self._memory is None:
            return self._state.of(view)
        extended = self._memory.extend(view, 1)
        return extended.states, extended.known


def _prefix_memory(net: Hydra) -> Memory | None:
    """The prefix layer reads the target's states alone; the tokens that a memory offers are not looked at."""
    prefix = net.prefix
    if prefix is None:
        return None
    return Memory(
        prefix,
        lambda tokens, features, positions, attend: prefix(features, positions, attend),
        lambda hidden: hidden[FINAL],
        window=prefix.window,
    )
