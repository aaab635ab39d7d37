"""Greedy verification: follow the target's best tokens down the tree."""

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.draft import Verdict
from foredraft.core.tree import TokenTree
from foredraft.core.verify.parts import at, path_from, reached


def greedy(best: Int[Tensor, "B N"], tree: TokenTree) -> Verdict:
    """Accept the longest path whose tokens are all the target's best; the bonus is the best token after it.

    Of siblings with the same token, the one with the longer accepted path is taken (the first, on ties).
    """
    expected = best.gather(1, tree.parents.clamp(min=0))
    match = (tree.parents >= 0) & (tree.tokens == expected)
    match[:, 0] = True
    node = torch.where(reached(tree, match), tree.depths + 1, 0).argmax(1)
    return Verdict(path_from(at(tree.on_path, node), tree), at(best, node))
