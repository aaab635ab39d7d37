"""Target sampling: draw from the target, descend while the drawn token is a child. Lossless for every tree."""

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.rng import VerifierRng
from foredraft.core.verify.parts import at, path_from


def target_sampling(p: Float[Tensor, "B N V"], draft: Draft, rng: VerifierRng) -> Verdict:
    """Draw y ~ p(. | node); go to the first child with token y, or emit y if there is none.

    The only rule that needs no q, and the optimal one for picked children: each node is reached with the target's
    probability of its path, and no lossless rule reaches a node more often. The output does not depend on the draft,
    since each y is keyed by its position.
    """
    tree = draft.tree
    current = torch.zeros_like(tree.parents[:, 0])
    done = current < 0
    on = torch.zeros_like(tree.parents, dtype=torch.bool)
    on[:, 0] = True
    y = current
    for depth in range(tree.depth + 1):
        drawn = torch.zeros_like(p[:, 0]).scatter(1, y[:, None], 1.0)  # finished rows redraw their token
        y = rng.target(torch.where(done[:, None], drawn, at(p, current)), depth)
        match = (tree.parents == current[:, None]) & (tree.tokens == y[:, None])  # none in finished rows
        done = ~match.any(1)
        current = torch.where(done, current, match.int().argmax(1))
        on = on.scatter(1, current[:, None], True)
    return Verdict(path_from(on, tree.depth), y)
