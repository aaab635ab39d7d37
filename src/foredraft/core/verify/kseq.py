"""k-SEQ (SpecTr, NeurIPS 2023, 2310.15141): for independent siblings from one q, with one common factor r."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.rng import VerifierRng
from foredraft.core.tree import TokenTree
from foredraft.core.verify.parts import at, descend, of_tokens, path_from, ratio, valid_q

_HALVINGS = 24  # the bits of a float32; an r above the optimum costs acceptance, not exactness


def kseq(p: Float[Tensor, "B N V"], draft: Draft, rng: VerifierRng) -> Verdict:
    """Accept each of k children with min(1, p(x) / (r q(x))); if all fail, y ~ the residual of p.

    With beta(r) = sum min(q, p / r), any r with 1 - (1 - beta)^k <= r beta is lossless. The smallest such r accepts
    most, and at least 1 - (1 - 1/k)^k of what any rule can (theorem 2). Bisection returns the upper end.
    """
    tree, q = draft.tree, valid_q(draft)
    levels = _levels(p, q, tree)
    mine, drawn = of_tokens(p, q, tree)
    factor = levels.factor.gather(1, tree.parents.clamp(min=0))
    chance = ratio(mine, factor * drawn).clamp(max=1.0)
    path = path_from(descend(tree, rng.accept(chance)), tree)
    current = path.amax(1)
    law, r = at(p, current), at(levels.factor, current)[:, None]
    covered = torch.minimum(at(q, at(levels.child, current)), law / r) * at(levels.share, current)[:, None]
    rest = (law - covered).clamp_(min=0.0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, law)
    return Verdict(path, rng.residual(rest))


class _Levels(NamedTuple):
    """Per node: r, (1 - (1 - beta)^k) / beta (0 for a leaf), and the first child."""

    factor: Float[Tensor, "B N"]
    share: Float[Tensor, "B N"]
    child: Int[Tensor, "B N"]


def _levels(p: Float[Tensor, "B N V"], q: Float[Tensor, "B N V"], tree: TokenTree) -> _Levels:
    row, node = (torch.arange(size, device=p.device)[:, None] for size in p.shape[:2])
    children = tree.parents[:, None, :] == node  # [B, parent, child]
    child = children.int().argmax(-1)
    count = children.sum(-1).to(p.dtype)
    k = count.clamp(min=1.0)
    minus_law, minus_p = -q[row, child], -p  # of minus beta, the signs of the bisection are made once

    def minus_beta(r: Float[Tensor, "B N"]) -> Float[Tensor, "B N"]:
        return torch.maximum(minus_law, minus_p / r[..., None]).sum(-1).clamp(min=-1.0)

    def minus_hits(minus_b: Float[Tensor, "B N"]) -> Float[Tensor, "B N"]:
        return torch.special.xlog1py(k, minus_b).expm1()  # (1 - b)^k - 1

    low, span = torch.ones_like(k), k - 1
    for halving in range(1, 1 + _HALVINGS):
        middle = torch.add(low, span, alpha=2.0**-halving)
        b = minus_beta(middle)
        low = torch.where(minus_hits(b) >= middle * b, low, middle)
    high = torch.add(low, span, alpha=2.0**-_HALVINGS)
    b = minus_beta(high)
    share = torch.where((b < 0) & (count > 0), minus_hits(b) / torch.where(b < 0, b, -1.0), 0.0)
    return _Levels(high, share, child)
