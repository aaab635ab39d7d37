"""Block verification (Sun et al., ICLR 2025, 2403.10444): the optimal lossless rule for one drafted path."""

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.rng import VerifierRng
from foredraft.core.verify.parts import at, drawn_from, first_child, of_tokens, path_from, ratio, residual


def block(p: Float[Tensor, "B N V"], draft: Draft, rng: VerifierRng) -> Verdict:
    """Test every prefix of the chain and accept the longest that passes; then y ~ norm((P p - q)+) (algorithm 2).

    P_i = min(1, P_{i-1} p(x_i) / q(x_i)) is the prefix's clipped joint ratio. With S_i = sum (P_i p - q)+ at its end,
    prefix i passes with probability S_i / (S_i + 1 - P_i), the whole chain with P_k. For chains only.
    """
    tree, q = draft.tree, drawn_from(draft)
    rows, nodes = tree.parents.shape
    joint, parent_joint = _joint(ratio(*of_tokens(p, q, tree)), draft)
    row = torch.arange(rows, device=p.device)[:, None]
    above = p[:, :-1] if tree.linear else p[row, tree.parents[:, 1:].clamp(min=0)]
    surplus = (parent_joint[:, 1:, None] * above - q[:, 1:]).clamp_(min=0.0).sum(-1)  # S of the parent
    total = surplus + (1.0 - parent_joint[:, 1:])
    passes = torch.where(total > 0, surplus / total, 1.0)
    # a parent's pass probability is computed at its child; the last node's is P; column N takes padding
    column = torch.where(tree.valid, tree.parents, nodes)[:, 1:]
    chance = torch.cat([joint, joint[:, :1]], 1).scatter(1, column, passes)
    passed = [tree.parents[:, 0] < 0, *(rng.accept(chance[:, i], i) for i in range(1, nodes))]
    index = torch.arange(nodes, device=p.device)
    end = torch.where(torch.stack(passed, 1), index, 0).amax(1)
    stopped, child = first_child(tree, end)
    law = residual(torch.where(stopped, at(joint, end), 1.0)[:, None] * at(p, end), at(q, child), stopped)
    on = tree.valid & (index <= end[:, None])
    return Verdict(path_from(on, tree.depth), rng.residual(law))


def _joint(step: Float[Tensor, "B N"], draft: Draft) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B N"]]:
    """P at every node and at every node's parent; 0 at padding."""
    parents = draft.tree.parents.clamp(min=0)
    joint = torch.zeros_like(step)
    joint[:, 0] = 1.0
    for i in range(1, step.shape[1]):
        joint[:, i] = (at(joint, parents[:, i]) * step[:, i]).clamp(max=1.0)
    return joint, joint.gather(1, parents)
