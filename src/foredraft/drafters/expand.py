"""A tree of fixed shape that a whole model grows, level by level."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.drafter import Plan, View
from foredraft.core.noise import Stream
from foredraft.core.tree import PAD, TokenTree
from foredraft.core.warp import Paths
from foredraft.drafters.grow import Levels, Siblings, likeliest, proper
from foredraft.drafters.reader import Reader
from foredraft.drafters.window import WindowReader

Draw = Callable[[Float[Tensor, "B F V"], Float[Tensor, "B F K"]], Siblings]


class Expanded(NamedTuple):
    """A tree, and what each node was drawn from; None where all rows are greedy, whose nodes are the likeliest."""

    tree: TokenTree
    q: Float[Tensor, "B N V"] | None


def expand(
    reader: Reader | WindowReader, view: View, plan: Plan, branching: tuple[int, ...], draw: Draw, *, first: int = 0
) -> Expanded:
    """Read what is new, then give every node of level i ``branching[i]`` children.

    Args:
        plan: no row goes deeper than its length.
        draw: how siblings of sampled rows come about; those of a greedy batch are the likeliest tokens.
        first: random numbers from this index on are the caller's to use, one a node.
    """
    levels = Levels(branching)
    logits = reader.read(view, levels.nodes)
    rows, device = len(view.rows), view.lengths.device
    allowed = torch.tensor(plan.lengths, device=device)[:, None, None]
    tree = TokenTree.root(view.roots)
    laws = [logits.new_zeros(logits.shape, dtype=torch.float32)]  # the root's, never read
    for level, width in enumerate(branching, start=1):
        begin, end, after = levels.starts[level - 1], levels.starts[level], levels.starts[level + 1]
        paths = Paths(view.history, view.lengths, tree, start=begin)
        if view.warp.greedy:
            tokens, exist = likeliest(view.warp.scores(logits, paths), width)
        else:
            index = first + torch.arange(end, after, device=device).view(1, end - begin, width).expand(rows, -1, -1)
            drawn = draw(proper(view.warp.law(logits, paths)), view.noise.uniform(Stream.DRAFT, index))
            tokens, exist = drawn.tokens, drawn.exist
            laws.append(drawn.laws.flatten(1, 2))
        exist = exist & (allowed >= level) & tree.valid[:, begin:, None]
        above = torch.tensor(levels.parents(level), device=device).expand(rows, -1)
        parents = torch.where(exist.flatten(1), above, PAD)
        tree = TokenTree(
            torch.cat([tree.tokens, tokens.flatten(1)], 1), torch.cat([tree.parents, parents], 1), depth=level
        )
        if level < len(branching):
            logits = reader.read_level(view, tree, end)
    return Expanded(tree, None if view.warp.greedy else torch.cat(laws, 1))
