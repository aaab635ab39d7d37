"""Greedy verification: follow the target's best tokens down the tree. No randomness, no loop."""

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.draft import Verdict
from foredraft.core.tree import TokenTree, ancestors
from foredraft.core.verify.parts import path_from


def walk(best: Int[Tensor, "B N"], tree: TokenTree) -> Verdict:
    """The longest path whose every token is the target's best after its parent; then the best token after it.

    Among siblings with one and the same token, whichever leads deeper is taken (the first, if they tie).
    """
    rows = torch.arange(best.shape[0], device=best.device)
    on_path = ancestors(tree.parents)  # [B, N, N]
    wanted = best.gather(1, tree.parents.clamp(min=0))
    right = (tree.parents >= 0) & (tree.tokens == wanted)
    right[:, 0] = True
    reached = (right[:, None, :] | ~on_path).all(-1)
    node = torch.where(reached, on_path.sum(-1), 0).argmax(1)
    return Verdict(path_from(on_path[rows, node], tree.depth), best[rows, node])
