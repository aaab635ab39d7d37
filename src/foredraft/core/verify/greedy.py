"""Greedy verification: follow the target's best tokens down the tree."""

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.draft import Verdict
from foredraft.core.tree import TokenTree, ancestors
from foredraft.core.verify.parts import path_from


def greedy(best: Int[Tensor, "B N"], tree: TokenTree) -> Verdict:
    """Accept the longest path whose tokens are all the target's best; the bonus is the best token after it.

    Of siblings with the same token, the one with the longer accepted path is taken (the first, on ties).
    """
    rows = torch.arange(best.shape[0], device=best.device)
    on_path = ancestors(tree.parents)  # [B, N, N]
    expected = best.gather(1, tree.parents.clamp(min=0))
    match = (tree.parents >= 0) & (tree.tokens == expected)
    match[:, 0] = True
    reached = (match[:, None, :] | ~on_path).all(-1)
    node = torch.where(reached, on_path.sum(-1), 0).argmax(1)
    return Verdict(path_from(on_path[rows, node], tree.depth), best[rows, node])
