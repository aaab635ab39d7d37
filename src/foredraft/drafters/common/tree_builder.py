"""Trees that grow level by level on a draft: what may follow the newest nodes, and static shapes filled with it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import View
from foredraft.core.rng import Stream
from foredraft.core.sampling.warp import Paths
from foredraft.core.tree import PAD, TokenTree
from foredraft.drafters.common.templates import Template
from foredraft.drafters.common.tree_ops import Siblings, draw_siblings, likeliest, normalize_or_uniform


class TreeBuilder(ABC):
    """The nodes of a tree that a draft has read, which are those that have children, and what it says after the newest.

    ``read`` holds them in the order of reading, the root first; ``begin`` is the first of the newest F, and ``logits``
    [B, F, v] stand in the draft's own ids.
    """

    def __init__(self, view: View, logits: Float[Tensor, "B 1 v"]) -> None:
        self.view = view
        self.read = TokenTree.root(view.roots)
        self.begin = 0
        self.logits = logits

    @property
    def paths(self) -> Paths:
        """How the newest nodes came about."""
        return Paths(self.view.history, self.view.lengths, self.read, self.begin)

    def grow(self, tokens: Int[Tensor, "B F"], parents: Int[Tensor, "B F"]) -> None:
        """Read another level; ``parents`` are numbers in ``read``, all of them of the newest level."""
        before = self.read
        self.begin = before.tokens.shape[1]
        self.read = TokenTree(
            torch.cat([before.tokens, tokens], 1), torch.cat([before.parents, parents], 1), depth=before.depth + 1
        )
        self.logits = self._after_newest()

    @abstractmethod
    def wide(self) -> Float[Tensor, "B F V"]:
        """The logits over the target's vocabulary, and numbers whatever the draft computed."""

    @abstractmethod
    def ranked(self, count: int) -> tuple[Int[Tensor, "B F K"], Float[Tensor, "B F K"]]:
        """The so many likeliest tokens after each of the newest nodes, best first, in the target's ids, and the
        logarithm of how likely each is to be accepted."""

    @abstractmethod
    def _after_newest(self) -> Float[Tensor, "B F v"]:
        """Read the newest nodes."""


class _Family(NamedTuple):
    """Parents with the same number of children: their places on their level, and the numbers of their children."""

    places: Int[Tensor, "G"]
    nodes: Int[Tensor, "G C"]


@dataclass(frozen=True, slots=True)
class Level:
    """The K nodes of a level of a static tree, whose parents are the F inner nodes of the level above.

    ``families`` hold all of them, in another order; ``order`` brings it back. ``ranked``: where each stands in a table
    of the ``width`` best children of each parent. ``parents``: numbers in the tree. ``inner``: the nodes that have
    children, and the places of their parents among the F.
    """

    families: tuple[_Family, ...]
    order: Int[Tensor, "K"]
    ranked: Int[Tensor, "K"]
    width: int
    parents: Int[Tensor, "K"]
    inner: Int[Tensor, "G"]
    inner_parents: Int[Tensor, "G"]

    @classmethod
    def all_of(cls, template: Template, device: torch.device) -> tuple["Level", ...]:
        """The levels of a template, from that of the root's children on."""
        return tuple(cls.of(template, level, device) for level in range(1, template.depth + 1))

    @classmethod
    def of(cls, template: Template, level: int, device: torch.device) -> "Level":
        """The nodes at ``level``."""

        def fixed(numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.long, device=device)

        nodes, above, places = template.level(level), template.above(level), template.places(level)
        children: dict[int, list[int]] = {}
        for node, place in zip(nodes, places, strict=True):
            children.setdefault(place, []).append(node)
        counts = sorted({len(own) for own in children.values()}, reverse=True)
        families = [{place: own for place, own in children.items() if len(own) == count} for count in counts]
        drawn = [node for family in families for own in family.values() for node in own]
        width = counts[0]
        ranked = [place * width + rank for place, rank in zip(places, template.ranks(nodes), strict=True)]
        return cls(
            families=tuple(_Family(fixed(list(each)), fixed(list(each.values()))) for each in families),
            order=fixed([drawn.index(node) for node in nodes]),
            ranked=fixed(ranked),
            width=width,
            parents=fixed(above),
            inner=fixed(template.inner(level)),
            inner_parents=fixed([places[own] for own in template.inner_places(level)]),
        )


