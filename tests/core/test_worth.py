"""The choice of the nodes that a step verifies: the best of all choices, by brute force."""

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from foredraft.core.worth import DraftNodes, Features, Worth

AS_DRAFTED = Features(0.0, 1.0, 0.0, 0.0)
"""Weights with which a draft's own probabilities are the values."""


def worth(prices: dict[int, float], rows: int = 1, weights: Features = AS_DRAFTED) -> Worth:
    return Worth(weights, 0.5, (0.5,) * rows, prices)


def random_nodes(chance: random.Random, count: int) -> DraftNodes:
    """A tree of ``count`` nodes, some of them padding, with random probabilities."""
    parents, scores = [-1], [0.0]
    for node in range(1, count):
        inner = [each for each in range(node) if parents[each] != -2]
        parents.append(-2 if chance.random() < 0.2 else chance.choice(inner))
        scores.append(scores[parents[node]] + math.log(chance.uniform(0.05, 0.95)) if parents[node] >= 0 else 9.0)
    return DraftNodes(parents, scores)


def closed(nodes: DraftNodes, chosen: Sequence[int]) -> bool:
    return all(nodes.parents[node] in chosen for node in chosen if node)


@pytest.mark.parametrize("seed", range(30))
def test_the_nodes_kept_have_the_largest_sum_of_values_less_the_price(seed: int):
    chance = random.Random(seed)
    rows = [random_nodes(chance, chance.randint(1, 6)) for _ in range(chance.randint(1, 2))]
    prices = {1: 0.0, 2: chance.uniform(0, 0.6), 4: chance.uniform(0.2, 1.2), 8: chance.uniform(0.5, 2.0)}
    found = worth(prices, len(rows)).keep(rows)

    def chance_of(nodes: DraftNodes, node: int) -> float:
        assert nodes.scores is not None
        return math.exp(nodes.scores[node])

    def gain(choice: Sequence[Sequence[int]]) -> float:
        size = min(size for size in prices if size >= max(map(len, choice)))
        values = (chance_of(nodes, node) for nodes, own in zip(rows, choice, strict=True) for node in own)
        return sum(values) - prices[size]

    every = [
        [
            (0, *own)
            for count in range(len(nodes.parents))
            for own in itertools.combinations([i for i, p in enumerate(nodes.parents) if p >= 0], count)
            if closed(nodes, (0, *own))
        ]
        for nodes in rows
    ]
    best = max(gain(choice) for choice in itertools.product(*every))
    assert all(
        closed(nodes, own) and own == sorted(own) and own[0] == 0 for nodes, own in zip(rows, found, strict=True)
    )
    assert gain(found) == pytest.approx(best, abs=1e-9)


def test_a_forward_without_a_price_takes_every_node_and_a_dear_one_none():
    nodes = DraftNodes([-1, 0, 0, 1, -2], [0.0, -0.5, -1.0, -2.0, 0.0])
    assert worth({1: 0.0, 2: 0.0, 4: 0.0}).keep([nodes]) == [[0, 1, 2, 3]]
    assert worth({1: 0.0, 2: 5.0, 4: 6.0}).keep([nodes]) == [[0]]


def test_values_of_tokens_without_scores_follow_the_weights():
    weights = Features(0.3, 1.0, -0.7, 2.0)
    chain = DraftNodes([-1, 0, 1], None)
    value = Worth(weights, 0.6, (0.8,), {}).values(0, chain)

    def own(depth: int) -> float:
        odds = 0.3 + math.log(0.6 / 0.4) - 0.7 * math.log(depth) + 2.0 * 0.3
        return 1 / (1 + math.exp(-odds))

    assert value == pytest.approx([1.0, own(1), own(1) * own(2)])
