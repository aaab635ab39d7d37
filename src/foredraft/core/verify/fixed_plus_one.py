"""The per-node optimum for siblings of which all but the last were picked (cf. Hu et al., 2502.18779)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.noise import Coins
from foredraft.core.tree import TokenTree, depths
from foredraft.core.verify.parts import drawn_from
from foredraft.core.verify.recursive import descend


def fixed_plus_one(p: Float[Tensor, "B N V"], draft: Draft, coins: Coins) -> Verdict:
    """Test the drawn sibling x first, with min(1, p(x) / q'(x)); the residual may then land on a picked one.

    A node's children are met with p(D) + sum min(p, q') over the tokens outside the picked set D, which is
    what optimal transport allows for this draft law. Testing picked children one after another, with what is
    left of the residual, is drawing from the residual and looking whether it hit one.
    """
    drawn_from(draft)
    return descend(p, draft, coins, _last_sibling_first(draft.tree))


def _last_sibling_first(tree: TokenTree) -> Int[Tensor, "B N"]:
    """An order of the nodes by depth, in which each node's last child stands before its siblings."""
    nodes = tree.parents.shape[1]
    index = torch.arange(nodes, device=tree.parents.device)
    younger = (tree.parents[:, :, None] == tree.parents[:, None, :]) & (index > index[:, None])
    key = torch.where(tree.valid, 2 * depths(tree.parents) + younger.any(-1), 2 * nodes) * nodes + index
    place = (key[:, None, :] < key[:, :, None]).sum(-1)  # sorting by counting: keys are distinct
    return torch.zeros_like(place).scatter(1, place, index.expand(place.shape))
