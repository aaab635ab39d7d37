"""Trees of tokens against slow, plain readings of what they mean."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from foredraft.core.transfer import to_device
from foredraft.core.tree import PAD, ROOT, TokenTree, merge_paths
from foredraft.drafters.trees.shapes import Level, Template
from foredraft.model.kv.masks import Layout, address


def test_chain() -> None:
    tree = TokenTree.chain(torch.tensor([[5, 6, 7], [8, 9, 0]]))
    assert tree.parents.tolist() == [[-1, 0, 1], [-1, 0, 1]]
    assert (tree.depth, tree.linear) == (2, True)
    assert bool(tree.valid.all())


def test_chain_of_ragged_rows() -> None:
    tree = TokenTree.chain(torch.tensor([[5, 6, 7], [8, 9, 0], [1, 2, 3]]), torch.tensor([3, 2, 1]))
    assert tree.parents.tolist() == [[-1, 0, 1], [-1, 0, PAD], [-1, PAD, PAD]]
    assert tree.valid.sum(1).tolist() == [3, 2, 1]


def test_root_is_a_tree_without_drafts() -> None:
    tree = TokenTree.root(torch.tensor([5, 8]))
    assert tree.tokens.tolist() == [[5], [8]] and tree.parents.tolist() == [[ROOT], [ROOT]]
    assert tree.depth == 0


def test_only_keeps_the_chosen_rows() -> None:
    tree = TokenTree(torch.zeros(2, 4).long(), torch.tensor([[-1, 0, 0, 2], [-1, 0, PAD, 1]]), depth=2)
    kept = tree.only(torch.tensor([False, True]))
    assert kept.parents.tolist() == [[-1, PAD, PAD, PAD], [-1, 0, PAD, 1]]
    assert kept.depth == 2 and tree.parents[0].tolist() == [-1, 0, 0, 2]


@st.composite
def parent_lists(draw: st.DrawFn) -> list[int]:
    parents = [ROOT]
    for i in range(1, draw(st.integers(1, 20))):
        real = [j for j in range(i) if parents[j] != PAD]
        parents.append(draw(st.sampled_from([i - 1 if i - 1 in real else 0, *real, PAD])))
    return parents


def _path(parents: list[int], node: int) -> set[int]:
    """The nodes from ``node`` up to the root; padding stands alone."""
    path = {node}
    while parents[node] >= 0:
        node = parents[node]
        path.add(node)
    return path


def _turn(parents: list[int], node: int) -> int:
    """Steps from the root, each to a first child or to the next sibling."""
    if parents[node] < 0:
        return 0
    elders = [i for i in range(node) if parents[i] == parents[node]]
    return 1 + _turn(parents, elders[-1] if elders else parents[node])


@given(parent_lists())
@settings(max_examples=100, deadline=None)
def test_paths_depths_and_turns(parents: list[int]) -> None:
    nodes = range(len(parents))
    expected = [len(_path(parents, node)) - 1 for node in nodes]
    tree = TokenTree(torch.zeros(1, len(parents)).long(), torch.tensor([parents]), depth=max(expected))
    read = replace(tree)
    read.read()
    for made in (tree, read):
        for node in nodes:
            assert {j for j in nodes if made.on_path[0, node, j]} == _path(parents, node)
        assert made.depths.tolist() == [expected] and made.on_path.dtype == torch.bool
    turns = [_turn(parents, node) for node in nodes]
    assert tree.depths.tolist() == [expected] and tree.turn.tolist() == [turns]
    drafted = [turn for turn, parent in zip(turns, parents, strict=True) if parent >= 0]
    assert tree.turns is None
    assert tree.counted().turns == tuple(drafted.count(turn) for turn in range(1, max(drafted, default=0) + 1))


def test_turns_bound_all_rows() -> None:
    parents = torch.tensor([[-1, 0, 0, 0], [-1, 0, 1, 0], [-1, PAD, PAD, PAD]])
    assert TokenTree(torch.zeros_like(parents), parents, depth=2).counted().turns == (1, 2, 1)


@pytest.mark.parametrize("name", ["eagle", "medusa", "4x2x1", "3"])
def test_turns_of_a_template(name: str) -> None:
    """A drafter knows them without reading its tree."""
    template = Template.of(name)
    parents = torch.tensor([[-1, *template.parents]])
    levels = Level.all_of(template, torch.device("cpu"))
    tree = TokenTree(torch.zeros_like(parents), parents, depth=template.depth)
    assert [turn for level in levels for turn in level.turns] == tree.turn[0, 1:].tolist()


def test_paths_of_a_long_chain() -> None:
    for nodes in (1, 2, 3, 64, 65, 130):
        chain = TokenTree.chain(torch.zeros(1, nodes).long())
        for tree in (chain, replace(chain, linear=False)):
            assert torch.equal(tree.on_path[0], torch.ones(nodes, nodes).tril().bool())
            assert tree.depths.tolist() == [list(range(nodes))]


def test_a_path_deeper_than_claimed_is_seen() -> None:
    for nodes in range(3, 20):
        for depth in range(nodes - 1):
            tree = TokenTree(torch.zeros(1, nodes).long(), torch.arange(-1, nodes - 1)[None], depth=depth)
            assert int(tree.depths.amax()) > depth


@st.composite
def continuations(draw: st.DrawFn) -> tuple[list[list[list[int]]], list[list[int]], int | None]:
    """paths [B][K][D] of few tokens, so that prefixes meet; lengths [B][K]; a budget or none."""
    rows, count, depth = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    path = st.lists(st.integers(0, 2), min_size=depth, max_size=depth)
    paths = draw(st.lists(st.lists(path, min_size=count, max_size=count), min_size=rows, max_size=rows))
    length = st.lists(st.integers(0, depth), min_size=count, max_size=count)
    lengths = draw(st.lists(length, min_size=rows, max_size=rows))
    return paths, lengths, draw(st.none() | st.integers(0, count * depth + 2))


def _trie(paths: list[list[int]], lengths: list[int], budget: int | None) -> dict[tuple[int, ...], int]:
    """Every prefix and its node, numbered as they come; the last ones go where there is a budget."""
    nodes: dict[tuple[int, ...], int] = {(): 0}
    for path, length in zip(paths, lengths, strict=True):
        for end in range(1, length + 1):
            nodes.setdefault(tuple(path[:end]), len(nodes))
    return {prefix: i for prefix, i in nodes.items() if budget is None or i <= budget}


@given(continuations())
@settings(max_examples=200, deadline=None)
def test_merged_paths_are_a_trie(case: tuple[list[list[list[int]]], list[list[int]], int | None]) -> None:
    paths, lengths, budget = case
    roots = torch.arange(len(paths)) + 7
    tree = merge_paths(roots, torch.tensor(paths), torch.tensor(lengths), budget).tree
    size = 1 + len(paths[0]) * len(paths[0][0])
    assert tree.tokens.shape[1] == (size if budget is None else min(size, budget + 1))
    assert tree.depth == len(paths[0][0])
    assert tree.linear == (len(paths[0]) == 1)
    for b in range(len(paths)):
        nodes = _trie(paths[b], lengths[b], budget)
        parents = [PAD] * tree.tokens.shape[1]
        for prefix, node in nodes.items():
            parents[node] = nodes[prefix[:-1]] if prefix else ROOT
            assert tree.tokens[b, node] == (prefix[-1] if prefix else roots[b])
        assert tree.parents[b].tolist() == parents


@pytest.mark.parametrize(
    "values", [[], [3], (1, 2), range(4), [[1, 2], [3, 4]], [range(2), range(1, 3)], [[], []], [(True, 7)]]
)
def test_numbers_on_the_host_are_those_of_torch(values: Any) -> None:
    expected = torch.tensor([list(row) if not isinstance(row, int) else row for row in values], dtype=torch.long)
    found = to_device(values, torch.device("cpu"))
    assert found.dtype == torch.long and found.shape == expected.shape and torch.equal(found, expected)


def test_chains_are_known_by_their_parents() -> None:
    """A tree with one child below each node, with padding at the ends of rows; not one with siblings in any row."""
    chain, fork = [-1, 0, 1, PAD], [-1, 0, 0, PAD]
    for parents, linear in (([chain], True), ([chain, [-1, 0, 1, 2]], True), ([fork], False), ([chain, fork], False)):
        tree = TokenTree.on_host([[5] * 4] * len(parents), parents, depth=3)
        assert tree.as_chain().linear == linear and not tree.linear
        assert tree.used == (4 if [-1, 0, 1, 2] in parents else 3)
        assert tree.as_chain().parents.tolist() == tree.lists[1] == parents


@given(parent_lists(), st.sampled_from([None, 3]))
@settings(max_examples=50, deadline=None)
def test_trees_read_on_the_host_have_the_same_addresses(parents: list[int], window: int | None) -> None:
    """Also chains, and forwards that begin behind the root."""
    layout, bases = Layout({"full": None, "windowed": window or 2}, by_type=True), torch.tensor([7, 30])
    for linear in {False, parents == [*range(-1, len(parents) - 1)]}:
        tree = TokenTree(torch.zeros(2, len(parents)).long(), torch.tensor([parents] * 2), len(parents) - 1, linear)
        read = replace(tree)
        read.read()
        for start in {0, len(parents) // 2}:
            steps = [address(each, bases, (0, 1), 99, layout, max_position=80, start=start) for each in (tree, read)]
            for one, other in ((getattr(each, name) for each in steps) for name in ("tokens", "positions", "slots")):
                assert torch.equal(one, other)
            for kind in layout.kinds:
                one, other = (each.visible[kind].mask(128, torch.float32) for each in steps)
                assert torch.equal(one, other)
