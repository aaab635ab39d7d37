"""Static trees of heads with siblings drawn without replacement, for sampled rows.

Of a picked tree, the node is accepted that the target draws by itself. A drawn tree comes with its q, so traversal
verification can accept more tokens of the same head. The shapes are Sequoia's (Chen et al., arXiv:2402.12374): the
most expected tokens for the acceptance of each rank among siblings.
"""

from math import prod
from typing import final

import torch

from foredraft.core.draft import Law
from foredraft.core.drafter import Plan, View
from foredraft.core.sampling.params import check_known
from foredraft.drafters.common.templates import Rates, Template, best_template
from foredraft.drafters.common.tree_builder import Level

SIZES = (3, 7, 15, 23, 31, 47, 63)
"""Node counts of drawn trees, up to that of the largest picked tree. All but the largest have at most the levels of a
binary tree: further levels, each a pass of the head, would add less than 5 % to the expected tokens."""
ACCEPTANCE = (0.56, 0.095, 0.048, 0.03, 0.018, 0.012, 0.01, 0.008)
"""Acceptance of the first, second, ... sibling if the parent is accepted: that of the bundled EAGLE-3 head at
temperature 1 on HumanEval, GSM8K and MT-bench, about the same on its first six levels."""
MODES = ("auto", "picked", "drawn")


class DrawsTrees:
    """Base of the options of drafters whose trees for sampled rows are picked or drawn.

    sampled_tree: for sampled rows, picked (the likeliest tokens; a seed gives the output of plain decoding), drawn
        (without replacement from the head's law, a static shape; more tokens are accepted), or auto: the one with more
        tokens per second, picked for requests with a seed and under the schedules constant and heuristic.
    """

    __slots__ = ()
    sampled_tree: str

    @property
    def law(self) -> Law:
        """The law of drafts for sampled rows; a plan may ask for drawn trees all the same, see ``Plan.drawn``."""
        return Law.WITHOUT_REPLACEMENT if self.sampled_tree == "drawn" else Law.FIXED

    def __post_init__(self) -> None:
        check_known("sampled_tree", {self.sampled_tree: None}, MODES)


@final
class DrawnTrees:
    """The drawn trees of a drafter, one per size.

    Args:
        mode: the option ``sampled_tree``.
        nodes, depth: most nodes and levels.
        device: of the rows.
        accuracies: measured accuracies by level and rank, which stand in for the acceptance of drawn siblings.

    ``gains``: expected accepted tokens by node count, in rising order; none if all trees are picked. ``levels``: of the
    trees, by node count.
    """

    def __init__(
        self, mode: str, nodes: int, depth: int, device: torch.device, accuracies: Rates | None = None
    ) -> None:
        rates = accuracies[:depth] if accuracies else (ACCEPTANCE,) * depth
        self._always = mode == "drawn"
        sizes = () if mode == "picked" else tuple(size for size in SIZES if size < nodes)
        templates = [best_template(rates[: size.bit_length()], size) for size in sizes]
        if mode != "picked":
            templates.append(best_template(rates, nodes))
        self.levels = {each.nodes: Level.all_of(each, device) for each in templates}
        self.gains = {each.nodes: _gain(each, rates) for each in templates}

    @property
    def law(self) -> Law | None:
        """``Needs.law`` of the drafter."""
        return Law.WITHOUT_REPLACEMENT if self._always else None

    def size(self, view: View, plan: Plan) -> int:
        """The nodes of the planned tree; 0 if the tree of this step is picked."""
        if view.warp.greedy or not (self._always or plan.drawn):
            return 0
        return max((size for size in self.gains if size <= plan.at_most(max(self.gains))), default=min(self.gains))


def _gain(template: Template, rates: Rates) -> float:
    """Expected accepted tokens of a tree."""
    ordered = [sorted(ranks, reverse=True) for ranks in rates]
    return sum(prod(ordered[level][rank] for level, rank in enumerate(path)) for path in template.paths)
