"""Draft trees built level by level on a draft model or head, and static trees built with them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import View
from foredraft.core.rng import Stream, draw_distinct, exponentials, race_size
from foredraft.core.sampling.warp import Paths
from foredraft.core.transfer import to_device
from foredraft.core.tree import PAD, ROOT, TokenTree
from foredraft.drafters.common.templates import Path, Template
from foredraft.drafters.common.tree_ops import draw_independent, likeliest, normalize_or_uniform, without_earlier


class TreeBuilder(ABC):
    """A tree under construction: expanded nodes and frontier logits.

    ``starts``: for each level, the number of its first node among those that the draft has read; the last level is the
    frontier, of F nodes. ``logits`` [B, F, v] are in the draft's own token ids; V is the target's ``vocab_size``.
    """

    def __init__(self, view: View, logits: Float[Tensor, "B 1 v"], vocab_size: int) -> None:
        self.view = view
        self.vocab_size = vocab_size
        self.starts = [0]
        self.logits = logits
        self._tokens = [view.roots[:, None]]
        self._places: list[Tensor] = []  # of the parents of each level's nodes on the level above

    @property
    def read(self) -> TokenTree:
        """The nodes that the draft has read, in that order, root first."""
        parents = [self._root, *(places + start for places, start in zip(self._places, self.starts, strict=False))]
        depth = len(self._places)
        return TokenTree(torch.cat(self._tokens, 1), torch.cat(parents, 1), depth, linear=depth == 0)

    @property
    def paths(self) -> Paths:
        """The paths to the frontier nodes; without the tree if the warp does not read them."""
        tree = self.read if self.view.warp.needs_paths else TokenTree(self._tokens[0], self._root, 0, linear=True)
        return Paths(self.view.history, self.view.lengths, tree, self.starts[-1])

    @property
    def _root(self) -> Int[Tensor, "B 1"]:
        """The root's parent."""
        return torch.full_like(self._tokens[0], ROOT)

    def add_level(self, tokens: Int[Tensor, "B G"], places: Int[Tensor, "B G"]) -> None:
        """Read another level, the new frontier; ``places``: the positions of the parents on the frontier."""
        self._places.append(places)
        self.starts.append(self.starts[-1] + self._tokens[-1].shape[1])
        self._tokens.append(tokens)
        self.logits = self._read_level(tokens, places)

    @abstractmethod
    def target_logits(self) -> Float[Tensor, "B F V"]:
        """The frontier logits over the target's vocabulary; finite even if the draft's are not."""

    @abstractmethod
    def ranked(self, count: int) -> tuple[Int[Tensor, "B F K"], Float[Tensor, "B F K"]]:
        """The ``count`` likeliest tokens after each frontier node, best first, in the target's ids, and their log
        acceptance probabilities."""

    @abstractmethod
    def _read_level(self, tokens: Int[Tensor, "B F"], places: Int[Tensor, "B F"]) -> Float[Tensor, "B F v"]:
        """Read the frontier nodes; return the logits after them."""


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


class _Nodes(NamedTuple):
    """The nodes of a level: tokens, which of them exist, and the law of each, if they are drawn."""

    tokens: Int[Tensor, "B K"]
    exist: Bool[Tensor, "B K"]
    laws: Float[Tensor, "B K V"] | None


