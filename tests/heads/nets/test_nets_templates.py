"""Static trees: the published ones, the best one for measured heads, and what is not a tree."""

import random
from itertools import combinations, product
from math import prod

import pytest
import torch

from foredraft.core.errors import OptionError
from foredraft.drafters.common.level_heads import Options
from foredraft.drafters.trees.shapes import NAMED, Level, Path, Template, best_template

COUNTS = {"eagle": (4, 8, 8, 3, 2), "medusa": (10, 28, 23, 2)}


@pytest.mark.parametrize("name", NAMED)
def test_published_trees(name: str):
    template = Template.of(name)
    levels = Level.all_of(template, torch.device("cpu"))
    assert tuple(len(level.ranks) for level in levels) == COUNTS[name]
    assert template.nodes == len(set(NAMED[name])) == sum(COUNTS[name]) == {"eagle": 25, "medusa": 63}[name]


@pytest.mark.parametrize("name", [*NAMED, "4x2x1", "1", "1x1x1x1", "2x3"])
def test_numbers_go_level_by_level_and_parents_stand_first(name: str):
    template = Template.of(name)
    paths: list[Path] = [(), *template.paths]
    assert sorted(paths, key=len) == paths
    for node, parent in enumerate(template.parents, start=1):
        assert parent < node and paths[node][:-1] == paths[parent]


@pytest.mark.parametrize("name", [*NAMED, "4x2x1", "1", "1x1x1x1", "2x3"])
def test_levels_say_where_the_parent_of_each_node_is(name: str):
    template = Template.of(name)
    paths: list[Path] = [(), *template.paths]
    above, families = [0], [0]  # the nodes of the level above, and those of them that have children
    for level in Level.all_of(template, torch.device("cpu")):
        nodes = list(range(above[-1] + 1, above[-1] + 1 + len(level.ranks)))
        inner = [node for node in nodes if node in template.parents]
        parents = [template.parents[node - 1] for node in nodes]
        ranks = [paths[node][-1] for node in nodes]
        assert level.parents.tolist() == [above[i] for i in level.above] == parents
        assert [families[i] for i in level.places] == parents
        assert level.ranks.tolist() == level.earlier.sum(1).tolist() == ranks and level.width == 1 + max(ranks)
        assert torch.equal(level.chosen, level.places * level.width + level.ranks)
        assert [nodes[i] for i in level.inner] == inner
        assert [families[i] for i in level.inner_places] == [template.parents[node - 1] for node in inner]
        above, families = nodes, inner
    assert above[-1] == template.nodes


def test_children_by_level():
    template = Template.of("3x2")
    assert template.paths == tuple(product(range(3))) + tuple(product(range(3), range(2)))
    assert (template.nodes, template.depth, template.parents) == (9, 2, (0, 0, 0, 1, 1, 2, 2, 3, 3))


@pytest.mark.parametrize("text", ["", "x", "4x", "0x2", "2x-1", "eagel", "2*2", "measured", "1.5x2"])
def test_what_is_no_shape_is_refused_with_the_names_that_are(text: str):
    with pytest.raises(OptionError, match=r"Unknown tree .* eagle, medusa, or children by level, such as 4x2x1"):
        Template.of(text)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ((), "parent"),
        (((0,), (1, 0)), "parent of every node; that of \\(1, 0\\) is missing"),
        (((0, 0),), "parent of every node; that of \\(0, 0\\) is missing"),
        (((1,),), "best children first; the better sibling of \\(1,\\) is missing"),
        (((0,), (0, 0), (0, 2)), "best children first; the better sibling of \\(0, 2\\) is missing"),
        (((0,), ()), "parent"),
    ],
)
def test_what_is_no_tree_is_refused(paths: tuple[Path, ...], message: str):
    with pytest.raises(OptionError, match=message):
        Template(paths)


def test_the_order_in_which_nodes_are_listed_does_not_matter():
    shuffled = list(NAMED["medusa"])
    random.Random(1).shuffle(shuffled)
    assert Template(tuple(shuffled)) == Template.of("medusa")
    assert Template(((0,), (0,), (1,))).nodes == 2


def expected_tokens(paths: tuple[Path, ...], rates: list[list[float]]) -> float:
    """Of a tree, if heads are right independently: each path counts as often as all its tokens are right."""
    return sum(prod(rates[i][rank] for i, rank in enumerate(path)) for path in paths)


def all_trees(rates: list[list[float]], nodes: int) -> list[tuple[Path, ...]]:
    shapes = [range(len(ranks)) for ranks in rates]
    paths = [path for depth in range(1, len(rates) + 1) for path in product(*shapes[:depth])]
    trees = []
    for chosen in combinations(paths, nodes):
        known = {(), *chosen}
        if all(path[:-1] in known for path in chosen):
            trees.append(chosen)
    return trees


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("widths", [(3,), (2, 2, 2), (3, 3), (1, 2, 2)])
def test_the_best_tree_is_the_best_of_all(seed: int, widths: tuple[int, ...]):
    source = random.Random(seed)
    rates = [sorted((source.random() / width for _ in range(width)), reverse=True) for width in widths]
    for nodes in range(1, 6):
        trees = all_trees(rates, nodes)
        template = best_template(rates, nodes)
        if not trees:  # fewer nodes than were asked for: all that there are
            assert template.nodes < nodes
            continue
        assert template.nodes == nodes
        best = max(expected_tokens(tree, rates) for tree in trees)
        assert expected_tokens(template.paths, rates) == pytest.approx(best)


def test_the_best_tree_with_rates_that_are_equal_or_naught():
    for rates in ([[0.5, 0.5], [1.0, 0.0]], [[1.0], [1.0], [1.0]], [[0.0, 0.0], [0.0]]):
        for nodes in range(1, 5):
            paths = best_template(rates, nodes).paths
            trees = all_trees(rates, len(paths))
            assert expected_tokens(paths, rates) == max(expected_tokens(tree, rates) for tree in trees)


def test_a_tree_is_no_deeper_than_there_are_heads():
    rates = [[0.6, 0.2], [0.5, 0.2], [0.4, 0.1]]
    for heads in (1, 2, 3):
        for tree in ("measured", "medusa", "eagle", "2x2x2x2"):
            for accuracies in (rates, None):
                template = Options(tree, 7).template(accuracies, heads)
                assert template.depth <= heads
                if tree == "measured":
                    assert template.nodes <= 7
    assert Options("measured", 7).template(rates, 3) == best_template(rates, 7)


def test_every_beginning_of_the_published_tree_is_a_tree():
    """It stands in for a measured one, best nodes first."""
    for nodes in range(1, 64):
        assert Options("measured", nodes).template(None, 4).paths == Template(NAMED["medusa"][:nodes]).paths
