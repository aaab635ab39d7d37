"""Optimal tree shapes from the acceptance probability of each child rank (Sequoia, arXiv:2402.12374).

The acceptance model is the paper's: if a node is accepted, its j-th child (in draw order) is accepted next with
probability a_j, independent of the node. The expected tokens per step of a tree are then F = the sum over its nodes of
the product of the a_j on the node's path; the root contributes 1, the bonus token.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from foredraft.core.errors import OptionError

Path = tuple[int, ...]
"""Child ranks from the root down: (0, 2) is the third child of the root's first child."""
Cost = Callable[[int], float]
"""Seconds of a forward as a function of its number of nodes."""


def expected_tokens(paths: Iterable[Path], acceptance: Sequence[float]) -> float:
    """F: expected tokens per step of the tree with these drafted nodes, bonus included."""
    return 1.0 + sum(math.prod(acceptance[rank] for rank in path) for path in paths)


@dataclass(frozen=True, slots=True)
class OptimalTrees:
    """The best tree for every number of drafted nodes and levels up to given limits.

    ``expected_of[d][n]``: F of the best tree of exactly n nodes, root included, with at most d levels below the root;
    -inf if there is none. ``children[d][n]``: its root's number of children. ``splits[d][b][n]``: if the root has b
    children, how many of the n nodes belong to the root and its first b - 1 subtrees.
    """

    acceptance: tuple[float, ...]
    expected_of: tuple[list[float], ...]
    children: tuple[list[int], ...]
    splits: tuple[list[list[int]], ...]

    @classmethod
    def of(cls, acceptance: Sequence[float], nodes: int, depth: int) -> "OptimalTrees":
        """All best trees of up to ``nodes`` drafted nodes and ``depth`` levels (section 4.1).

        T(n, d, b) = max over y of T(y, d, b - 1) + a_b max over b' of T(n - y, d - 1, b'), for a tree of n nodes whose
        root has exactly b children and d levels below it: O(N^2 D B), as D B products of (max, +).

        Args:
            acceptance: a_1, a_2, ...; its length is the largest number of children of a node.

        Raises:
            OptionError: ``acceptance`` is not a list of probabilities with a sum of at most 1, or ``nodes`` or
                ``depth`` is less than 1.
        """
        check_acceptance(acceptance)
        if min(nodes, depth) < 1:
            raise OptionError("A tree needs at least one node and one level.")
        size = 1 + nodes
        root_only = torch.full((size + 1,), -torch.inf, dtype=torch.float64)
        root_only[1] = 1.0
        count = torch.arange(size + 1)
        rest = count[:, None] - count  # [n, y]: nodes of the last child's subtree
        possible = (rest >= 1) & (count >= 1)
        zeros = torch.zeros(size + 1, dtype=torch.long)
        expected, children, splits = [root_only], [zeros], [zeros[None]]
        for _ in range(depth):
            below = expected[-1][rest.clamp(min=0)].masked_fill(~possible, -torch.inf)
            table, level_splits = [root_only], [zeros]
            for chance in acceptance:
                last_child = torch.where(below > -torch.inf, chance * below, -torch.inf)
                best = (table[-1] + last_child).max(dim=1)
                table.append(best.values)
                level_splits.append(best.indices)
            best = torch.stack(table).max(dim=0)
            expected.append(best.values)
            children.append(best.indices)
            splits.append(torch.stack(level_splits))
        return cls(
            tuple(acceptance),
            tuple(each.tolist() for each in expected),
            tuple(each.tolist() for each in children),
            tuple(each.tolist() for each in splits),
        )

    def expected(self, nodes: int, depth: int) -> float:
        """F of the best tree of at most this many drafted nodes and levels."""
        return self.expected_of[depth][self._size(nodes, depth)]

    def paths(self, nodes: int, depth: int) -> tuple[Path, ...]:
        """The drafted nodes of that tree, parents and earlier siblings first; of equally good trees the smallest."""
        found: list[Path] = []
        self._collect(found, (), self._size(nodes, depth), depth)
        return tuple(found)

    def _size(self, nodes: int, depth: int) -> int:
        expected = self.expected_of[depth][: 2 + nodes]
        return expected.index(max(expected))

    def _collect(self, found: list[Path], path: Path, size: int, depth: int) -> None:
        sizes: list[int] = []
        for count in range(self.children[depth][size], 0, -1):
            left = self.splits[depth][count][size]
            sizes.append(size - left)
            size = left
        for rank, child_size in enumerate(reversed(sizes)):
            found.append((*path, rank))
            self._collect(found, (*path, rank), child_size, depth - 1)


class Size(NamedTuple):
    """Drafted nodes and levels, and the predicted tokens per second of the best such tree."""

    nodes: int
    depth: int
    rate: float


def best_size(trees: OptimalTrees, sizes: Sequence[int], depths: Sequence[int], draft: Cost, target: Cost) -> Size:
    """The size whose best tree has the most tokens per second (section 4.3): F(n, d) over the seconds of a step.

    A step costs one target forward of 1 + n nodes, and one draft forward for the root and for each level but the last,
    with as many nodes as have children on that level (the paper assumes equal cost for each draft forward).

    Args:
        trees: the best trees, at least as large as the largest candidate.
        sizes, depths: candidate numbers of drafted nodes and levels. On ties the first is taken.
        draft, target: measured costs of the two models' forwards.
    """
    best = Size(sizes[0], depths[0], 0.0)
    for nodes in sizes:
        for depth in depths:
            paths = trees.paths(nodes, depth)
            parents = {path[:-1] for path in paths}
            seconds = target(1 + nodes) + sum(draft(count) for count in Counter(map(len, parents)).values())
            rate = trees.expected(nodes, depth) / seconds
            if rate > best.rate:
                best = Size(nodes, depth, rate)
    return best


def check_acceptance(acceptance: Sequence[float]) -> None:
    """Raise an ``OptionError`` unless these are probabilities with a sum of at most 1."""
    if not acceptance or not all(0.0 <= chance <= 1.0 for chance in acceptance) or sum(acceptance) > 1.0 + 1e-6:
        raise OptionError("Acceptance by rank must be probabilities that sum to 1 or less, such as 0.62/0.14/0.06.")
