"""Input and output of verification: draft, target distribution, verdict."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.law import Law as Law
from foredraft.core.transfer import on_host
from foredraft.core.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposed tree with the law that its tokens were actually drawn from.

    ``q[b, i]`` is the distribution that node i was drawn from *given its earlier siblings*: for
    ``WITHOUT_REPLACEMENT`` renormalised without them. q is never read at the root and at padding. ``q`` is None
    exactly when the law is ``FIXED``. Under any law, greedy rows of a mixed batch may hold picked tokens, each with a
    one-hot q.

    ``scores[b, i]`` is the drafter's log-probability of the path to node i, or None. It is used for statistics and
    for choosing the size of later drafts; verifiers do not read it.

    ``copied``: rows that hold a copy (``Drafter.copies``), or None. Their tokens were picked, whatever the law of the
    others: they are accepted where they equal the target's, and their q and scores are undefined.
    """

    tree: TokenTree
    law: Law
    q: Float[Tensor, "B N V"] | None = None
    scores: Float[Tensor, "B N"] | None = None
    copied: Bool[Tensor, "B"] | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """The target's processed distribution at every node. ``p`` is None when all rows are greedy (one-hots of ``best``).

    ``sound`` is False where no distribution exists: logits are not finite, or every token is banned. None: all exist.
    ``scores``: what the best tokens were chosen by, if some row is greedy: lossy rules rank tokens by it.
    """

    best: Int[Tensor, "B N"]
    p: Float[Tensor, "B N V"] | None
    sound: Bool[Tensor, "B N"] | None = None
    scores: Float[Tensor, "B N V"] | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted path and the bonus token that the target emits after it.

    ``path`` has tree.depth + 1 columns: the accepted nodes, starting with the root (node 0), padded with -1. Where the
    host has the verdict, it may be given as lists, and tensors are made when they are asked for.
    ``in_order``: whether the path of every row is known to be nodes 0, 1, 2, ...
    """

    _path: Int[Tensor, "B D"] | list[list[int]]
    _bonus: Int[Tensor, "B"] | list[int]
    in_order: bool = False

    @property
    def path(self) -> Int[Tensor, "B D"]:
        """The accepted nodes of each row."""
        return self._path if isinstance(self._path, Tensor) else on_host(self._path)

    @property
    def bonus(self) -> Int[Tensor, "B"]:
        """The token after each path."""
        return self._bonus if isinstance(self._bonus, Tensor) else on_host(self._bonus)

    @property
    def paths(self) -> list[list[int]]:
        """The accepted nodes of each row, root included, on the host; reading them from a device waits for it."""
        rows = self._path.tolist() if isinstance(self._path, Tensor) else self._path
        return [[node for node in row if node >= 0] for row in rows]

    def accepted(self) -> Int[Tensor, "B"]:
        """Accepted drafted tokens of each row (bonus and root not counted)."""
        return (self.path >= 0).sum(1) - 1

    def emitted(self, tree: TokenTree) -> Int[Tensor, "B D"]:
        """New tokens of each row: the accepted tokens, then the bonus, padded with -1."""
        drafted = tree.tokens.gather(1, self.path.clamp(min=0))
        drafted = torch.where(self.path >= 0, drafted, -1)
        last = torch.full_like(self.bonus, -1)[:, None]
        shifted = torch.cat([drafted[:, 1:], last], dim=1)
        return shifted.scatter(1, self.accepted()[:, None], self.bonus[:, None])

    def on_path(self, values: Float[Tensor, "B N V"]) -> Float[Tensor, "B D V"]:
        """The values at each node of the path: entry i belongs to emitted token i; after the path they are any node's.

        ``values`` has an entry for each node of the tree. The result may share its memory.
        """
        if self.in_order:
            return values[:, : self.path.shape[1]]
        nodes = self.path.clamp(min=0)
        if len(nodes) == 1:
            return values.index_select(1, nodes[0])
        nodes = nodes[..., None].expand(-1, -1, values.shape[-1])
        return values.gather(1, nodes)
