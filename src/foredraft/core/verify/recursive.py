"""Recursive rejection: test siblings in draw order, each against the residual left by the earlier siblings."""

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.rng import VerifierRng
from foredraft.core.verify.parts import drawn_from, of_token, path_from, ratio, residual


def recursive(p: Float[Tensor, "B N V"], draft: Draft, rng: VerifierRng) -> Verdict:
    """Accept child x with min(1, P(x) / q(x)), else P <- norm((P - q)+) and test the next sibling; finally y ~ P.

    For independent siblings this is SpecInfer's multi-step speculative sampling (2305.09781, algorithm 2), for siblings
    without replacement recursive rejection sampling (2402.14160, 2402.12374), on a chain token verification. Parents
    precede children, so one pass over the nodes suffices: a node is tested if its parent is the last accepted node. The
    state is one law [B, V].
    """
    tree, q = draft.tree, drawn_from(draft)
    current = torch.zeros_like(tree.parents[:, 0])
    law = p[:, 0]
    on = torch.zeros_like(tree.parents, dtype=torch.bool)
    on[:, 0] = True
    for turn in range(1, p.shape[1]):
        mine = tree.parents[:, turn] == current
        q_node, x = q[:, turn], tree.tokens[:, turn]
        chance = ratio(of_token(law, x), of_token(q_node, x)).clamp(max=1.0)
        accepted = rng.accept(torch.where(mine, chance, 0.0), turn)
        law = torch.where(accepted[:, None], p[:, turn], residual(law, q_node, mine & ~accepted))
        current = torch.where(accepted, turn, current)
        on = on.scatter(1, current[:, None], True)
    return Verdict(path_from(on, tree.depth), rng.residual(law))