def build_static_tree(
    builder: TreeBuilder,
    levels: Sequence[Level],
    allowed: Int[Tensor, "B"],
    law: Law = Law.WITHOUT_REPLACEMENT,
    first: int = 0,
) -> Draft:
    """Build a static tree: the likeliest tokens in greedy rows, else siblings drawn from the draft's warped law.

    The shape is fixed before anything is drawn, and every drawn token is kept, so the tree does not anticipate. In a
    mixed batch, the q of a greedy row is a one-hot at each picked token. The target's law is a one-hot too, so every
    rule reduces to a comparison of tokens.

    Args:
        allowed: the number of levels that each row may have.
        law: how siblings are drawn: ``WITHOUT_REPLACEMENT``, ``IID`` or ``IID_MANY``.
        first: the index of the first random number; there is one for each parent.
    """
    view, last = builder.view, levels[-1]
    rows = len(view.rows)
    races = None if view.warp.greedy else _races(view, levels, first, builder.vocab_size)
    parts: list[_Nodes] = []
    exist: Tensor | None = None
    for number, level in enumerate(levels, start=1):
        nodes = _nodes(builder, level, law, None if races is None else next(races))
        own = nodes.exist & (allowed >= number)[:, None]
        exist = own if exist is None else own & exist.index_select(1, level.above)
        parts.append(nodes._replace(exist=exist))
        if level is not last:
            builder.add_level(nodes.tokens.index_select(1, level.inner), level.inner_places.expand(rows, -1))
    tokens = torch.cat([view.roots[:, None], *(each.tokens for each in parts)], 1)
    parents = torch.cat([level.parents for level in levels])
    parents = torch.where(torch.cat([each.exist for each in parts], 1), parents, PAD)
    turns = [turn for level in levels for turn in level.turns]
    sizes = tuple(turns.count(turn) for turn in range(1, 1 + max(turns)))
    tree = TokenTree(tokens, torch.nn.functional.pad(parents, (1, 0), value=ROOT), depth=len(levels), turns=sizes)
    if view.warp.greedy:
        return Draft(tree, Law.FIXED)
    laws = [each.laws for each in parts if each.laws is not None]
    root = torch.zeros_like(laws[0][:, :1])  # never read
    return Draft(tree, law, torch.cat([root, *laws], 1))


def _races(view: View, levels: Sequence[Level], first: int, vocab_size: int) -> Iterator[Float[Tensor, "B F n"]]:
    """The exponentials for the parents of each level, hashed together since a hash takes many small operations."""
    sizes = [1, *(len(level.inner) for level in levels[:-1])]
    index = torch.arange(first, first + sum(sizes), device=view.lengths.device).expand(len(view.rows), -1)
    count = max(level.width for level in levels) * race_size(vocab_size)
    return iter(exponentials(view.noise.bits(Stream.DRAFT, index), count).split(sizes, dim=1))


def _nodes(builder: TreeBuilder, level: Level, law: Law, times: Float[Tensor, "B F n"] | None) -> _Nodes:
    """The nodes of a level: the likeliest tokens in greedy rows, else drawn with the exponentials ``times``."""
    warp = builder.view.warp
    scores = warp.scores(builder.target_logits(), builder.paths)
    if times is None:
        return _picked(scores, level)
    drawn = _drawn(normalize_or_uniform(scores.softmax(-1)), level, law, times)
    if warp.greedy_rows is None:
        return drawn
    best, greedy = _picked(scores, level), warp.greedy_rows
    assert drawn.laws is not None
    one_hot = torch.zeros_like(drawn.laws).scatter_(-1, best.tokens[..., None], 1.0)
    return _Nodes(
        torch.where(greedy[:, 0], best.tokens, drawn.tokens),
        torch.where(greedy[:, 0], best.exist, drawn.exist),
        torch.where(greedy, one_hot, drawn.laws),
    )


def _picked(scores: Float[Tensor, "B F V"], level: Level) -> _Nodes:
    """The likeliest tokens for the nodes of a level."""
    tokens, exist = likeliest(scores, level.width)
    return _Nodes(tokens.flatten(1).index_select(1, level.chosen), exist.flatten(1).index_select(1, level.chosen), None)


def _drawn(q: Float[Tensor, "B F V"], level: Level, law: Law, times: Float[Tensor, "B F n"]) -> _Nodes:
    """Tokens drawn for the nodes of a level. As many are drawn for each parent as the largest family has; what is
    beyond a family is not used, which does not change the law of the others. Whether a child exists depends on q alone,
    not on the tokens drawn, so the tree does not anticipate."""
    distinct = law is Law.WITHOUT_REPLACEMENT
    drawn = (draw_distinct if distinct else draw_independent)(q, times, level.width)
    own = q.index_select(1, level.places)
    if distinct and level.width > 1:
        siblings, chances = (each[..., :-1].index_select(1, level.places) for each in drawn)
        own = without_earlier(own, siblings, chances * level.earlier)
    tokens, chances = (each.flatten(1).index_select(1, level.chosen) for each in drawn)
    return _Nodes(tokens, chances > 0, own)
