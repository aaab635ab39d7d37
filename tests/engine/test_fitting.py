"""A draft is fitted to its plan and to the node counts of forwards: what is left of it, against a slow reading."""

import itertools
import random

import pytest
import torch

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Plan
from foredraft.core.tree import PAD, ROOT, TokenTree
from foredraft.core.worth import Features, Worth
from foredraft.engine.fitting import SIZES, fitted

FLAT = Worth(Features(0.0, 1.0, 0.0, 0.0), 0.5, (0.5,) * 3, {1: 0.0})
"""The odds of a node are the draft's."""


def drawn(source: random.Random, nodes: int, *, chain: bool, scored: bool) -> Draft:
    """A draft of three rows, with padding at some ends."""
    parents = []
    for _ in range(3):
        row = [ROOT, *(node - 1 if chain else source.randrange(node) for node in range(1, nodes))]
        end = source.randint(1, nodes)
        parents.append(row[:end] + [PAD] * (nodes - end))
    tokens = torch.tensor([source.sample(range(50), nodes) for _ in range(3)])
    scores = torch.zeros(3, nodes)
    for row, node in itertools.product(range(3), range(1, nodes)):
        scores[row, node] = scores[row, max(parents[row][node], 0)] - 2 * source.random()
    tree = TokenTree(tokens, torch.tensor(parents), depth=nodes - 1, linear=chain)
    return Draft(tree, Law.FIXED, scores=scores if scored else None)


def paths(draft: Draft, row: int) -> dict[tuple[int, ...], float | None]:
    """The texts of a row's nodes, root included, with their scores."""
    tokens, parents = (each[row] for each in draft.tree.lists)
    texts = {0: (tokens[0],)}
    found: dict[tuple[int, ...], float | None] = {texts[0]: None}
    for node in (node for node in range(1, len(tokens)) if parents[node] != PAD):
        texts[node] = (*texts[parents[node]], tokens[node])
        found[texts[node]] = None if draft.scores is None else float(draft.scores[row, node])
    return found


@pytest.mark.parametrize("seed", range(12))
def test_rows_with_a_plan_keep_their_nodes_in_a_node_count_of_forwards(seed: int):
    source = random.Random(seed)
    for nodes, chain, scored in itertools.product((1, 2, 5, 9), (True, False), (True, False)):
        draft = drawn(source, nodes, chain=chain, scored=scored)
        plan = Plan(tuple(source.choice((0, nodes)) for _ in range(3)))
        whole = [
            paths(draft, row) if length else {(draft.tree.lists[0][row][0],): None}
            for row, length in enumerate(plan.lengths)
        ]
        wide = fitted(draft, plan, any_width=True)
        padded = fitted(draft, plan, any_width=False)
        exact = fitted(draft, plan, any_width=False, exact=24)
        recorded = fitted(draft, plan, any_width=False, recorded=True)
        for found in (wide, padded, exact, recorded):
            assert [paths(found, row) for row in range(3)] == whole
        used = max(i for row in wide.tree.lists[1] for i, parent in enumerate(row, 1) if parent != PAD)
        assert wide.tree.tokens.shape[1] == used and padded.tree.tokens.shape[1] == next(s for s in SIZES if s >= used)
        assert exact.tree.tokens.shape[1] == 24
        chains = all(parent in (PAD, node - 1) for row in wide.tree.lists[1] for node, parent in enumerate(row))
        assert wide.tree.linear == (chain or (chains and nodes > 1))
        assert not recorded.tree.linear or recorded.tree.depth == recorded.tree.tokens.shape[1] - 1


@pytest.mark.parametrize("seed", range(6))
def test_the_most_valuable_nodes_are_left_with_their_scores(seed: int):
    source = random.Random(seed)
    for chain, most in itertools.product((True, False), (1, 2, 4, 7)):
        draft = drawn(source, 9, chain=chain, scored=True)
        plan = Plan((9,) * 3, worth=worth(most))
        found = fitted(draft, plan, any_width=True)
        for row in range(3):
            every, left = paths(draft, row), paths(found, row)
            assert left.keys() <= every.keys() and len(left) == min(most, len(every))
            assert all(every[text] == pytest.approx(score) for text, score in left.items() if most > 1)
        assert found.tree.tokens.shape[1] <= most


def worth(most: int) -> Worth:
    """Nothing has a price, but no more nodes than these are verified."""
    return Worth(FLAT.weights, FLAT.unscored, FLAT.recent, {1: 0.0, most: 0.0})
