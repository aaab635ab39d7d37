"""Rules that change the output distribution by design. Never a default; marked ``lossless=False`` in the table."""

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.rng import VerifierRng
from foredraft.core.verify.parts import at, of_tokens, path_from, reached

_EPSILON, _DELTA = 0.09, 0.3


def typical(p: Float[Tensor, "B N V"], draft: Draft, rng: VerifierRng) -> Verdict:
    """Accept the longest path of typical tokens (on ties the likeliest); then y ~ p.

    Medusa's typical acceptance (2401.10774, section 2.3.1), with the paper's delta = sqrt(epsilon). A token is accepted
    if p(x) > min(epsilon, delta exp(-H(p))), so less likely tokens pass where the target's entropy is high. Accepted
    tokens are not drawn from p, so the output distribution changes. A one-hot target is followed exactly.
    """
    tree = draft.tree
    chance, _ = of_tokens(p, p, tree)
    entropy = torch.special.entr(p).sum(-1).gather(1, tree.parents.clamp(min=0))  # the parent's
    accepted = chance > (_DELTA * torch.exp(-entropy)).clamp(max=_EPSILON)
    chance[:, 0], accepted[:, 0] = 1.0, True
    likelihood = torch.where(tree.on_path, chance[:, None, :], 1.0).prod(-1)
    end = torch.where(reached(tree, accepted), tree.depths + 1 + 0.5 * likelihood, 0.0).argmax(1)
    return Verdict(path_from(at(tree.on_path, end), tree), rng.residual(at(p, end)))
