"""What a drafter hands to the verifier, and what the verifier hands back."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.law import Law as Law
from foredraft.core.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposed tree with the law that it was really drawn from.

    ``q[b, i]`` is the law that node i was drawn from *given its earlier siblings*: for ``WITHOUT_REPLACEMENT``
    renormalised without them. Rows of q at the root and at padding are never read. ``q`` is None exactly when the
    law is ``FIXED``. Greedy rows beside sampled ones may have picked tokens, each with a one-hot of its own, under any
    law.

    ``scores[b, i]`` is the logarithm of how likely the drafter holds the path to node i, where it says so: for
    statistics, and for what the next drafts should be like. No verifier reads it.
    """

    tree: TokenTree
    law: Law
    q: Float[Tensor, "B N V"] | None = None
    scores: Float[Tensor, "B N"] | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """The target's processed law at every node. When every row is greedy, ``p`` is None: the law is a one-hot.

    ``sound`` is False where there is no law: logits that are not numbers, or nothing left after bans. None: all are.
    """

    best: Int[Tensor, "B N"]
    p: Float[Tensor, "B N V"] | None
    sound: Bool[Tensor, "B N"] | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted path and the token that the target says after it; every step yields at least this bonus.

    ``path`` has tree.depth + 1 columns: accepted nodes from the root (always node 0) on, -1 beyond its end.
    """

    path: Int[Tensor, "B D"]
    bonus: Int[Tensor, "B"]

    def accepted(self) -> Int[Tensor, "B"]:
        """How many drafted tokens of each row were accepted (the bonus and the root do not count)."""
        return (self.path >= 0).sum(1) - 1

    def emitted(self, tree: TokenTree) -> Int[Tensor, "B D"]:
        """New tokens of each row: accepted ones, then the bonus, then -1."""
        drafted = tree.tokens.gather(1, self.path.clamp(min=0))
        drafted = torch.where(self.path >= 0, drafted, -1)
        last = torch.full_like(self.bonus, -1)[:, None]
        shifted = torch.cat([drafted[:, 1:], last], dim=1)
        return shifted.scatter(1, self.accepted()[:, None], self.bonus[:, None])
