"""Recursive rejection: test siblings in draw order, each against the residual left by the earlier siblings."""

from jaxtyping import Float
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.rng import VerifierRng
from foredraft.core.verify.parts import descend, drawn_from, path_from
from foredraft.core.verify.rejection import reject_children


def recursive(p: Float[Tensor, "B N V"], draft: Draft, rng: VerifierRng) -> Verdict:
    """Accept child x with min(1, P(x) / q(x)), else P <- norm((P - q)+) and test the next sibling; finally y ~ P.

    For independent siblings this is SpecInfer's multi-step speculative sampling (2305.09781, algorithm 2), for siblings
    without replacement recursive rejection sampling (2402.14160, 2402.12374), on a chain token verification. P does
    not depend on random numbers, so all nodes are tested at once, and the path follows the first accepted children.
    """
    tree = draft.tree
    left = reject_children(p, drawn_from(draft), tree, nested=False)
    path = path_from(descend(tree, rng.accept(left.chance)), tree)
    return Verdict(path, rng.residual(left.law(path.amax(1), p)))
