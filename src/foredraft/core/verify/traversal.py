"""Traversal verification (Weng et al., NeurIPS 2025, 2505.12398): block verification for trees."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.rng import VerifierRng
from foredraft.core.tree import TokenTree, ancestors
from foredraft.core.verify.parts import at, drawn_from, of_token, path_from, ratio


def traversal(p: Float[Tensor, "B N V"], draft: Draft, coins: VerifierRng) -> Verdict:
    """Test nodes depth first, each after all its children; the first that passes ends the path; y ~ its law.

    A node's state, a pass chance and a law, changes only when a child is rejected, and what it changes to
    depends on no coin (it depends on the child's q, not on the child's own subtree). So the state in which
    each node will be tested, should its turn come, is known before any coin is tossed: one pass over the
    nodes finds it, all coins are tossed, and of those that passed the first in post-order wins. The root
    always passes.

    On a chain this is block verification, on one level recursive rejection; between, it accepts more than
    recursive rejection, but for lopsided trees whose younger siblings have the longer branches (it is readier
    to stop at an elder).
    """
    tree = draft.tree
    keep, law = _last_states(p, drawn_from(draft), tree)
    passed = [tree.parents[:, 0] < 0, *(coins.accept(keep[:, i], i) for i in range(1, p.shape[1]))]
    on_path = ancestors(tree.parents)
    turn = torch.where(torch.stack(passed, 1), _post_order(tree, on_path), p.shape[1])
    end = turn.argmin(1)
    return Verdict(path_from(at(on_path, end), tree.depth), coins.residual(at(law, end)))


def _last_states(
    p: Float[Tensor, "B N V"], q: Float[Tensor, "B N V"], tree: TokenTree
) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B N V"]]:
    """Pass chance and law of every node after all its children were rejected; chance 0 at padding.

    Child c of m gets a(c) = min(1, a(m) P(c) / q(c)). Its rejection leaves m with P <- norm((a(m) P - q)+)
    and a(m) <- s / t, where s = sum (a(m) P - q)+ and t = sum (q - a(m) P)+ = s + 1 - a(m). The latter form
    makes a(m) = 1 stay exactly 1.
    """
    row = torch.arange(p.shape[0], device=p.device)
    law = p.clone()
    keep = torch.zeros_like(p[..., 0])
    keep[:, 0] = 1.0
    for i in range(1, p.shape[1]):
        real, parent = tree.valid[:, i], tree.parents[:, i].clamp(min=0)
        chance, before = keep[row, parent], law[row, parent]
        x = tree.tokens[:, i]
        share = ratio(chance * of_token(before, x), of_token(q[:, i], x)).clamp(max=1.0)
        rest = (chance[:, None] * before - q[:, i]).clamp_(min=0.0)
        s = rest.sum(-1)
        t = s + (1.0 - chance)
        shrunk = real & (s > 0)  # else the law stays: the rejection had probability ~0, or a(m) is 0 anyway
        law[row, parent] = torch.where(shrunk[:, None], rest / torch.where(shrunk, s, 1.0)[:, None], before)
        keep[row, parent] = torch.where(real & (t > 0), s / torch.where(t > 0, t, 1.0), chance)
        keep[:, i] = torch.where(real, share, 0.0)
    return keep, law


def _post_order(tree: TokenTree, on_path: Bool[Tensor, "B N N"]) -> Int[Tensor, "B N"]:
    """Each node's place when children come before their parent and siblings in draw order.

    Those before v are the nodes entered before it, less its ancestors, and the rest of its own subtree.
    """
    index = torch.arange(tree.parents.shape[1], device=tree.parents.device)
    size = on_path.sum(1)  # [B, N]: nodes of each subtree
    elder = (tree.parents[:, :, None] == tree.parents[:, None, :]) & (index < index[:, None])
    skipped = 1 + torch.where(elder, size[:, None, :], 0).sum(-1)  # from a parent's entry to the node's own
    skipped[:, 0] = 0
    entered = torch.where(on_path, skipped[:, None, :], 0).sum(-1)
    return entered + size - on_path.sum(-1)
