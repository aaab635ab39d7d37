"""Static trees, of guesses or of drawn tokens.

In greedy rows a family has the best guesses for its place. In sampled rows the noise says more than ranks do which
guesses are right, so the shape only gives the numbers of nodes and levels, and how many nodes of a level are expanded.
(Not for Medusa and Hydra, whose shapes are measured.)
The ratio rules of the papers need siblings in the places of the shape that were drawn from the draft's law q, with
random numbers that the target does not use (``View.draws``).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.best import best_of
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import LevelPrice, View
from foredraft.core.rng import RandomStream, draw_distinct, exponentials, first
from foredraft.core.tree import PAD, ROOT, TokenTree
from foredraft.drafters.trees.builder import TreeBuilder
from foredraft.drafters.trees.candidates import Candidates, keep_best, normalize_or_uniform, worth_a_level
from foredraft.drafters.trees.dynamic import build_dynamic_tree
from foredraft.drafters.trees.shapes import Level, TreeLimits


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


def static_candidates(
    builder: TreeBuilder, levels: Sequence[Level], allowed: Int[Tensor, "B"], level_price: LevelPrice
) -> Candidates:
    """The nodes of a static tree: of each family, the best guesses in order.

    Args:
        allowed: the number of levels that each row may have.
        level_price: see ``Plan``.
    """
    view = builder.view
    above = torch.zeros_like(view.roots, dtype=torch.float32)[:, None]  # scores of the frontier nodes
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for number, level in enumerate(levels, start=1):
        ids, shares = builder.ranked(level.width)
        rank = level.ranks.clamp(max=ids.shape[2] - 1)
        missing = level.ranks >= ids.shape[2]  # a family may be larger than the vocabulary
        scores = above[:, level.places] + shares[:, level.places, rank].masked_fill(missing, -torch.inf)
        tokens = ids[:, level.places, rank]
        parts.append((tokens, level.parents.expand(tokens.shape), scores))
        above = scores[:, level.inner]
        if number == len(levels) or not worth_a_level(above, allowed > number, level_price):
            break
        builder.add_level(tokens[:, level.inner], level.inner_places.expand(len(tokens), -1))
    tokens, parents, scores = (torch.cat(each, 1) for each in zip(*parts, strict=True))
    depths = torch.cat([torch.full_like(each.ranks, i) for i, each in enumerate(levels[: len(parts)], start=1)])
    return Candidates(tokens, parents, scores, depths, len(parts))


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


def draw_independent(
    law: Float[Tensor, "B F V"], times: Float[Tensor, "B F n"], count: int
) -> tuple[Int[Tensor, "B F K"], Float[Tensor, "B F K"]]:
    """``count`` tokens from each law, drawn independently, and their probabilities; tokens may repeat.

    Args:
        times: independent exponentials, ``count * V`` for each law.
    """
    tokens = first(law[:, :, None], times[..., : count * law.shape[-1]].unflatten(-1, (count, -1)))
    return tokens, law.gather(-1, tokens)


def without_earlier(
    law: Float[Tensor, "B N V"], earlier: Int[Tensor, "B N E"], chances: Float[Tensor, "B N E"]
) -> Float[Tensor, "B N V"]:
    """Each law without the earlier siblings, renormalised; ``chances``: their probabilities under ``law``, 0 for those
    that are not earlier. It is 0 where no token is left. Overwrites ``law``."""
    rest = law.scatter_add_(-1, earlier, -chances)
    return rest.div_(rest.sum(-1, keepdim=True).clamp_(min=torch.finfo(law.dtype).tiny))


def likeliest(scores: Float[Tensor, "B F V"], count: int) -> tuple[Int[Tensor, "B F K"], Bool[Tensor, "B F K"]]:
    """The ``count`` best tokens of each node, and which of them exist: banned ones do not, and V may be below K."""
    best = best_of(scores, min(count, scores.shape[-1]))
    tokens, exist = best.indices, best.values > -torch.inf
    if scores.shape[-1] < count:
        missing = (0, count - scores.shape[-1])
        return torch.nn.functional.pad(tokens, missing), torch.nn.functional.pad(exist, missing, value=False)
    return tokens, exist
