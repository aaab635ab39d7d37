"""How trees grow: shapes that are fixed before anything is drawn, and children drawn without replacement."""

from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.noise import inverse_cdf


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


def likeliest(scores: Float[Tensor, "B F V"], count: int) -> tuple[Int[Tensor, "B F K"], Bool[Tensor, "B F K"]]:
    """The so many best tokens of each node, and which of them exist: none is banned, and V may be less than K."""
    best = scores.topk(min(count, scores.shape[-1]), dim=-1)
    missing = (0, count - best.indices.shape[-1])
    exist = torch.nn.functional.pad(best.values > -torch.inf, missing, value=False)
    return torch.nn.functional.pad(best.indices, missing), exist


def proper(law: Float[Tensor, "B N V"]) -> Float[Tensor, "B N V"]:
    """The law itself, or the uniform one where the draft has none (all that it knows is banned, or it says NaN)."""
    return torch.where(law.sum(-1, keepdim=True) > 0, law, 1.0 / law.shape[-1])
