"""The law over a target's tokens that a draft in other tokens has: string-level rejection sampling (SLRS).

Timor et al. (arXiv:2502.05202): psi(t) is the probability of all sequences of draft tokens whose text, read by the
target's tokenizer, begins with t. Their number grows exponentially, so here the likeliest sequences stand for all.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

_LEAST = 1e-9
"""Sequences that are less probable are left out."""


@dataclass(slots=True)
class TokenTrie:
    """Texts in the target's tokens. ``weight``: the probability of the texts that begin with this node's path."""

    weight: float = 0.0
    children: dict[int, "TokenTrie"] = field(default_factory=dict)

    def add(self, tokens: Sequence[int], weight: float) -> None:
        """Add a text with its probability."""
        node = self
        node.weight += weight
        for token in tokens:
            node = node.children.setdefault(token, TokenTrie())
            node.weight += weight

    def law(self, vocab_size: int) -> Float[Tensor, "V"]:
        """psi of the next token, given that one follows. There must be a child."""
        law = torch.zeros(vocab_size)
        law[list(self.children)] = torch.tensor([child.weight for child in self.children.values()])
        return law / law.sum()


class Sequences(NamedTuple):
    """A tree of draft tokens on the host: node 0 is the root, parents come before children, which need not be whole:
    what is missing of a node's probability belongs to sequences that end there."""

    tokens: Sequence[int]
    parents: Sequence[int]
    probabilities: Sequence[float]

    def texts(self, convert: Callable[[list[int]], list[int]], length: int) -> TokenTrie:
        """The sequences in the target's tokens.

        Args:
            convert: draft tokens to tokens of the target.
            length: most tokens of a text.
        """
        own, trie = list(self.probabilities), TokenTrie()
        paths: list[list[int]] = [[]]
        for node, (token, parent) in enumerate(zip(self.tokens[1:], self.parents[1:], strict=True), start=1):
            paths.append([*paths[parent], token] if parent >= 0 else [])
            if parent >= 0:
                own[parent] -= self.probabilities[node]
        for path, weight in zip(paths, own, strict=True):
            if path and weight > _LEAST:
                trie.add(convert(path)[:length], weight)
        return trie


class PickedNode(NamedTuple):
    """``parent``: number of the parent in the tree, 0 for the root."""

    token: int
    parent: int


class _Waiting(NamedTuple):
    """A node that may be picked, the least ``cost`` first; ``number`` breaks ties."""

    cost: float
    number: int
    node: PickedNode
    trie: TokenTrie
    depth: int
    goes_on: bool


def picked(
    trie: TokenTrie,
    count: int,
    times: Callable[[int], Float[Tensor, "V"]] | None,
    *,
    confidence: float = 0.0,
    chain: bool = False,
) -> list[PickedNode]:
    """The best ``count`` nodes of a trie, parents first.

    Args:
        times: of the tokens at the position so many tokens ahead (see ``Noise.times``), by which guesses are ranked;
            None for a greedy row.
        confidence: nodes with a smaller share have no children.
        chain: without branches.
    """
    chosen: list[PickedNode] = []
    heap, pushed = [_Waiting(0.0, 0, PickedNode(-1, -1), trie, 0, True)], 1
    while heap and len(chosen) <= count:
        best = heapq.heappop(heap)
        place, children = len(chosen), best.trie.children
        chosen.append(best.node)
        if not (best.goes_on and children):
            continue
        weights = torch.tensor([child.weight for child in children.values()], dtype=torch.float64)
        follow = float(weights.sum()) / best.trie.weight  # some texts may end here
        if times is not None:
            weights = weights / times(best.depth)[list(children)].double()
        shares = (follow * weights / weights.sum()).tolist()
        ranked = sorted(zip(shares, children.items(), strict=True), key=lambda each: -each[0])
        for share, (token, child) in ranked[: 1 if chain else None]:
            cost = best.cost - math.log(max(share, _LEAST))
            node = PickedNode(token, place)
            heapq.heappush(heap, _Waiting(cost, pushed, node, child, best.depth + 1, share >= confidence))
            pushed += 1
    return chosen[1:]