Draw = Callable[[Float[Tensor, "B F V"], Int[Tensor, "B F K"]], Siblings]


class SiblingSampling(NamedTuple):
    """How siblings come about, and the law that says so; random numbers from index ``first`` on, one a node."""

    draw: Draw
    law: Law
    first: int = 0


WITHOUT_REPLACEMENT = SiblingSampling(draw_siblings, Law.WITHOUT_REPLACEMENT)


def fill(
    growing: TreeBuilder,
    levels: Sequence[Level],
    allowed: Int[Tensor, "B"],
    drawing: SiblingSampling = WITHOUT_REPLACEMENT,
) -> Draft:
    """A static tree: of the likeliest tokens in greedy rows, else of siblings drawn from the draft's law, warped as the
    target's is.

    The shape is known before anything is drawn, and nothing drawn is left out, so it gives nothing away. Beside sampled
    rows the q of a greedy row is a one-hot of each picked token. So is its target's law, and of two one-hots every rule
    asks just whether they are the same.

    Args:
        allowed: how many levels each row may have.
    """
    view = growing.view
    tree = TokenTree.root(view.roots)
    laws: list[Tensor] = []
    for number, level in enumerate(levels, start=1):
        scores = view.warp.scores(growing.wide(), growing.paths)
        if view.warp.greedy:
            tokens, exist = _picked(scores, level)
        else:
            tokens, exist, law = _drawn(view, normalize_or_uniform(scores.softmax(-1)), level, drawing)
            if view.warp.greedy_rows is not None:
                greedy, (best, there) = view.warp.greedy_rows, _picked(scores, level)
                tokens = torch.where(greedy[:, 0], best, tokens)
                exist = torch.where(greedy[:, 0], there, exist)
                law = torch.where(greedy, torch.zeros_like(law).scatter_(-1, best[..., None], 1.0), law)
            laws.append(law)
        above = level.parents.expand(tokens.shape)
        exist = exist & (allowed >= number)[:, None] & tree.valid.gather(1, above)
        parents = torch.where(exist, above, PAD)
        tree = TokenTree(torch.cat([tree.tokens, tokens], 1), torch.cat([tree.parents, parents], 1), depth=number)
        if number < len(levels):
            growing.grow(tree.tokens[:, level.inner], (growing.begin + level.inner_parents).expand(len(view.rows), -1))
    if view.warp.greedy:
        return Draft(tree, Law.FIXED)
    root = torch.zeros_like(laws[0][:, :1])  # never read
    return Draft(tree, drawing.law, torch.cat([root, *laws], 1))


def _picked(scores: Float[Tensor, "B F V"], level: Level) -> tuple[Int[Tensor, "B K"], Bool[Tensor, "B K"]]:
    """The likeliest tokens for the nodes of a level, and which of them exist."""
    tokens, exist = likeliest(scores, level.width)
    return tokens.flatten(1)[:, level.ranked], exist.flatten(1)[:, level.ranked]


def _drawn(
    view: View, law: Float[Tensor, "B F V"], level: Level, drawing: SiblingSampling
) -> tuple[Int[Tensor, "B K"], Bool[Tensor, "B K"], Float[Tensor, "B K V"]]:
    """Tokens of the nodes of a level, which of them exist, and what each was drawn from."""
    parts = []
    for family in level.families:
        index = drawing.first + family.nodes.expand(len(view.rows), -1, -1)
        drawn = drawing.draw(law[:, family.places], view.noise.bits(Stream.DRAFT, index))
        parts.append((drawn.tokens.flatten(1), drawn.exist.flatten(1), drawn.laws.flatten(1, 2)))
    if len(parts) == 1:
        return parts[0]
    tokens, exist, laws = (torch.cat(each, 1) for each in zip(*parts, strict=True))
    return tokens[:, level.order], exist[:, level.order], laws[:, level.order]
