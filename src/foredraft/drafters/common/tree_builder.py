"""Draft trees built level by level on a draft model or head, and static trees built with them."""

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
    """A tree under construction: expanded nodes and frontier logits.

    ``read`` holds the nodes that the draft has read, in that order, root first; ``begin`` is the first of the F
    frontier nodes. ``logits`` [B, F, v] are in the draft's own token ids.
    """

    def __init__(self, view: View, logits: Float[Tensor, "B 1 v"]) -> None:
        self.view = view
        self.read = TokenTree.root(view.roots)
        self.begin = 0
        self.logits = logits

    @property
    def paths(self) -> Paths:
        """The paths to the frontier nodes."""
        return Paths(self.view.history, self.view.lengths, self.read, self.begin)

    def add_level(self, tokens: Int[Tensor, "B F"], parents: Int[Tensor, "B F"]) -> None:
        """Read another level; ``parents`` are numbers in ``read``, all of the current frontier."""
        before = self.read
        self.begin = before.tokens.shape[1]
        self.read = TokenTree(
            torch.cat([before.tokens, tokens], 1), torch.cat([before.parents, parents], 1), depth=before.depth + 1
        )
        self.logits = self._read_level()

    @abstractmethod
    def target_logits(self) -> Float[Tensor, "B F V"]:
        """The frontier logits over the target's vocabulary; finite even if the draft's are not."""

    @abstractmethod
    def ranked(self, count: int) -> tuple[Int[Tensor, "B F K"], Float[Tensor, "B F K"]]:
        """The ``count`` likeliest tokens after each frontier node, best first, in the target's ids, and their log
        acceptance probabilities."""

    @abstractmethod
    def _read_level(self) -> Float[Tensor, "B F v"]:
        """Read the frontier nodes; return the logits after them."""


class _ParentGroup(NamedTuple):
    """Parents with the same number of children: their positions on their level, and the numbers of their children."""

    places: Int[Tensor, "G"]
    nodes: Int[Tensor, "G C"]


@dataclass(frozen=True, slots=True)
class Level:
    """The K nodes of a level of a static tree, whose parents are the F inner nodes of the level above.

    ``groups`` hold all nodes in another order; ``order`` restores it. ``ranked``: the index of each node in a table of
    the ``width`` best children of each parent. ``parents``: numbers in the tree. ``inner``: the nodes with children;
    ``inner_parents``: the positions of their parents among the F.
    """

    groups: tuple[_ParentGroup, ...]
    order: Int[Tensor, "K"]
    ranked: Int[Tensor, "K"]
    width: int
    parents: Int[Tensor, "K"]
    inner: Int[Tensor, "G"]
    inner_parents: Int[Tensor, "G"]

    @classmethod
    def all_of(cls, template: Template, device: torch.device) -> tuple["Level", ...]:
        """The levels of a template, starting with the root's children."""
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
        groups = [{place: own for place, own in children.items() if len(own) == count} for count in counts]
        drawn = [node for group in groups for own in group.values() for node in own]
        width = counts[0]
        ranked = [place * width + rank for place, rank in zip(places, template.ranks(nodes), strict=True)]
        return cls(
            groups=tuple(_ParentGroup(fixed(list(each)), fixed(list(each.values()))) for each in groups),
            order=fixed([drawn.index(node) for node in nodes]),
            ranked=fixed(ranked),
            width=width,
            parents=fixed(above),
            inner=fixed(template.inner(level)),
            inner_parents=fixed([places[own] for own in template.inner_places(level)]),
        )


Draw = Callable[[Float[Tensor, "B F V"], Int[Tensor, "B F K"]], Siblings]


class SiblingSampling(NamedTuple):
    """How siblings are drawn, and the resulting law; uses random numbers from index ``first`` on, one per node."""

    draw: Draw
    law: Law
    first: int = 0


WITHOUT_REPLACEMENT = SiblingSampling(draw_siblings, Law.WITHOUT_REPLACEMENT)


def build_static_tree(
    builder: TreeBuilder,
    levels: Sequence[Level],
    allowed: Int[Tensor, "B"],
    sampling: SiblingSampling = WITHOUT_REPLACEMENT,
) -> Draft:
    """Build a static tree: the likeliest tokens in greedy rows, else siblings drawn from the draft's warped law.

    The shape is fixed before anything is drawn, and every drawn token is kept, so the tree does not anticipate. In a
    mixed batch, the q of a greedy row is a one-hot at each picked token. The target's law is a one-hot too, so every
    rule reduces to a comparison of tokens.

    Args:
        allowed: the number of levels that each row may have.
    """
    view = builder.view
    tree = TokenTree.root(view.roots)
    laws: list[Tensor] = []
    for number, level in enumerate(levels, start=1):
        scores = view.warp.scores(builder.target_logits(), builder.paths)
        if view.warp.greedy:
            tokens, exist = _picked(scores, level)
        else:
            tokens, exist, law = _drawn(view, normalize_or_uniform(scores.softmax(-1)), level, sampling)
            if view.warp.greedy_rows is not None:
                greedy, (best, best_exist) = view.warp.greedy_rows, _picked(scores, level)
                tokens = torch.where(greedy[:, 0], best, tokens)
                exist = torch.where(greedy[:, 0], best_exist, exist)
                law = torch.where(greedy, torch.zeros_like(law).scatter_(-1, best[..., None], 1.0), law)
            laws.append(law)
        above = level.parents.expand(tokens.shape)
        exist = exist & (allowed >= number)[:, None] & tree.valid.gather(1, above)
        parents = torch.where(exist, above, PAD)
        tree = TokenTree(torch.cat([tree.tokens, tokens], 1), torch.cat([tree.parents, parents], 1), depth=number)
        if number < len(levels):
            builder.add_level(
                tree.tokens[:, level.inner], (builder.begin + level.inner_parents).expand(len(view.rows), -1)
            )
    if view.warp.greedy:
        return Draft(tree, Law.FIXED)
    root = torch.zeros_like(laws[0][:, :1])  # never read
    return Draft(tree, sampling.law, torch.cat([root, *laws], 1))


def _picked(scores: Float[Tensor, "B F V"], level: Level) -> tuple[Int[Tensor, "B K"], Bool[Tensor, "B K"]]:
    """The likeliest tokens for the nodes of a level, and which of them exist."""
    tokens, exist = likeliest(scores, level.width)
    return tokens.flatten(1)[:, level.ranked], exist.flatten(1)[:, level.ranked]


def _drawn(
    view: View, law: Float[Tensor, "B F V"], level: Level, sampling: SiblingSampling
) -> tuple[Int[Tensor, "B K"], Bool[Tensor, "B K"], Float[Tensor, "B K V"]]:
    """Tokens of the nodes of a level, which of them exist, and the law of each."""
    parts = []
    for group in level.groups:
        index = sampling.first + group.nodes.expand(len(view.rows), -1, -1)
        drawn = sampling.draw(law[:, group.places], view.noise.bits(Stream.DRAFT, index))
        parts.append((drawn.tokens.flatten(1), drawn.exist.flatten(1), drawn.laws.flatten(1, 2)))
    if len(parts) == 1:
        return parts[0]
    tokens, exist, laws = (torch.cat(each, 1) for each in zip(*parts, strict=True))
    return tokens[:, level.order], exist[:, level.order], laws[:, level.order]
