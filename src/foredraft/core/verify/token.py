"""Token verification: standard speculative sampling (Leviathan et al. 2211.17192, Chen et al. 2302.01318)."""

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.rng import VerifierRng
from foredraft.core.verify.parts import at, drawn_from, first_child, of_tokens, path_from, ratio, residual


def token(p: Float[Tensor, "B N V"], draft: Draft, rng: VerifierRng) -> Verdict:
    """Accept x_i with min(1, p(x_i) / q(x_i)); at the first rejection emit y ~ norm((p - q)+) (algorithm 1).

    For chains only. Block verification accepts at least as much at the same cost; this rule is the baseline.
    """
    tree, q = draft.tree, drawn_from(draft)
    chance = ratio(*of_tokens(p, q, tree))
    current = torch.zeros_like(tree.parents[:, 0])
    on = [current == 0]
    for i in range(1, p.shape[1]):
        mine = tree.parents[:, i] == current
        accepted = rng.accept(torch.where(mine, chance[:, i], 0.0).clamp(max=1.0), i)
        current = torch.where(accepted, i, current)
        on.append(accepted)
    rejected, child = first_child(tree, current)
    bonus = rng.residual(residual(at(p, current), at(q, child), rejected))
    return Verdict(path_from(torch.stack(on, 1), tree.depth), bonus)
