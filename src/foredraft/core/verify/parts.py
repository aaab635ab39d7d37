"""Helpers shared by the rules. All shapes are fixed and nothing is read back from the device."""

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from foredraft.core.draft import Draft
from foredraft.core.errors import LawError
from foredraft.core.tree import TokenTree


def drawn_from(draft: Draft) -> Float[Tensor, "B N V"]:
    """The draft's q; a ``LawError`` if it has none."""
    if draft.q is None:
        raise LawError(f"This rule needs the q that tokens were drawn from; this {draft.law.value!r} draft has none.")
    return draft.q


def valid_q(draft: Draft) -> Float[Tensor, "B N V"]:
    """q with 0 at nodes where it is NaN or 0. Such nodes are rejected and leave the law as it is.

    This is lossless: q was invalid before the token was drawn, so the rejection does not depend on the drawn value.
    """
    q = drawn_from(draft)
    return torch.where(q.sum(-1, keepdim=True) > 0, q, 0.0)


def at(x: Shaped[Tensor, "B N *k"], node: Int[Tensor, "B"]) -> Shaped[Tensor, "B *k"]:
    """The values of x at one node per row."""
    return x[torch.arange(x.shape[0], device=x.device), node]


def of_tokens(
    p: Float[Tensor, "B N V"], q: Float[Tensor, "B N V"], tree: TokenTree
) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B N"]]:
    """p(token | parent) and q(token) of all nodes; at the root and at padding p is 0 and q undefined."""
    row = torch.arange(p.shape[0], device=p.device)[:, None]
    node = torch.arange(p.shape[1], device=p.device)
    inside = (tree.parents >= 0) & (tree.tokens >= 0) & (tree.tokens < p.shape[2])
    token = torch.where(inside, tree.tokens, 0)
    mine = torch.where(inside, p[row, tree.parents.clamp(min=0), token], 0.0)
    return mine, q[row, node, token]


def ratio(p: Float[Tensor, "*k"], q: Float[Tensor, "*k"]) -> Float[Tensor, "*k"]:
    """p / q, finite; 0 if p or q is 0, so a token that the target forbids is never accepted."""
    return torch.where((p > 0) & (q > 0), p / q, 0.0).clamp(max=torch.finfo(p.dtype).max)


def residual(p: Float[Tensor, "*k V"], q: Float[Tensor, "*k V"], where: Bool[Tensor, "*k"]) -> Float[Tensor, "*k V"]:
    """norm((p - q)+) in rows ``where`` a draw from q was rejected, else p.

    If the residual is 0, p is returned: then p = q up to rounding, and the rejection had probability ~0.
    """
    rest = (p - q).clamp_(min=0.0)
    total = rest.sum(-1)
    use = where & (total > 0)
    return torch.where(use[..., None], rest / torch.where(use, total, 1.0)[..., None], p)


def first_child(tree: TokenTree, node: Int[Tensor, "B"]) -> tuple[Bool[Tensor, "B"], Int[Tensor, "B"]]:
    """Whether each row's node has a child, and its first child (0 if none)."""
    children = tree.parents == node[:, None]
    return children.any(1), children.int().argmax(1)


def reached(tree: TokenTree, passed: Bool[Tensor, "B N"]) -> Bool[Tensor, "B N"]:
    """The nodes whose paths have passed as a whole."""
    return (tree.on_path <= passed[:, None]).all(-1)  # bool: a node on the path has passed


def descend(tree: TokenTree, accepted: Bool[Tensor, "B N"]) -> Bool[Tensor, "B N"]:
    """The nodes of the path from the root to the first accepted child of each node."""
    accepted = accepted & (tree.depths > 0)  # neither padding nor below it
    first = accepted > (tree.elders & accepted[:, None]).any(-1)  # bool: accepted, and no elder is
    first[:, 0] = True
    return reached(tree, first)


def path_from(on: Bool[Tensor, "B N"], tree: TokenTree) -> Int[Tensor, "B D"]:
    """``Verdict.path`` from a mask of its nodes."""
    end = tree.depth + 1
    column = torch.where(on, tree.depths, end).clamp(max=end)  # the last column is cut off
    index = torch.arange(on.shape[1], device=on.device).expand(on.shape)
    path = torch.full((on.shape[0], end + 1), -1, dtype=index.dtype, device=on.device)
    return path.scatter_(1, column, index)[:, :end]
