"""Target sampling: draw from the target, descend while the drawn token is a child. Lossless for every tree."""

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.rng import VerifierRng
from foredraft.core.verify.parts import at, path_from


def target_sampling(p: Float[Tensor, "B N V"], draft: Draft, rng: VerifierRng) -> Verdict:
    """Draw y ~ p(. | root), then y ~ p(. | path) as long as the path is in the tree; emit all that was drawn.

    The only rule that needs no q. The output does not depend on the draft, since each y is keyed by its position alone:
    it is plain decoding's. So the draft may use anything, the noise of the draws included.
    """
    tree = draft.tree
    here = (tree.depths == 0) & tree.valid  # the nodes of the drawn path: several if siblings are equal
    end = torch.zeros_like(tree.tokens[:, 0])
    bonus = end
    for depth in range(tree.depth + 1):
        going, node = here.any(1), here.int().argmax(1)
        token = rng.target(at(p, node), depth, going)
        end, bonus = torch.where(going, node, end), torch.where(going, token, bonus)
        here = here.gather(1, tree.parents.clamp(min=0)) & (tree.parents >= 0) & (tree.tokens == token[:, None])
        if rng.reads and not bool(here.any()):
            break
    return Verdict(path_from(at(tree.on_path, end), tree), bonus)
