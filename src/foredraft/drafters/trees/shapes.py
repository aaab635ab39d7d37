"""Shapes of draft trees: static ones, fixed before drafting by the ranks of the tokens on each path, and the limits of
dynamic ones."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.drafter import FREE, LevelPrice, Plan, View
from foredraft.core.errors import OptionError
from foredraft.core.options import SizedOptions, check_bounds, option
from foredraft.core.transfer import to_device
from foredraft.drafters.trees.candidates import GUESSES, SHARPEST
from foredraft.model.ops import TreeSize

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


@dataclass(frozen=True, slots=True)
class Level:
    """The K nodes of a level of a static tree, whose parents are the F inner nodes of the level above.

    ``width``: the size of the largest family. ``ranks``: of the nodes among their siblings, from 0 on. ``chosen``: the
    index of each node in a table of ``width`` children for each parent. ``places``: the position of its parent among
    the F; ``above``: that among all nodes of the level above. ``earlier``: 1 for each of the first ``width - 1``
    siblings of a node that comes before it. ``parents``: numbers in the tree. ``inner``: positions on the level of the
    nodes with children; ``inner_places``: the positions of their parents among the F. ``turns``: of the nodes, see
    ``TokenTree``.
    """

    width: int
    ranks: Int[Tensor, "K"]
    chosen: Int[Tensor, "K"]
    places: Int[Tensor, "K"]
    above: Int[Tensor, "K"]
    earlier: Float[Tensor, "K E"]
    parents: Int[Tensor, "K"]
    inner: Int[Tensor, "G"]
    inner_places: Int[Tensor, "G"]
    turns: tuple[int, ...]

    @classmethod
    def all_of(cls, template: Template, device: torch.device) -> tuple["Level", ...]:
        """The levels of a template, starting with the root's children."""
        return tuple(cls.of(template, depth, device) for depth in range(1, template.depth + 1))

    @classmethod
    def of(cls, template: Template, depth: int, device: torch.device) -> "Level":
        """The nodes at a depth, from 1 on."""
        paths: list[Path] = [(), *template.paths]
        nodes_above, nodes = ([i for i, path in enumerate(paths) if len(path) == each] for each in (depth - 1, depth))
        parents = [template.parents[node - 1] for node in nodes]
        families = sorted(set(parents))
        places = [families.index(parent) for parent in parents]
        ranks = [paths[node][-1] for node in nodes]
        width = max(ranks) + 1
        inner = [place for place, node in enumerate(nodes) if node in template.parents]
        return cls(
            width=width,
            ranks=to_device(ranks, device),
            chosen=to_device([place * width + rank for place, rank in zip(places, ranks, strict=True)], device),
            places=to_device(places, device),
            above=to_device([nodes_above.index(parent) for parent in parents], device),
            earlier=(torch.arange(width - 1, device=device) < to_device(ranks, device)[:, None]).float(),
            parents=to_device(parents, device),
            inner=to_device(inner, device),
            inner_places=to_device([places[own] for own in inner], device),
            turns=tuple(sum(paths[node]) + depth for node in nodes),
        )


class TreeLimits(NamedTuple):
    """Limits of a dynamic tree; ``top_k`` nodes of a level are expanded, with ``top_k`` scored children each, and at
    least ``GUESSES`` in sampled rows.

    ``level_price``: see ``Plan``. ``reads``: values may be read where that is free; False for recordings.
    ``value``: the expanded nodes are those with the best paths, not those with the best tokens. ``rerank``: the tree
    has the best of all scored nodes, not the expanded ones.
    """

    nodes: int
    depth: int
    top_k: int
    level_price: LevelPrice = FREE
    reads: bool = True
    value: bool = True
    rerank: bool = True

    @property
    def expanded(self) -> int:
        """The most nodes that are expanded, the root excluded."""
        return self.top_k * max(self.depth - 1, 0)

    def children(self, view: View) -> int:
        """How many children of a node are scored."""
        return self.top_k if view.warp.greedy else max(self.top_k, GUESSES)

    def size(self, view: View, plan: Plan) -> TreeSize:
        """The same for ``HeadLayers.draft``."""
        allowed = [length * (tokens > 1) for length, tokens in zip(plan.lengths, view.host_lengths, strict=True)]
        own = (self.nodes, min(self.depth, self.nodes), self.top_k, self.children(view), self.level_price)
        return TreeSize(*own, allowed, SHARPEST, ablated=not (self.value and self.rerank))

    def within(self, plan: Plan, view: View, *, cheap: bool = False) -> "TreeLimits":
        """These and the plan's.

        Args:
            cheap: levels take little time, so a draft has all of them where shapes should be few.
        """
        nodes = min(self.nodes, plan.nodes or self.nodes)
        depth = min(self.depth if cheap and view.static else plan.length, self.depth, nodes)
        price = FREE if view.static else plan.level_price  # it is another one in each step
        return self._replace(nodes=nodes, depth=depth, level_price=price, reads=not view.static)


@dataclass(frozen=True, slots=True)
class TreeOptions(SizedOptions):
    """The shape of a dynamic tree; top_k=1 drafts chains."""

    nodes: int = option(23, "most nodes of the tree.")
    depth: int = option(6, "levels of the tree; each costs a forward of what drafts.")
    top_k: int = option(4, "nodes expanded per level, and children scored for each.")

    def __post_init__(self) -> None:
        check_bounds(self, least={"nodes": 1, "depth": 1, "top_k": 1})

    @property
    def limits(self) -> TreeLimits:
        return TreeLimits(self.nodes, self.depth, self.top_k)


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A static tree with its levels, and the limits of a dynamic tree that takes no longer to draft."""

    template: Template
    levels: tuple[Level, ...]
    limits: TreeLimits

    @classmethod
    def of(cls, template: Template, device: torch.device) -> "TreeShape":
        levels = Level.all_of(template, device)
        widest = max(1, *(len(level.inner) for level in levels))
        return cls(template, levels, TreeLimits(template.nodes, template.depth, widest))
