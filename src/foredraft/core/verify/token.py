"""Token verification: standard speculative sampling (Leviathan et al. 2211.17192, Chen et al. 2302.01318)."""

from jaxtyping import Float
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.rng import VerifierRng
from foredraft.core.verify.parts import at, descend, first_child, of_tokens, path_from, ratio, residual, valid_q


def token(p: Float[Tensor, "B N V"], draft: Draft, rng: VerifierRng) -> Verdict:
    """Accept x_i with min(1, p(x_i) / q(x_i)); at the first rejection emit y ~ norm((p - q)+) (algorithm 1).

    For chains only. Block verification accepts at least as much at the same cost; this rule is the baseline.
    """
    tree, q = draft.tree, valid_q(draft)
    path = path_from(descend(tree, rng.accept(ratio(*of_tokens(p, q, tree)).clamp(max=1.0))), tree)
    end = path.amax(1)
    rejected, child = first_child(tree, end)
    return Verdict(path, rng.residual(residual(at(p, end), at(q, child), rejected)))
