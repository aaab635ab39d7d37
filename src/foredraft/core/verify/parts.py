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


def at(x: Shaped[Tensor, "B N *k"], node: Int[Tensor, "B"]) -> Shaped[Tensor, "B *k"]:
    """The values of x at one node per row."""
    return x[torch.arange(x.shape[0], device=x.device), node]


def of_token(law: Float[Tensor, "B V"], token: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Probability of one token per row; 0 for tokens outside the vocabulary (such as padding)."""
    inside = (token >= 0) & (token < law.shape[1])
    found = law.gather(1, torch.where(inside, token, 0)[:, None])[:, 0]
    return torch.where(inside, found, 0.0)


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
    """p / q, finite; 0 if p is 0, so a token that the target forbids is never accepted."""
    return torch.where(p > 0, p / q, 0.0).nan_to_num(0.0).clamp(max=torch.finfo(p.dtype).max)


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


def path_from(on: Bool[Tensor, "B N"], depth: int) -> Int[Tensor, "B D"]:
    """``Verdict.path`` from a mask of its nodes; parents precede children, so index order is depth order."""
    index = torch.arange(on.shape[1], device=on.device).expand(on.shape)
    column = torch.where(on, on.cumsum(1) - 1, depth + 1).clamp(max=depth + 1)  # the last is cut off
    path = torch.full((on.shape[0], depth + 2), -1, dtype=index.dtype, device=on.device)
    return path.scatter(1, column, index)[:, : depth + 1]
