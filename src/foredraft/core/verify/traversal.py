"""Traversal verification (Weng et al., NeurIPS 2025, 2505.12398): block verification for trees."""

from jaxtyping import Float
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.rng import VerifierRng
from foredraft.core.verify.parts import descend, drawn_from, path_from
from foredraft.core.verify.rejection import reject_children


def traversal(p: Float[Tensor, "B N V"], draft: Draft, rng: VerifierRng) -> Verdict:
    """Test nodes depth first, each after all its children; the first that passes ends the path; y ~ its law.

    Node m starts with a pass probability a and the target's law P. Its child c gets min(1, a P(c) / q(c)), and the
    rejection of c leaves P <- norm((a P - q)+) and a <- s / (s + 1 - a) with s = sum (a P - q)+. ``reject_children``
    keeps a P as one measure. Its mass after the last child is the probability that m passes; the root always does.

    The states do not depend on random numbers. So these are drawn at once, and the path goes to the first child with a
    node that passes below it, which is the first such node in post-order.

    On a chain this equals block verification, on a single level recursive rejection. Otherwise it accepts more than
    recursive rejection, except on unbalanced trees whose later siblings have the longer branches, because it stops at
    an earlier sibling more often.
    """
    tree = draft.tree
    left = reject_children(p, drawn_from(draft), tree, nested=True)
    passed = rng.accept((left.mass() * (left.chance > 0)).clamp(max=1.0))
    path = path_from(descend(tree, (tree.on_path & passed[:, :, None]).any(1)), tree)
    return Verdict(path, rng.residual(left.law(path.amax(1), p)))
