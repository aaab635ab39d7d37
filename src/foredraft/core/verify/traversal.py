"""Traversal verification (Weng et al., NeurIPS 2025, 2505.12398): block verification for trees."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.rng import VerifierRng
from foredraft.core.tree import TokenTree, ancestors
from foredraft.core.verify.parts import at, drawn_from, of_token, path_from, ratio


def traversal(p: Float[Tensor, "B N V"], draft: Draft, rng: VerifierRng) -> Verdict:
    """Test nodes depth first, each after all its children; the first that passes ends the path; y ~ its law.

    A node's state (pass probability and law) changes only when a child is rejected. The new state depends on the
    child's q, but not on random numbers or on the child's subtree. So one pass over the nodes computes the state in
    which each node would be tested. Then all random numbers are drawn at once, and the first node in post-order that
    passes ends the path. The root always passes.

    On a chain this equals block verification, on a single level recursive rejection. Otherwise it accepts more than
    recursive rejection, except on unbalanced trees whose later siblings have the longer branches, because it stops at
    an earlier sibling more often.
    """
    tree = draft.tree
    keep, law = _last_states(p, drawn_from(draft), tree)
    passed = [tree.parents[:, 0] < 0, *(rng.accept(keep[:, i], i) for i in range(1, p.shape[1]))]
    on_path = ancestors(tree.parents)
    turn = torch.where(torch.stack(passed, 1), _post_order(tree, on_path), p.shape[1])
    end = turn.argmin(1)
    return Verdict(path_from(at(on_path, end), tree.depth), rng.residual(at(law, end)))


def _last_states(
    p: Float[Tensor, "B N V"], q: Float[Tensor, "B N V"], tree: TokenTree
) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B N V"]]:
    """Pass probability and law of every node after the rejection of all its children; probability 0 at padding.

    Child c of m gets a(c) = min(1, a(m) P(c) / q(c)). Its rejection sets P <- norm((a(m) P - q)+) and a(m) <- s / t at
    m, where s = sum (a(m) P - q)+ and t = sum (q - a(m) P)+ = s + 1 - a(m). The latter form keeps a(m) = 1 exact.
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
        shrunk = real & (s > 0)  # else keep the law: the rejection had probability ~0, or a(m) is 0
        law[row, parent] = torch.where(shrunk[:, None], rest / torch.where(shrunk, s, 1.0)[:, None], before)
        keep[row, parent] = torch.where(real & (t > 0), s / torch.where(t > 0, t, 1.0), chance)
        keep[:, i] = torch.where(real, share, 0.0)
    return keep, law


def _post_order(tree: TokenTree, on_path: Bool[Tensor, "B N N"]) -> Int[Tensor, "B N"]:
    """Each node's index in post-order, siblings in draw order.

    The nodes before v are those entered before v except its ancestors, and v's descendants.
    """
    index = torch.arange(tree.parents.shape[1], device=tree.parents.device)
    size = on_path.sum(1)  # [B, N]: nodes of each subtree
    earlier = (tree.parents[:, :, None] == tree.parents[:, None, :]) & (index < index[:, None])  # earlier siblings
    skipped = 1 + torch.where(earlier, size[:, None, :], 0).sum(-1)  # from the parent's entry to the node's
    skipped[:, 0] = 0
    entered = torch.where(on_path, skipped[:, None, :], 0).sum(-1)
    return entered + size - on_path.sum(-1)
