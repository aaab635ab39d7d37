"""The best trees by acceptance: against all trees there are, and the paper's own numbers."""

import math
import time
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from foredraft.core.errors import OptionError
from foredraft.core.tree_optimizer import OptimalTrees, Path, best_size, expected_tokens
from foredraft.drafters.trees.shapes import Template

KNOWN = (0.6, 0.15, 0.07, 0.04)
VECTORS = [
    KNOWN,
    (0.9,),
    (0.3, 0.3, 0.3),
    (0.1, 0.5, 0.2),  # the second child is the better one
    (0.5, 0.0, 0.4),  # the way to the third leads past a useless one
    (0.0, 0.0),
]


@cache
def forests(nodes: int) -> tuple[tuple, ...]:
    """All ordered forests of so many nodes; a tree is the tuple of its children."""
    if nodes == 0:
        return ((),)
    return tuple(
        (first, *rest) for size in range(1, nodes + 1) for first in forests(size - 1) for rest in forests(nodes - size)
    )


def paths(forest: tuple, above: Path = ()) -> Iterator[Path]:
    for rank, children in enumerate(forest):
        yield (*above, rank)
        yield from paths(children, (*above, rank))


@cache
def trees(nodes: int) -> list[list[Path]]:
    """All trees of so many drafted nodes."""
    return [list(paths(forest)) for forest in forests(nodes)]


@pytest.mark.parametrize("acceptance", VECTORS)
def test_the_best_tree_is_the_best_of_all(acceptance: tuple[float, ...]):
    shapes = OptimalTrees.of(acceptance, nodes=7, depth=7)
    for nodes in range(1, 8):
        assert len(trees(nodes)) == math.comb(2 * nodes, nodes) // (nodes + 1)
        for depth in range(1, 8):
            fitting = [
                tree
                for size in range(1, nodes + 1)
                for tree in trees(size)
                if all(len(path) <= depth and max(path) < len(acceptance) for path in tree)
            ]
            best = max(expected_tokens(tree, acceptance) for tree in fitting)
            found = shapes.paths(nodes, depth)
            assert shapes.expected(nodes, depth) == pytest.approx(max(best, 1.0), abs=1e-12)
            assert expected_tokens(found, acceptance) == pytest.approx(shapes.expected(nodes, depth), abs=1e-12)
            assert len(found) <= nodes and all(len(path) <= depth for path in found)


def test_the_published_search_finds_the_same_worth():
    """24 nodes with the root, 4 to 8 levels with the root's: what the public tree search gives."""
    shapes = OptimalTrees.of(KNOWN, 23, 7)
    assert [round(shapes.expected(23, depth), 3) for depth in range(3, 8)] == [3.065, 3.245, 3.299, 3.321, 3.324]


def test_more_nodes_and_levels_are_never_worse():
    for acceptance in VECTORS:
        shapes = OptimalTrees.of(acceptance, 40, 6)
        worth = torch.tensor([[shapes.expected(n, d) for n in range(1, 41)] for d in range(1, 7)])
        assert (worth.diff(dim=0) >= -1e-12).all() and (worth.diff(dim=1) >= -1e-12).all()


def test_parents_and_elders_stand_in_the_tree():
    Template(OptimalTrees.of(KNOWN, 40, 6).paths(40, 6))  # it refuses anything else
    assert OptimalTrees.of((0.8,), 5, 9).paths(5, 9) == ((0,), (0, 0), (0, 0, 0), (0,) * 4, (0,) * 5)
    assert OptimalTrees.of((0.4, 0.3), 6, 1).paths(6, 1) == ((0,), (1,)), (
        "there are no more children than were measured"
    )


def test_a_tree_of_64_nodes_is_found_at_once():
    OptimalTrees.of(KNOWN, 8, 2)
    started = time.perf_counter()
    OptimalTrees.of((0.5, *[0.03] * 15), 63, 10).paths(63, 10)
    assert time.perf_counter() - started < 1.0


def flat(seconds: float, each: float = 0.0):
    return lambda nodes: seconds + each * nodes


def test_the_size_with_the_most_tokens_a_second_is_taken():
    shapes = OptimalTrees.of(KNOWN, 31, 8)
    sizes, depths = range(1, 32), range(1, 9)
    found = best_size(shapes, sizes, depths, flat(0.05, 0.001), flat(1.0, 0.02))

    def rate(nodes: int, depth: int) -> float:
        tree = shapes.paths(nodes, depth)
        inner = {path[:-1] for path in tree}
        draft = sum(0.05 + 0.001 * sum(len(p) == level for p in inner) for level in {len(p) for p in inner})
        return expected_tokens(tree, KNOWN) / (draft + 1.0 + 0.02 * (1 + nodes))

    assert found.rate == pytest.approx(max(rate(n, d) for n in sizes for d in depths))
    assert found.rate == pytest.approx(rate(found.nodes, found.depth))


def test_cheaper_forwards_make_larger_trees():
    shapes = OptimalTrees.of(KNOWN, 63, 10)
    sizes, depths = range(1, 64), range(1, 11)
    by_row = [best_size(shapes, sizes, depths, flat(0.05), flat(1.0, each)) for each in (0.5, 0.1, 0.02, 0.0)]
    by_draft = [best_size(shapes, sizes, depths, flat(cost), flat(1.0, 0.02)) for cost in (1.0, 0.3, 0.05, 0.0)]
    nodes, levels = [size.nodes for size in by_row], [size.depth for size in by_draft]
    assert nodes == sorted(nodes) and nodes[0] <= 2 and nodes[-1] == 63
    assert levels == sorted(levels) and levels[0] == 1 and levels[-1] > 4


@pytest.mark.parametrize("acceptance", [(), (0.7, 0.4), (-0.1,), (1.2,), (float("nan"),)])
def test_what_is_no_acceptance_is_refused(acceptance: tuple[float, ...]):
    with pytest.raises(OptionError, match="sum to 1 or less"):
        OptimalTrees.of(acceptance, 3, 3)


@pytest.mark.parametrize(("nodes", "depth"), [(0, 3), (3, 0)])
def test_no_tree_of_nothing(nodes: int, depth: int):
    with pytest.raises(OptionError, match="at least one node and one level"):
        OptimalTrees.of(KNOWN, nodes, depth)
