"""Candidates for the nodes of a draft tree, of which the best are kept."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import LevelPrice
from foredraft.core.tree import PAD, ROOT, TokenTree

SHARPEST = 0.8
"""The temperature at which a draft's probabilities best predict acceptance by a greedy target, which accepts likely
tokens more often and unlikely ones less (docs/log/policy.md, "How large a tree should be")."""

GUESSES = 8
"""Least number of children that are scored for a node in sampled rows. They cost no forward, and which of a node's
tokens the target takes depends on the noise more than on their ranks."""


class Candidates(NamedTuple):
    """All scored tokens, level by level: ids, number of the parent (0 is the root), score of the path.

    ``levels`` counts from 1 to ``depth``. Candidates are numbered from 1; 0 is the root.
    """

    tokens: Int[Tensor, "B C"]
    parents: Int[Tensor, "B C"]
    scores: Float[Tensor, "B C"]
    levels: Int[Tensor, "C"]
    depth: int


def at_places(values: Shaped[Tensor, "B G K"], places: Int[Tensor, "B F"]) -> Shaped[Tensor, "B F K"]:
    """``values`` at these places of each row."""
    return values.gather(1, places[..., None].expand(-1, -1, values.shape[2]))


def normalize_or_uniform(law: Float[Tensor, "B N V"]) -> Float[Tensor, "B N V"]:
    """The output of a softmax, or the uniform law where it is NaN (all known tokens banned, or NaN logits)."""
    return law.nan_to_num(nan=1.0 / law.shape[-1])


def worth_a_level(above: Float[Tensor, "B K"], going: Bool[Tensor, "B"], price: LevelPrice) -> bool:
    """True if these paths, of the rows that go on, are worth their price.

    Always True on other devices than a CPU, to avoid a synchronisation.
    """
    if above.device.type != "cpu" or not price.level:
        return True
    return float(((above.exp() - price.node).clamp(min=0) * going[:, None]).sum()) >= price.level


def keep_best(
    candidates: Candidates, root: Int[Tensor, "B"], nodes: int, allowed: Int[Tensor, "B"], linear: bool = False
) -> Draft:
    """The tree of the ``nodes`` best candidates: by score, then the shallower, then the earlier (EAGLE-2's re-ranking,
    Li et al., arXiv:2406.16858, section 4.2).

    A parent never scores less than its child and comes before it, so it is always kept with it and the tree is
    connected. The draft has the scores. ``allowed``: the number of levels that each row may have. ``linear``: the
    candidates are one chain.
    """
    rows, count = candidates.scores.shape
    scores = candidates.scores.masked_fill(candidates.levels > allowed[:, None], -torch.inf)
    best = scores.sort(dim=-1, descending=True, stable=True)
    nodes = min(nodes, count)
    chosen = best.indices[:, :nodes].sort(dim=-1).values
    # the number of each candidate in the tree; the root is candidate 0 and stays 0
    number = torch.zeros(rows, count + 1, dtype=torch.long, device=root.device)
    number.scatter_(1, chosen + 1, torch.arange(1, nodes + 1, device=root.device).expand(rows, -1))
    tokens = candidates.tokens.gather(1, chosen)
    parents = number.gather(1, candidates.parents.gather(1, chosen))
    parents = torch.where(scores.gather(1, chosen) > -torch.inf, parents, PAD)
    first = torch.full_like(root, ROOT)[:, None]
    filled = torch.cat([root[:, None], tokens], 1)
    tree = TokenTree(filled, torch.cat([first, parents], 1), depth=min(candidates.depth, nodes), linear=linear)
    own = candidates.scores.gather(1, chosen)
    return Draft(tree, Law.FIXED, scores=torch.cat([torch.zeros_like(own[:, :1]), own], 1))
