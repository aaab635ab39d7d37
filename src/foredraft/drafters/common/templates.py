"""Static trees: shapes fixed before drafting, given by the ranks of the tokens on each path."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from foredraft.core.errors import OptionError

Path = tuple[int, ...]
Rates = Sequence[Sequence[float]]
"""For each level, the accuracy of the token of each rank."""


@dataclass(frozen=True)
class Template:
    """Paths of ranks: (0, 2) is the third best child of the best child of the root. Parents come before children.

    Nodes are numbered level by level; the root is 0.
    """

    paths: tuple[Path, ...]

    def __post_init__(self) -> None:
        known = {(), *self.paths}
        orphan = next((path for path in self.paths if not path or path[:-1] not in known), None)
        if orphan is not None or not self.paths:
            raise OptionError(f"A tree must contain the parent of every node; that of {orphan} is missing.")
        elder = next((p for p in self.paths if p[-1] and (*p[:-1], p[-1] - 1) not in known), None)
        if elder is not None:
            raise OptionError(f"A tree must contain the best children first; the better sibling of {elder} is missing.")
        object.__setattr__(self, "paths", tuple(sorted(known - {()}, key=lambda path: (len(path), path))))

    @classmethod
    def of(cls, text: str) -> "Template":
        """A template by name (see ``NAMED``), or by its children per level, such as 4x2x1.

        Raises:
            OptionError: ``text`` is neither.
        """
        if text in NAMED:
            return cls(NAMED[text])
        try:
            widths = [int(part) for part in text.split("x")]
        except ValueError:
            widths = []
        if not widths or min(widths) < 1:
            raise OptionError(f"Unknown tree {text!r}. Known: {', '.join(NAMED)}, or children by level, such as 4x2x1.")
        return cls.regular(widths)

    @classmethod
    def regular(cls, widths: Sequence[int]) -> "Template":
        """The template with ``widths[i]`` children for every node of level i."""
        level: list[Path] = [()]
        paths: list[Path] = []
        for width in widths:
            level = [(*path, rank) for path in level for rank in range(width)]
            paths += level
        return cls(tuple(paths))

    @property
    def depth(self) -> int:
        return len(self.paths[-1])

    @property
    def nodes(self) -> int:
        """Number of drafted nodes, the root excluded."""
        return len(self.paths)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """The parent of each node from 1 on."""
        number = {path: i for i, path in enumerate(((), *self.paths))}
        return tuple(number[path[:-1]] for path in self.paths)


def best_template(accuracies: Rates, nodes: int) -> Template:
    """The tree of ``nodes`` nodes with the most expected tokens, assuming independent accuracies.

    ``accuracies[i][r]``: measured accuracy of the token of rank r at depth i + 1. Nodes are added in order of the
    product along their path (Medusa, section 2.3.3); a better sibling never has a lower accuracy.
    """
    rates = [sorted(ranks, reverse=True) for ranks in accuracies]
    if not rates or not rates[0]:
        raise OptionError("A measured tree needs measured accuracies, and there are none: give tree= another value.")
    heap: list[tuple[float, Path]] = [(-rates[0][0], (0,))]
    chosen: list[Path] = []
    while heap and len(chosen) < nodes:
        _, path = heapq.heappop(heap)
        chosen.append(path)
        for other in ((*path[:-1], path[-1] + 1), (*path, 0)):
            if len(other) <= len(rates) and other[-1] < len(rates[len(other) - 1]):
                heapq.heappush(heap, (-prod(rates[i][rank] for i, rank in enumerate(other)), other))
    return Template(tuple(chosen))


def _listed(text: str) -> tuple[Path, ...]:
    return tuple(tuple(int(rank) for rank in word) for word in text.split())


NAMED: dict[str, tuple[Path, ...]] = {
    "eagle": _listed("0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"),
    "medusa": _listed(
        "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 "
        "0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070"
    ),
}
"""The trees named mc_sim_7b_63 in the published code: EAGLE-1's with 25 nodes and Medusa's with 63."""
