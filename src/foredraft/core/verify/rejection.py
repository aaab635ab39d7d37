"""Rejection of siblings one after another, at all nodes of a tree: what recursive and traversal verification share."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.tree import TokenTree


class Residuals(NamedTuple):
    """The result of ``reject_children``.

    ``rows``: the row numbers. ``chance[b, i]``: the acceptance probability of node i after the rejection of its earlier
    siblings; 0 at the root and at padding. ``laws``: the measures left during the test, by place (S = 1 + 2G).
    ``last``: the place of what is left at each node after the rejection of all its children.
    """

    rows: Int[Tensor, "B"]
    chance: Float[Tensor, "B N"]
    laws: Float[Tensor, "S B V"]
    last: Int[Tensor, "B N"]

    def mass(self) -> Float[Tensor, "B N"]:
        """The sum of what is left at each node."""
        return self.laws[self.last, self.rows[:, None]].sum(-1)

    def law(self, node: Int[Tensor, "B"], p: Float[Tensor, "B N V"]) -> Float[Tensor, "B V"]:
        """What is left at one node per row, not normalised; p if nothing is left.

        Then p = q up to rounding, and the rejection had probability ~0.
        """
        left = self.laws[self.last.gather(1, node[:, None])[:, 0], self.rows]
        return torch.where(left.sum(-1, keepdim=True) > 0, left, p[self.rows, node])


def reject_children(
    p: Float[Tensor, "B N V"], q: Float[Tensor, "B N V"], tree: TokenTree, *, nested: bool
) -> Residuals:
    """The laws left at every node as its children are rejected in draw order, and each child's acceptance probability.

    A node starts with the measure R = a p, where a is its own acceptance probability if ``nested``, else 1. Its child x
    is accepted with min(1, R(x) / q(x)); its rejection leaves R <- (R - q)+ / (1 - sum min(R, q)). No state depends on
    random numbers, so all nodes of a turn are processed together: each one's predecessor (its previous sibling or its
    parent) has the turn before. A node whose q is NaN or 0 is rejected and leaves R as it is; q was invalid before the
    token was drawn, so this does not depend on the drawn value.
    """
    places = _Places.of(tree)
    (rows, size), count = tree.parents.shape, places.nodes.shape[0]
    row = torch.arange(rows, device=p.device)
    laws = p.new_empty(1 + 2 * count, rows, p.shape[2])
    flat = laws.flatten(0, 1)
    start, rest = laws[1 : 1 + count], laws[1 + count :]  # of each node: its own measure; q, then what is left of R
    nodes = (places.nodes + row * size).flatten()
    laws[0] = p[:, 0]
    torch.index_select(p.flatten(0, 1), 0, nodes, out=start.flatten(0, 1))
    torch.index_select(q.flatten(0, 1).to(p.dtype), 0, nodes, out=rest.flatten(0, 1))
    rest.masked_fill_(~(rest.sum(-1, keepdim=True) > 0), 0.0)
    sources = (places.sources * rows + row).flatten()
    token = tree.tokens.gather(1, places.nodes.T).T[..., None]
    known = token.clamp(0, p.shape[2] - 1)
    drawn = rest.gather(2, known)
    drawn = torch.where((drawn > 0) & (known == token), drawn, torch.inf)
    chances, end = [p.new_zeros(1, rows, 1)], 0
    for width in places.sizes:
        begin, end = end, end + width
        before = flat.index_select(0, sources[begin * rows : end * rows]).view(width, rows, p.shape[2])
        own = rest[begin:end]
        overlap = torch.minimum(before, own)
        chances.append(overlap.gather(2, known[begin:end]) / drawn[begin:end])
        if nested:
            start[begin:end].mul_(chances[-1])
        left = (1.0 - overlap.sum(-1, keepdim=True)).clamp_(min=torch.finfo(p.dtype).tiny)
        torch.div(before.sub_(overlap), left, out=own)
    chance = torch.cat(chances)[..., 0].T.gather(1, places.of_nodes)
    return Residuals(row, chance, laws, places.last)


class _Places(NamedTuple):
    """The nodes sorted by turn: G places with the same turns in every row, some of them empty.

    ``sizes``: the number of places of each turn, on the host. ``nodes``: the node at each place (any node if empty).
    ``of_nodes``: the place of each node, from 1; 0 for the root and padding. ``sources`` and ``last`` are places in
    ``Residuals.laws``: what is left when the node is tested, and after the last of its children.
    """

    sizes: tuple[int, ...]
    nodes: Int[Tensor, "G B"]
    of_nodes: Int[Tensor, "B N"]
    sources: Int[Tensor, "G B"]
    last: Int[Tensor, "B N"]

    @classmethod
    def of(cls, tree: TokenTree) -> "_Places":
        nodes = _by_turn(tree)
        sizes = _sizes(tree)
        count = nodes.shape[1]
        rows, size = tree.parents.shape
        of_nodes = nodes.new_zeros(rows, size + 1)  # the last column takes empty places
        of_nodes = of_nodes.scatter_(1, nodes, torch.arange(1, count + 1, device=nodes.device).expand(rows, -1))
        # turns that are too small leave nodes without a place: such a row is verified as if nothing had been drafted
        covered = ((of_nodes[:, :size] > 0) | (tree.parents < 0)).all(1, keepdim=True)
        of_nodes = of_nodes[:, :size] * covered
        index = torch.arange(size, device=nodes.device)
        # previous siblings and last children; 0 if there is none
        children = tree.parents[:, None] == index[:, None]
        youngest = torch.where(torch.stack([tree.elders, children], 1), index, 0).amax(-1)
        before = torch.stack([tree.parents.clamp(min=0), index.expand(rows, -1)], 1)
        found = (youngest > 0) & covered[..., None]
        places = of_nodes.gather(1, torch.where(found, youngest, before).flatten(1)).view(rows, 2, size)
        places = places + found * count
        nodes = nodes.clamp(max=size - 1)
        return cls(sizes, nodes.T, of_nodes, places[:, 0].gather(1, nodes).T, places[:, 1])


def _sizes(tree: TokenTree) -> tuple[int, ...]:
    """Places by turn; without known turns, one for each node."""
    return tree.turns or (1,) * (tree.parents.shape[1] - 1)


def _by_turn(tree: TokenTree) -> Int[Tensor, "B G"]:
    """The node at each place, N at empty places."""
    rows, size = tree.parents.shape
    index = torch.arange(size, device=tree.parents.device).expand(rows, -1)
    if not tree.turns:
        return torch.where(tree.valid, index, size)[:, 1:]
    turn, sizes = tree.turn, _sizes(tree)
    width, last = max(sizes), (1 + len(sizes)) * max(sizes)
    among = (turn[:, :, None] == turn[:, None]).tril(-1).sum(-1)  # earlier nodes of the same turn
    column = torch.where(tree.valid, turn * width + among, last).clamp(max=last)
    table = torch.full((rows, last + 1), size, device=turn.device).scatter_(1, column, index)
    return torch.cat([table[:, i * width : i * width + n] for i, n in enumerate(sizes, start=1)], 1)
