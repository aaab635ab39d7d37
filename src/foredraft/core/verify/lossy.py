"""Rules that change what the model says, on purpose. They are never a default, and the table marks them."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.rng import VerifierRng
from foredraft.core.tree import ancestors
from foredraft.core.verify.parts import at, of_tokens, path_from


@dataclass(frozen=True, slots=True)
class Typical:
    """Medusa's typical acceptance (2401.10774, section 2.3.1), with the paper's delta = sqrt(epsilon).

    A token is accepted if p(x) > min(epsilon, delta exp(-H(p))): likely, or no less likely than most where
    the target is unsure. No draw from p is involved, hence the law of the text is another one. A target that
    is a one-hot is followed exactly.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __call__(self, p: Float[Tensor, "B N V"], draft: Draft, coins: VerifierRng) -> Verdict:
        """The longest path of typical tokens, the likeliest of several; then y ~ p."""
        tree = draft.tree
        chance, _ = of_tokens(p, p, tree)
        surprise = torch.special.entr(p).sum(-1).gather(1, tree.parents.clamp(min=0))  # the parent's entropy
        right = chance > (self.delta * torch.exp(-surprise)).clamp(max=self.epsilon)
        chance[:, 0], right[:, 0] = 1.0, True
        on_path = ancestors(tree.parents)
        reached = (right[:, None, :] | ~on_path).all(-1)
        likelihood = torch.where(on_path, chance[:, None, :], 1.0).prod(-1)
        end = torch.where(reached, on_path.sum(-1) + 0.5 * likelihood, 0.0).argmax(1)
        return Verdict(path_from(at(on_path, end), tree.depth), coins.residual(at(p, end)))


typical = Typical()
