"""Block verification (Sun et al., ICLR 2025, 2403.10444): the optimal lossless rule for one drafted path."""

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.rng import VerifierRng
from foredraft.core.tree import TokenTree
from foredraft.core.verify.parts import at, first_child, of_tokens, path_from, ratio, residual, valid_q


def block(p: Float[Tensor, "B N V"], draft: Draft, rng: VerifierRng) -> Verdict:
    """Test every prefix of the chain and accept the longest that passes; then y ~ norm((P p - q)+) (algorithm 2).

    P_i = min(1, P_{i-1} p(x_i) / q(x_i)) is the prefix's clipped joint ratio. With S_i = sum (P_i p - q)+ at its end,
    prefix i passes with probability S_i / (S_i + 1 - P_i), the whole chain with P_k. For chains only.
    """
    tree, q = draft.tree, valid_q(draft)
    nodes = p.shape[1]
    joint = _joint(ratio(*of_tokens(p, q, tree)), tree)
    parents = tree.parents[:, 1:].clamp(min=0)
    parent_joint = joint.gather(1, parents)
    row = torch.arange(p.shape[0], device=p.device)[:, None]
    above = p[:, :-1] if tree.linear else p[row, parents]
    surplus = (parent_joint[..., None] * above - q[:, 1:]).clamp_(min=0.0).sum(-1)  # S of the parent
    total = surplus + (1.0 - parent_joint)
    passes = torch.where(total > 0, surplus / total, 1.0)
    # a parent's pass probability is computed at its child; the last node's is P; column N takes padding
    column = torch.where(tree.valid, tree.parents, nodes)[:, 1:]
    chance = torch.cat([joint, joint[:, :1]], 1).scatter(1, column, passes)[:, :nodes]
    passed = rng.accept(chance * tree.valid)
    passed[:, 0] = True
    index = torch.arange(nodes, device=p.device)
    end = torch.where(passed, index, 0).amax(1)
    stopped, child = first_child(tree, end)
    law = residual(torch.where(stopped, at(joint, end), 1.0)[:, None] * at(p, end), at(q, child), stopped)
    on = tree.valid & (index <= end[:, None])
    return Verdict(path_from(on, tree), rng.residual(law))


def _joint(step: Float[Tensor, "B N"], tree: TokenTree) -> Float[Tensor, "B N"]:
    """P at every node. The nodes of a chain are in order, so with L = log of the product of all ratios up to the node,
    log P = L - max L over the node and all before it, the root's 0 included. Undefined at padding."""
    total = torch.where(tree.parents >= 0, step, 1.0).double().log().cumsum(1)
    return (total - total.cummax(1).values).exp().to(step.dtype)
