"""Dynamic trees (EAGLE-2, arXiv:2406.16858): expand the most confident nodes, then re-rank all.

A node's score is the sum of its path's log shares (see ``Ops.rank``): how likely the target is to take it.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft
from foredraft.drafters.trees.builder import TreeBuilder
from foredraft.drafters.trees.candidates import Candidates, keep_best, worth_a_level
from foredraft.drafters.trees.shapes import TreeLimits


def frontier(scores: Float[Tensor, "B C"], count: int) -> Int[Tensor, "B K"]:
    """The places of the best scores of a level, ties by position: unlike topk, a stable sort is deterministic."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _full(parts: Sequence[tuple[Tensor, Tensor, Tensor]], above: Float[Tensor, "B K"], nodes: int) -> bool:
    """Whether no row has room for a child of these nodes: it would score less than as many nodes as the tree may have.

    Always False on other devices than a CPU, to avoid a synchronisation.
    """
    scores = torch.cat([each for _, _, each in parts], 1)
    if above.device.type != "cpu" or scores.shape[1] < nodes:
        return False
    return bool((above.amax(1) < scores.topk(nodes, dim=1).values[:, -1]).all())


def _useful(above: Float[Tensor, "B K"], price: float) -> int:
    """How many of these paths, best first, may have a child that is worth a node's price in some row.

    All on other devices than a CPU, to avoid a synchronisation.
    """
    if above.device.type != "cpu" or not price:
        return above.shape[1]
    return max(int((above.exp() > price).sum(1).max()), 1)


def build_dynamic_tree(builder: TreeBuilder, allowed: Int[Tensor, "B"], limits: TreeLimits) -> Draft:
    """Build a tree for every row level by level, then keep the best nodes of all levels (EAGLE-2's re-rank).

    Args:
        allowed: the number of levels that each row may have.
    """
    roots, depth = builder.view.roots, min(limits.depth, limits.nodes)
    children = limits.children(builder.view)
    above = torch.zeros(len(builder.view.rows), 1, device=roots.device)  # scores of the frontier nodes
    numbers = chosen = torch.zeros_like(roots)[:, None]  # of these nodes among the candidates, and within their level
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    levels: list[Tensor] = []
    count = 0  # candidates so far
    for level in range(1, depth + 1):
        ids, shares = builder.ranked(children)
        width = ids.shape[2]
        tokens, scores = ids.flatten(1), (above[..., None] + shares).flatten(1)
        if level < depth or not limits.rerank:
            # The tree keeps a node's parents and the better nodes of its level with it, so its children need this room.
            most = min(limits.top_k, limits.nodes - level + (level == depth))
            chosen = frontier(scores if limits.value else shares.flatten(1), most)
            above = scores.gather(1, chosen)
            if not limits.rerank:
                scores = torch.full_like(scores, -torch.inf).scatter(1, chosen, above)
        parts.append((tokens, numbers.repeat_interleave(width, 1), scores))
        levels.append(torch.full((tokens.shape[1],), level, device=roots.device))
        if level == depth or not worth_a_level(above, allowed > level, limits.level_price):
            break
        if limits.reads and _full(parts, above, limits.nodes):
            break
        if limits.value:
            useful = _useful(above, limits.level_price.node)
            above, chosen = above[:, :useful], chosen[:, :useful]
        numbers = chosen + (1 + count)
        count += tokens.shape[1]
        builder.add_level(tokens.gather(1, chosen), chosen // width)
    tokens, parents, scores = (torch.cat(each, 1) for each in zip(*parts, strict=True))
    candidates = Candidates(tokens, parents, scores, torch.cat(levels), len(levels))
    return keep_best(candidates, roots, limits.nodes, allowed)
