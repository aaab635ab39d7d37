"""How trees grow: fixed shapes, children drawn without replacement, and the best of all that was scored."""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.noise import inverse_cdf
from foredraft.core.tree import PAD, ROOT, TokenTree


@dataclass(frozen=True, slots=True)
class Levels:
    """A tree in which every node of level i has ``branching[i]`` children; nodes are numbered level by level."""

    branching: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        """First node of each level, the root's being 0; one entry more for the number of all nodes."""
        sizes = accumulate((1, *self.branching), lambda size, width: size * width)
        return (0, *accumulate(sizes))

    @property
    def nodes(self) -> int:
        """Drafted nodes: all but the root."""
        return self.starts[-1] - 1

    def parents(self, level: int) -> tuple[int, ...]:
        """Parents of the nodes of a level from 1 on: siblings stand side by side, in draw order."""
        width = self.branching[level - 1]
        return tuple(node for node in range(self.starts[level - 1], self.starts[level]) for _ in range(width))


class Candidates(NamedTuple):
    """All tokens that were scored, level by level: ids, number of the parent (0 is the root), score of the path.

    ``levels`` counts from 1, up to ``depth``. The numbers of candidates start at 1, after the root.
    """

    tokens: Int[Tensor, "B C"]
    parents: Int[Tensor, "B C"]
    scores: Float[Tensor, "B C"]
    levels: Int[Tensor, "C"]
    depth: int


@dataclass(frozen=True, slots=True)
class Siblings:
    """K children of each of F nodes: tokens, the law that each was drawn from, and whether it exists."""

    tokens: Int[Tensor, "B F K"]
    laws: Float[Tensor, "B F K V"]
    exist: Bool[Tensor, "B F K"]


def draw_siblings(law: Float[Tensor, "B F V"], u: Float[Tensor, "B F K"]) -> Siblings:
    """Draw K children a node one after another, each without the tokens drawn before it.

    Where the law has fewer tokens than K, the children that are left over do not exist. That is settled by the
    law alone, before they would be drawn, so it gives nothing away.
    """
    tokens, laws, exist = [], [], []
    rest = law
    for k in range(u.shape[-1]):
        total = rest.sum(-1, keepdim=True)
        exist.append(total[..., 0] > 0)
        own = torch.where(total > 0, rest / total.clamp(min=torch.finfo(rest.dtype).tiny), rest)
        token = inverse_cdf(own, u[..., k])
        tokens.append(token)
        laws.append(own)
        rest = rest.scatter(-1, token[..., None], 0.0)
    return Siblings(torch.stack(tokens, -1), torch.stack(laws, -2), torch.stack(exist, -1))


def draw_independent(law: Float[Tensor, "B F V"], u: Float[Tensor, "B F K"]) -> Siblings:
    """Draw K children a node, each from the whole law: some may be the same token."""
    count = u.shape[-1]
    tokens = torch.stack([inverse_cdf(law, u[..., k]) for k in range(count)], -1)
    exist = (law.sum(-1) > 0)[..., None].expand_as(tokens)
    return Siblings(tokens, law[:, :, None].expand(-1, -1, count, -1), exist)


def likeliest(scores: Float[Tensor, "B F V"], count: int) -> tuple[Int[Tensor, "B F K"], Bool[Tensor, "B F K"]]:
    """The so many best tokens of each node, and which of them exist: none is banned, and V may be less than K."""
    best = scores.topk(min(count, scores.shape[-1]), dim=-1)
    missing = (0, count - best.indices.shape[-1])
    exist = torch.nn.functional.pad(best.values > -torch.inf, missing, value=False)
    return torch.nn.functional.pad(best.indices, missing), exist


def proper(law: Float[Tensor, "B N V"]) -> Float[Tensor, "B N V"]:
    """The law itself, or the uniform one where the draft has none (all that it knows is banned, or it says NaN)."""
    return torch.where(law.sum(-1, keepdim=True) > 0, law, 1.0 / law.shape[-1])


def keep_best(
    candidates: Candidates, root: Int[Tensor, "B"], nodes: int, allowed: Int[Tensor, "B"], linear: bool = False
) -> Draft:
    """The tree of the ``nodes`` best candidates: by score, then the shallower, then the earlier (heads.md 6.9).

    A parent never scores less than its child and stands before it, so it is always taken first, and the tree is
    connected. The draft carries the scores. ``allowed``: how many levels each row may have. ``linear``: the candidates
    are one chain.
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
