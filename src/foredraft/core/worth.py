"""What the nodes of a draft are worth, and how many of them a step verifies.

A node's value is the probability that the target accepts the whole path to it. A forward of n nodes takes time in which
the loop would have generated ``price(n)`` tokens otherwise, so a step keeps the n most valuable nodes with the largest
sum of values minus price. With the rate reached so far as the exchange rate between seconds and tokens this maximises
tokens per second (Dinkelbach 1967); the ratio of a single step would not.

Any node may be dropped for any reason, values of tokens included, because drafts are compared with the target's own
token: they never change it. Drawn drafts of the ratio rules are never cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import exp, log
from typing import NamedTuple

LIKELY, UNLIKELY = 0.98, 0.002
"""Bounds of a draft's probability as a feature."""


class Features(NamedTuple):
    """Of a drafted node: 1, the log-odds of its token under the draft, the logarithm of its depth, and how often the
    row's latest drafts were accepted, around 0."""

    one: float
    odds: float
    depth: float
    recent: float


class DraftNodes(NamedTuple):
    """The drafted nodes of one row on the host, root included. ``scores``: see ``Draft``; None without."""

    parents: Sequence[int]
    scores: Sequence[float] | None


@dataclass(frozen=True, slots=True)
class Worth:
    """Values of nodes, and the price of a forward in tokens of the batch.

    ``weights``: of ``Features``, for the log-odds that a child of an accepted node is accepted. ``unscored``: the
    probability of a drafter's tokens that come without scores. ``recent``: of each row. ``prices``: by the number of
    nodes of the forward, root included, rising; sizes that are not listed are not used.
    """

    weights: Features
    unscored: float
    recent: tuple[float, ...]
    prices: Mapping[int, float] = field(hash=False)

    def features(self, row: int, nodes: DraftNodes, node: int, depth: int) -> Features:
        """Of a drafted node at this depth."""
        return Features(1.0, self._odds(nodes, node), log(depth), self.recent[row] - 0.5)

    def values(self, row: int, nodes: DraftNodes) -> list[float]:
        """The probability that the whole path to each node is accepted: 1 for the root, 0 for padding."""
        one, odds, depth, recent = self.weights
        base = one + recent * (self.recent[row] - 0.5)
        depths, found = [0], [1.0]
        for node, parent in enumerate(nodes.parents[1:], start=1):
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
            if not depths[node]:
                found.append(0.0)
                continue
            x = base + odds * self._odds(nodes, node) + depth * log(depths[node])
            found.append(found[parent] / (1 + exp(-x)))
        return found

    def keep(self, rows: Sequence[DraftNodes]) -> list[list[int]]:
        """The nodes of each row that the step verifies, root first, in rising order: the most valuable ones, as many
        for each row as pay in a forward of all rows."""
        values = [self.values(number, row) for number, row in enumerate(rows)]
        order = [sorted(range(len(each)), key=each.__getitem__, reverse=True) for each in values]  # parents first
        sums = [[*accumulate([each[node] for node in best])] for each, best in zip(values, order, strict=True)]
        size, most, gain = 1, max(map(len, order)), float(len(rows))
        for wider, price in self.prices.items():
            brings = sum([each[min(wider, len(each)) - 1] for each in sums]) - price
            if brings > gain:
                size, gain = wider, brings
            if wider >= most:
                break
        return [
            sorted([node for node in best[:size] if each[node] > 0]) for each, best in zip(values, order, strict=True)
        ]

    def _odds(self, nodes: DraftNodes, node: int) -> float:
        """The log-odds of a node's token after its parent under the draft, as a feature."""
        scores = nodes.scores
        chance = self.unscored if scores is None else exp(min(scores[node] - scores[nodes.parents[node]], 0.0))
        chance = min(max(chance, UNLIKELY), LIKELY)
        return log(chance / (1 - chance))
