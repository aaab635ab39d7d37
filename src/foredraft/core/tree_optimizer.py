"""The best shapes of trees, from how often each child is the accepted one (Sequoia, arXiv:2402.12374).

The model of acceptance is the paper's: once a node is accepted, its j-th child (in draw order) is the one accepted
next with probability a_j, wherever the node stands. So a tree is worth F = the sum, over its nodes, of the product of
the a_j on the node's path, in tokens a step; the root counts 1, which is the bonus token.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from foredraft.core.errors import OptionError

Path = tuple[int, ...]
"""The ranks of the children on the way from the root: (0, 2) is the third child of the root's first."""
Cost = Callable[[int], float]
"""Seconds of a forward by its number of nodes."""


def expected_tokens(paths: Iterable[Path], acceptance: Sequence[float]) -> float:
    """F: tokens a step of the tree with these drafted nodes, the bonus included."""
    return 1.0 + sum(math.prod(acceptance[rank] for rank in path) for path in paths)


@dataclass(frozen=True, slots=True)
class Shapes:
    """The best tree for every number of drafted nodes and of levels, up to those it was made for.

    ``worth[d][n]`` is F of the best tree of exactly n nodes, root included, and at most d levels below the root; -inf
    where there is none. ``children[d][n]`` is how many children its root has, and ``elders[d][b, n]`` how many of the
    n nodes are left to the root and its first b - 1 children when it has b.
    """

    acceptance: tuple[float, ...]
    worth: tuple[list[float], ...]
    children: tuple[list[int], ...]
    elders: tuple[list[list[int]], ...]

    @classmethod
    def of(cls, acceptance: Sequence[float], nodes: int, depth: int) -> "Shapes":
        """All best trees of up to so many drafted nodes and levels (section 4.1).

        T(n, d, b) = max over y of T(y, d, b - 1) + a_b max over b' of T(n - y, d - 1, b'), for a tree of n nodes whose
        root has exactly b children, d levels below it: O(N^2 D B), as D B products of (max, +).

        Args:
            acceptance: a_1, a_2, ...; a node has no more children than there are entries.

        Raises:
            OptionError: something else than probabilities of which at most one comes true, or no nodes or levels.
        """
        check_acceptance(acceptance)
        if min(nodes, depth) < 1:
            raise OptionError("A tree needs one node and one level or more.")
        size = 1 + nodes
        alone = torch.full((size + 1,), -torch.inf, dtype=torch.float64)
        alone[1] = 1.0
        count = torch.arange(size + 1)
        rest = count[:, None] - count  # [n, y]: nodes of the youngest child's subtree
        possible = (rest >= 1) & (count >= 1)
        nothing = torch.zeros(size + 1, dtype=torch.long)
        worth, children, elders = [alone], [nothing], [nothing[None]]
        for _ in range(depth):
            below = worth[-1][rest.clamp(min=0)].masked_fill(~possible, -torch.inf)
            table, splits = [alone], [nothing]
            for chance in acceptance:
                youngest = torch.where(below > -torch.inf, chance * below, -torch.inf)
                best = (table[-1] + youngest).max(dim=1)
                table.append(best.values)
                splits.append(best.indices)
            best = torch.stack(table).max(dim=0)
            worth.append(best.values)
            children.append(best.indices)
            elders.append(torch.stack(splits))
        return cls(
            tuple(acceptance),
            tuple(each.tolist() for each in worth),
            tuple(each.tolist() for each in children),
            tuple(each.tolist() for each in elders),
        )

    def expected(self, nodes: int, depth: int) -> float:
        """F of the best tree of at most so many drafted nodes and levels."""
        return self.worth[depth][self._size(nodes, depth)]

    def paths(self, nodes: int, depth: int) -> tuple[Path, ...]:
        """The drafted nodes of that tree, parents and elder siblings first; of equally good trees the smallest."""
        found: list[Path] = []
        self._collect(found, (), self._size(nodes, depth), depth)
        return tuple(found)

    def _size(self, nodes: int, depth: int) -> int:
        worth = self.worth[depth][: 2 + nodes]
        return worth.index(max(worth))

    def _collect(self, found: list[Path], path: Path, size: int, depth: int) -> None:
        sizes: list[int] = []
        for born in range(self.children[depth][size], 0, -1):
            left = self.elders[depth][born][size]
            sizes.append(size - left)
            size = left
        for rank, own in enumerate(reversed(sizes)):
            found.append((*path, rank))
            self._collect(found, (*path, rank), own, depth - 1)


class Size(NamedTuple):
    """Drafted nodes and levels, and the tokens a second that the measured costs promise for the best such tree."""

    nodes: int
    depth: int
    rate: float


def best_size(shapes: Shapes, sizes: Sequence[int], depths: Sequence[int], draft: Cost, target: Cost) -> Size:
    """The size whose best tree brings the most tokens a second (section 4.3): F(n, d) over the seconds of a step.

    A step is a forward of the target with 1 + n nodes, and one of the draft for the root and for each level but the
    last, with as many nodes as have children there; the paper counts the same for each of these.

    Args:
        sizes, depths: numbers of drafted nodes and of levels to choose from. Of equals the first is taken.
    """
    best = Size(sizes[0], depths[0], 0.0)
    for nodes in sizes:
        for depth in depths:
            paths = shapes.paths(nodes, depth)
            parents = {path[:-1] for path in paths}
            seconds = target(1 + nodes) + sum(draft(count) for count in Counter(map(len, parents)).values())
            rate = shapes.expected(nodes, depth) / seconds
            if rate > best.rate:
                best = Size(nodes, depth, rate)
    return best


def check_acceptance(acceptance: Sequence[float]) -> None:
    """Raise an ``OptionError`` unless these may be the a_j: probabilities of which at most one comes true."""
    if not acceptance or not all(0.0 <= chance <= 1.0 for chance in acceptance) or sum(acceptance) > 1.0 + 1e-6:
        raise OptionError("Acceptance by rank must be probabilities that sum to 1 or less, such as 0.62/0.14/0.06.")
