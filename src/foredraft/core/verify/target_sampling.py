"""Target sampling: draw from the target, descend while the drawn token is a child. Lossless for every tree."""

from jaxtyping import Float
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.rng import VerifierRng
from foredraft.core.verify.greedy import greedy


def target_sampling(p: Float[Tensor, "B N V"], draft: Draft, rng: VerifierRng) -> Verdict:
    """Draw y ~ p(. | node) at every node; follow the drawn tokens down the tree and emit the last one.

    The only rule that needs no q, and the optimal one for picked children: each node is reached with the target's
    probability of its path, and no lossless rule reaches a node more often. The output does not depend on the draft,
    since each y is keyed by its position; nodes with the same path draw the same token.
    """
    return greedy(rng.target(p, draft.tree.depths), draft.tree)
