"""Static trees, of guesses or of drawn tokens.

In greedy rows a family has the best guesses for its place. In sampled rows the noise says more than ranks do which
guesses are right, so the shape only gives the numbers of nodes and levels, and how many nodes of a level are expanded.
(Not for Medusa and Hydra, whose shapes are measured.)
The ratio rules of the papers need siblings in the places of the shape that were drawn from the draft's law q, with
random numbers that the target does not use (``View.draws``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import View
from foredraft.core.rng import RandomStream, draw_distinct, exponentials
from foredraft.core.tree import PAD, ROOT, TokenTree
from foredraft.drafters.common.dynamic_tree import TreeLimits, build_dynamic_tree
from foredraft.drafters.common.templates import Template
from foredraft.drafters.common.tree_builder import Level, TreeBuilder, static_candidates
from foredraft.drafters.common.tree_ops import (
    draw_independent,
    keep_best,
    likeliest,
    normalize_or_uniform,
    without_earlier,
)


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


class _Nodes(NamedTuple):
    """The nodes of a level: tokens, which of them exist, and the law of each."""

    tokens: Int[Tensor, "B K"]
    exist: Bool[Tensor, "B K"]
    laws: Float[Tensor, "B K V"]


def build_static_tree(
    builder: TreeBuilder,
    levels: Sequence[Level],
    allowed: Int[Tensor, "B"],
    limits: TreeLimits,
    law: Law = Law.WITHOUT_REPLACEMENT,
    first: int = 0,
) -> Draft:
    """Build a static tree of the best guesses, in sampled rows a dynamic one of the same size; if drafts are drawn, its
    siblings are.

    Args:
        allowed: the number of levels that each row may have.
        limits: of the shape and the plan. A drawn tree has all nodes of its levels.
        law: how siblings are drawn: ``WITHOUT_REPLACEMENT``, ``IID`` or ``IID_MANY``.
        first: the index of the first random number of a drawn tree; there is one for each parent.
    """
    view, levels = builder.view, levels[: limits.depth]
    if view.warp.greedy or (builder.in_place and not view.draws):
        candidates = static_candidates(builder, levels, allowed, limits.level_price)
        return keep_best(
            candidates, view.roots, limits.nodes, allowed, linear=candidates.tokens.shape[1] == candidates.depth
        )
    if view.draws:
        return _drawn_tree(builder, levels, allowed, law, first)
    return build_dynamic_tree(builder, allowed, limits)


def _drawn_tree(
    builder: TreeBuilder, levels: Sequence[Level], allowed: Int[Tensor, "B"], law: Law, first: int
) -> Draft:
    """A static tree whose siblings are drawn from the draft's warped law.

    The shape is fixed before anything is drawn, and every drawn token is kept, so the tree does not anticipate. In a
    mixed batch, the q of a greedy row is a one-hot at each picked token. The target's law is a one-hot too, so every
    rule reduces to a comparison of tokens.
    """
    view, last = builder.view, levels[-1]
    rows = len(view.rows)
    races = _races(view, levels, law, first, builder.vocab_size)
    parts: list[_Nodes] = []
    exist: Tensor | None = None
    for number, level in enumerate(levels, start=1):
        nodes = _nodes(builder, level, law, next(races))
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
    laws = [each.laws for each in parts]
    root = torch.zeros_like(laws[0][:, :1])  # never read
    return Draft(tree, law, torch.cat([root, *laws], 1))


def _races(
    view: View, levels: Sequence[Level], law: Law, first: int, vocab_size: int
) -> Iterator[Float[Tensor, "B F n"]]:
    """The exponentials for the parents of each level, hashed together since a hash takes many small operations: V for
    siblings without replacement, which are the first arrivals of one race, else V for each of the largest family."""
    sizes = [1, *(len(level.inner) for level in levels[:-1])]
    index = torch.arange(first, first + sum(sizes), device=view.lengths.device).expand(len(view.rows), -1)
    races = 1 if law is Law.WITHOUT_REPLACEMENT else max(level.width for level in levels)
    return iter(exponentials(view.noise.bits(RandomStream.DRAFT, index), races * vocab_size).split(sizes, dim=1))


def _nodes(builder: TreeBuilder, level: Level, law: Law, times: Float[Tensor, "B F n"]) -> _Nodes:
    """The nodes of a level: the likeliest tokens in greedy rows, else drawn with the exponentials ``times``."""
    warp = builder.view.warp
    scores = warp.scores(builder.target_logits(), builder.paths)
    drawn = _drawn(normalize_or_uniform(scores.softmax(-1)), level, law, times)
    if warp.greedy_rows is None:
        return drawn
    best, exist = likeliest(scores, level.width)
    best, exist = (each.flatten(1).index_select(1, level.chosen) for each in (best, exist))
    greedy = warp.greedy_rows
    one_hot = torch.zeros_like(drawn.laws).scatter_(-1, best[..., None], 1.0)
    return _Nodes(
        torch.where(greedy[:, 0], best, drawn.tokens),
        torch.where(greedy[:, 0], exist, drawn.exist),
        torch.where(greedy, one_hot, drawn.laws),
    )


def _drawn(q: Float[Tensor, "B F V"], level: Level, law: Law, times: Float[Tensor, "B F n"]) -> _Nodes:
    """Tokens drawn for the nodes of a level. As many are drawn for each parent as the largest family has; what is
    beyond a family is not used, which does not change the law of the others. Whether a child exists depends on q alone,
    not on the tokens drawn, so the tree does not anticipate."""
    distinct = law is Law.WITHOUT_REPLACEMENT
    if distinct:
        drawn = draw_distinct(q, times, level.width)
    else:
        drawn = draw_independent(q, times, level.width)
    own = q.index_select(1, level.places)
    if distinct and level.width > 1:
        siblings, chances = (each[..., :-1].index_select(1, level.places) for each in drawn)
        own = without_earlier(own, siblings, chances * level.earlier)
    tokens, chances = (each.flatten(1).index_select(1, level.chosen) for each in drawn)
    return _Nodes(tokens, chances > 0, own)
