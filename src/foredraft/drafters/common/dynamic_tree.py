"""Dynamic trees (EAGLE-2, arXiv:2406.16858): expand the most confident nodes, then re-rank all.

A node's score is the sum of its path's log shares (see ``tree_ops.ranked``): how likely the target is to take it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, View
from foredraft.core.errors import OptionError
from foredraft.drafters.common.drawn_tree import build_static_tree
from foredraft.drafters.common.eagle import EagleDrafter, EagleOptions
from foredraft.drafters.common.templates import best_template
from foredraft.drafters.common.tree_builder import Level, TreeBuilder
from foredraft.drafters.common.tree_ops import Candidates, keep_best, worth_a_level
from foredraft.heads.nets.eagle import EagleNet
from foredraft.model.cpu_linear import any_weight
from foredraft.model.replay import EAGER, Replay

ACCEPTANCE = (0.56, 0.095, 0.048, 0.03, 0.018, 0.012, 0.01, 0.008)
"""Acceptance of the first, second, ... drawn sibling if the parent is accepted: that of the bundled EAGLE-3 head at
temperature 1 on HumanEval, GSM8K and MT-bench. It gives the shape of drawn trees, as in Sequoia (arXiv:2402.12374)."""


def frontier(scores: Float[Tensor, "B C"], count: int) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"]]:
    """The best scores of a level and their places, ties by position: unlike topk, a stable sort is deterministic."""
    ordered, places = scores.sort(dim=-1, descending=True, stable=True)
    return ordered[:, :count], places[:, :count]


class TreeLimits(NamedTuple):
    """Limits of a dynamic tree; ``top_k`` nodes of a level are expanded, with ``children`` scored children each (0:
    ``top_k``).

    ``level_worth``: see ``Plan``. ``reads``: values may be read where that is free; False for recordings.
    """

    nodes: int
    depth: int
    top_k: int
    level_worth: float = 0.0
    reads: bool = True
    children: int = 0

    def within(self, plan: Plan) -> "TreeLimits":
        """These and the plan's."""
        nodes = plan.at_most(self.nodes)
        depth = min(plan.length, self.depth, nodes)
        return self._replace(nodes=nodes, depth=depth, level_worth=plan.level_worth)

    def recorded(self) -> "TreeLimits":
        """The same without what depends on values."""
        return self._replace(level_worth=0.0, reads=False)


@dataclass(frozen=True, slots=True)
class Options(EagleOptions):
    """The shape of the tree.

    nodes: most nodes of the tree (total_token minus one in the published code).
    depth: levels of the tree (depth plus one in the published code).
    top_k: nodes expanded per level, and children scored for each.
    num_assistant_tokens_schedule: auto, the number of nodes with the most tokens per second; constant, always the whole
        tree; or heuristic, transformers' rule of two more and one less, for the depth.
    """

    nodes: int = 23
    depth: int = 6
    top_k: int = 4

    @property
    def law(self) -> Law:
        return Law.WITHOUT_REPLACEMENT

    def __post_init__(self) -> None:
        if min(self.nodes, self.depth, self.top_k) < 1:
            raise OptionError("nodes, depth and top_k must be 1 or more.")


class DynamicTreeDrafter(EagleDrafter):
    """A tree of the head's best guesses. If drafts are drawn, sampled rows get a static tree."""

    def __init__(self, options: Options, net: EagleNet, replay: Replay = EAGER) -> None:
        self._limits = TreeLimits(options.nodes, options.depth, options.top_k)
        template = best_template((ACCEPTANCE,) * options.depth, options.nodes)
        self._drawn = Level.all_of(template, any_weight(net).device)
        needs = Needs(net.taps, options.nodes, options.depth, scored=True, ahead=True)
        super().__init__(net, needs, replay)

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        limits = self._limits.within(plan)
        if self._state.records:  # always the whole depth, so that recordings are few
            limits = limits._replace(depth=min(self._limits.depth, limits.nodes)).recorded()
        room = 1 + max(self._limits.nodes * view.draws, limits.depth * limits.top_k)
        return self._draft(view, plan, room, self._tree, limits)

    def _tree(self, builder: TreeBuilder, allowed: Int[Tensor, "B"], limits: TreeLimits) -> Draft:
        if builder.view.draws and not builder.view.warp.greedy:
            return build_static_tree(builder, self._drawn[: limits.depth], allowed)
        return build_dynamic_tree(builder, allowed, limits)


def _full(parts: Sequence[tuple[Tensor, Tensor, Tensor]], above: Float[Tensor, "B K"], nodes: int) -> bool:
    """Whether no row has room for a child of these nodes: it would score less than as many nodes as the tree may have.

    Always False on other devices than a CPU, to avoid a synchronisation.
    """
    scores = torch.cat([each for _, _, each in parts], 1)
    if above.device.type != "cpu" or scores.shape[1] < nodes:
        return False
    return bool((above[:, 0] < scores.topk(nodes, dim=1).values[:, -1]).all())


def build_dynamic_tree(builder: TreeBuilder, allowed: Int[Tensor, "B"], limits: TreeLimits) -> Draft:
    """Build a tree for every row level by level, then keep the best nodes of all levels (EAGLE-2's re-rank).

    Args:
        allowed: the number of levels that each row may have.
    """
    roots, depth = builder.view.roots, min(limits.depth, limits.nodes)
    above = torch.zeros(len(builder.view.rows), 1, device=roots.device)  # scores of the frontier nodes
    numbers = torch.zeros_like(roots)[:, None]  # numbers of these nodes among the candidates
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    levels: list[Tensor] = []
    count = 0  # candidates so far
    for level in range(1, depth + 1):
        ids, shares = builder.ranked(limits.children or limits.top_k)
        width = ids.shape[2]
        tokens, scores = ids.flatten(1), (above[..., None] + shares).flatten(1)
        parts.append((tokens, numbers.repeat_interleave(width, 1), scores))
        levels.append(torch.full((tokens.shape[1],), level, device=roots.device))
        if level == depth:
            break
        # The tree keeps a node's parents and the better nodes of its level with it, so its children need this room.
        above, chosen = frontier(scores, min(limits.top_k, limits.nodes - level))
        if not worth_a_level(above, allowed > level, limits.level_worth):
            break
        if limits.reads and _full(parts, above, limits.nodes):
            break
        numbers = chosen + (1 + count)
        count += tokens.shape[1]
        builder.add_level(tokens.gather(1, chosen), chosen // width)
    tokens, parents, scores = (torch.cat(each, 1) for each in zip(*parts, strict=True))
    candidates = Candidates(tokens, parents, scores, torch.cat(levels), len(levels))
    return keep_best(candidates, roots, limits.nodes, allowed)
