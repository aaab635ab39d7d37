"""Trees of a fixed shape that is filled level by level, one head for each: what Medusa and Hydra have in common.

A node's children are the likeliest tokens of its level's head: picked tokens, hence lossless at every temperature.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, View
from foredraft.core.errors import OptionError
from foredraft.core.tree import TokenTree
from foredraft.drafters.grow import Candidates, keep_best
from foredraft.drafters.head import HeadDrafter, Remembers, ranked
from foredraft.drafters.templates import NAMED, Rates, Template, best_template
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

    def template(self, accuracies: Rates | None, heads: int) -> Template:
        """The tree that is asked for, no deeper than there are heads.

        Without measured accuracies the published tree stands in for the measured one; its nodes are listed best first.
        """
        if self.tree != "measured":
            paths = Template.of(self.tree).paths
        elif accuracies:
            paths = best_template(accuracies[:heads], self.nodes).paths
        else:
            paths = NAMED["medusa"][: self.nodes]
        return Template(tuple(path for path in paths if len(path) <= heads))


class FilledTree(HeadDrafter):
    """Subclasses say what their heads say."""

    def __init__(self, template: Template, memory: Remembers) -> None:
        super().__init__(memory, Needs((FINAL,), template.nodes, template.depth, scored=True))
        self._template = template

    @abstractmethod
    def _logits(
        self, hidden: Float[Tensor, "B 1 H"], paths: Int[Tensor, "B F K"], head: int
    ) -> Float[Tensor, "B F v"] | Float[Tensor, "B 1 v"]:
        """Scores of one head after each of F paths of K = head + 1 tokens that begin with the root."""

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        template, depth = self._template, min(plan.length, self._template.depth)
        if not depth:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        hidden, known = self._memory.extend(view, 1)
        device = hidden.device
        paths = view.roots[:, None, None]  # the tokens from the root to each inner node of a level
        above = torch.zeros_like(paths[:, :, 0], dtype=torch.float32)  # log-probability of each of these paths
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        levels: list[int] = []
        for level in range(1, depth + 1):
            ranks = template.ranks(template.level(level))
            ids, scores = ranked(self._logits(hidden, paths, level - 1), max(ranks) + 1, view.warp)
            column = torch.tensor(ranks, device=device).clamp(max=ids.shape[2] - 1)
            places = torch.tensor(template.places(level), device=device)
            own = places.clamp(max=ids.shape[1] - 1)
            tokens, scores = ids[:, own, column], above[:, places] + scores[:, own, column]
            parts.append((tokens, torch.tensor(template.above(level), device=device).expand(tokens.shape), scores))
            levels += [level] * tokens.shape[1]
            inner = torch.tensor(template.inner_places(level), device=device, dtype=torch.long)
            paths = torch.cat([paths[:, places[inner]], tokens[:, inner, None]], dim=2)
            above = scores[:, inner]
        tokens, parents, scores = (torch.cat(each, 1) for each in zip(*parts, strict=True))
        allowed = torch.tensor(plan.lengths, device=device) * known
        candidates = Candidates(tokens, parents, scores, tuple(levels))
        nodes = plan.at_most(template.nodes)
        return keep_best(candidates, view.roots, nodes, allowed, linear=template.nodes == template.depth)
