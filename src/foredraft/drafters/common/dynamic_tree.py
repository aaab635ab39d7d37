"""Dynamic trees (EAGLE-2, arXiv:2406.16858): expand the most confident nodes, then re-rank all.

A node's score is the log-probability of its whole path under the draft. Nothing is drawn: the tree is a function of
the committed tokens, so every choice among its nodes is lossless.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft
from foredraft.core.drafter import Needs, Plan, View
from foredraft.core.errors import OptionError
from foredraft.drafters.common.drawn_tree import DrawnTrees, DrawsTrees
from foredraft.drafters.common.eagle import EagleDrafter, EagleOptions
from foredraft.drafters.common.tree_builder import TreeBuilder, build_static_tree
from foredraft.drafters.common.tree_ops import Candidates, keep_best, worth_a_level
from foredraft.heads.nets.eagle import EagleNet
from foredraft.model.cpu_linear import any_weight
from foredraft.model.replay import EAGER, Replay


def frontier(scores: Float[Tensor, "B C"], count: int) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"]]:
    """The best scores of a level and their places, ties by position: unlike topk, a stable sort is deterministic."""
    ordered, places = scores.sort(dim=-1, descending=True, stable=True)
    return ordered[:, :count], places[:, :count]


class TreeLimits(NamedTuple):
    """Limits of a dynamic tree; ``top_k`` nodes of a level are expanded, with ``top_k`` scored children each.

    ``level_worth``: see ``Plan``.
    """

    nodes: int
    depth: int
    top_k: int
    level_worth: float = 0.0

    def within(self, plan: Plan) -> "TreeLimits":
        """These and the plan's."""
        nodes = plan.at_most(self.nodes)
        return TreeLimits(nodes, min(plan.length, self.depth, nodes), self.top_k, plan.level_worth)


@dataclass(frozen=True, slots=True)
class Options(DrawsTrees, EagleOptions):
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
    sampled_tree: str = "auto"

    def __post_init__(self) -> None:
        DrawsTrees.__post_init__(self)
        if min(self.nodes, self.depth, self.top_k) < 1:
            raise OptionError("nodes, depth and top_k must be 1 or more.")


class DynamicTreeDrafter(EagleDrafter):
    """A tree of the head's most confident tokens: picked, so lossless at every temperature. For sampled rows also a
    static tree of drawn tokens."""

    def __init__(self, options: Options, net: EagleNet, replay: Replay = EAGER) -> None:
        self._limits = TreeLimits(options.nodes, options.depth, options.top_k)
        self._drawn = drawn = DrawnTrees(options.sampled_tree, options.nodes, options.depth, any_weight(net).device)
        needs = Needs(net.taps, options.nodes, options.depth, scored=True, law=drawn.law, drawn=drawn.gains, ahead=True)
        super().__init__(net, needs, replay)

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        drawn = self._drawn.size(view, plan)
        limits = self._limits.within(plan)
        if self._state.records:  # always the whole depth, so that recordings are few
            limits = limits._replace(depth=min(self._limits.depth, limits.nodes), level_worth=0.0)
        room = 1 + (self._limits.nodes if drawn else limits.depth * limits.top_k)
        return self._draft(view, plan, room, self._tree, limits, drawn)

    def _tree(self, builder: TreeBuilder, allowed: Int[Tensor, "B"], limits: TreeLimits, drawn: int) -> Draft:
        """The tree within these limits; of ``drawn`` nodes if they are drawn."""
        if drawn:
            return build_static_tree(builder, self._drawn.levels[drawn][: limits.depth], allowed)
        return build_dynamic_tree(builder, allowed, limits)


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
        ids, scores = builder.ranked(limits.top_k)
        width = ids.shape[2]
        tokens, scores = ids.flatten(1), (above[..., None] + scores).flatten(1)
        parts.append((tokens, numbers.repeat_interleave(width, 1), scores))
        levels.append(torch.full((tokens.shape[1],), level, device=roots.device))
        if level == depth:
            break
        # The tree keeps a node's parents and the better nodes of its level with it, so its children need this room.
        above, chosen = frontier(scores, min(limits.top_k, limits.nodes - level))
        if not worth_a_level(above, allowed > level, limits.level_worth):
            break
        numbers = chosen + (1 + count)
        count += tokens.shape[1]
        builder.add_level(tokens.gather(1, chosen), chosen // width)
    tokens, parents, scores = (torch.cat(each, 1) for each in zip(*parts, strict=True))
    candidates = Candidates(tokens, parents, scores, torch.cat(levels), len(levels))
    return keep_best(candidates, roots, limits.nodes, allowed)
