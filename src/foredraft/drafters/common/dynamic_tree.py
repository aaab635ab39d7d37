"""Trees grown by context (EAGLE-2, arXiv:2406.16858): expand the most confident nodes, then keep the best of all.

A node's score is the log-probability of its whole path under the draft. Nothing is drawn: a tree is a function of
what is committed, so every choice among its nodes is lossless.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, Trainable, View
from foredraft.core.errors import OptionError
from foredraft.core.tree import TokenTree
from foredraft.drafters.common.feature_cache import FeatureCache, HeadTreeBuilder, eagle_memory
from foredraft.drafters.common.head import EagleOptions, HeadDrafter
from foredraft.drafters.common.tree_builder import TreeBuilder
from foredraft.drafters.common.tree_ops import Candidates, keep_best
from foredraft.heads.nets.eagle import EagleNet


def frontier(scores: Float[Tensor, "B C"], count: int) -> Int[Tensor, "B K"]:
    """The best of a level, by score and then by place: whatever topk does with ties, a device does the same twice."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[:, :count]


class Shape(NamedTuple):
    """Nodes and levels at most; ``top_k`` nodes of a level are expanded, and so many children of each are scored."""

    nodes: int
    depth: int
    top_k: int


@dataclass(frozen=True, slots=True)
class Options(EagleOptions):
    """The shape of the tree.

    nodes: most nodes of the tree (total_token minus one in the published code).
    depth: levels of the tree (depth plus one in the published code).
    top_k: nodes expanded per level, and children scored for each.
    num_assistant_tokens_schedule: auto, as many nodes as bring the most tokens a second; constant, always the whole
        tree; or heuristic, transformers' up and down of the depth.
    """

    nodes: int = 23
    depth: int = 6
    top_k: int = 4

    def __post_init__(self) -> None:
        if min(self.nodes, self.depth, self.top_k) < 1:
            raise OptionError("nodes, depth and top_k must be 1 or more.")


class DynamicTree(HeadDrafter[FeatureCache], Trainable):
    """A tree of the tokens that the head is surest of. Picked, hence lossless at every temperature."""

    def __init__(self, options: Options, net: EagleNet) -> None:
        self._net = net
        self._options = options
        super().__init__(eagle_memory(net), Needs(net.taps, options.nodes, options.depth, scored=True))

    @property
    def network(self) -> EagleNet:
        return self._net

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        if not plan.length:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        shape = Shape(self._options.nodes, self._options.depth, self._options.top_k)
        room = 1 + min(plan.length, shape.depth, plan.at_most(shape.nodes)) * shape.top_k
        extended = self._memory.extend(view, room)
        allowed = torch.tensor(plan.lengths, device=view.lengths.device) * extended.known
        return grow_tree(HeadTreeBuilder(self._net, self._memory, view, extended.states, room), plan, allowed, shape)


def grow_tree(growing: TreeBuilder, plan: Plan, allowed: Int[Tensor, "B"], shape: Shape) -> Draft:
    """A tree for every row: level by level on the draft, then the best nodes of all levels.

    Args:
        allowed: how many levels each row may have.
    """
    nodes, roots = plan.at_most(shape.nodes), growing.view.roots
    depth = min(plan.length, shape.depth, nodes)
    above = torch.zeros(len(growing.view.rows), 1, device=roots.device)  # scores of the newest nodes that were read
    numbers = torch.zeros_like(roots)[:, None]  # what these nodes are called among the candidates
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    levels: list[Tensor] = []
    count = 0  # candidates so far
    for level in range(1, depth + 1):
        ids, scores = growing.ranked(shape.top_k)
        width = ids.shape[2]
        tokens, scores = ids.flatten(1), (above[..., None] + scores).flatten(1)
        parts.append((tokens, numbers.repeat_interleave(width, 1), scores))
        levels.append(torch.full((tokens.shape[1],), level, device=roots.device))
        if level == depth:
            break
        chosen = frontier(scores, shape.top_k)
        above = scores.gather(1, chosen)
        if not _worth_a_level(above, allowed > level, plan):
            break
        numbers = 1 + count + chosen
        count += tokens.shape[1]
        growing.grow(tokens.gather(1, chosen), growing.begin + chosen // width)
    tokens, parents, scores = (torch.cat(each, 1) for each in zip(*parts, strict=True))
    candidates = Candidates(tokens, parents, scores, torch.cat(levels), len(levels))
    return keep_best(candidates, roots, nodes, allowed)


def _worth_a_level(above: Float[Tensor, "B K"], going: Bool[Tensor, "B"], plan: Plan) -> bool:
    """Whether the frontiers of the rows that may have another level promise what it is worth, all together.

    Elsewhere than on a CPU, not to look: yes.
    """
    if above.device.type != "cpu" or not plan.level_worth:
        return True
    return float((above.exp() * going[:, None]).sum()) >= plan.level_worth
