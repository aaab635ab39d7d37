"""Rules with the loop's random numbers: rows are independent, nothing is read back, greedy verification."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats
from torch._subclasses.fake_tensor import FakeTensorMode

from foredraft.core.draft import Draft, Law, Target, Verdict
from foredraft.core.rng import HashedRng, Noise, RandomStream, draw
from foredraft.core.tree import PAD, TokenTree
from foredraft.core.verify import RULES, greedy, verify
from oracle import SPECS, function_of, grow, outcomes, random_table

SHAPE = torch.tensor([-1, 0, 0, 1, 1, 2, 4])
LAW_OF = {"token": Law.CHAIN, "block": Law.CHAIN, "kseq": Law.IID}


def some_batch(rule: str, rows: int, vocabulary: int = 6) -> tuple[torch.Tensor, Draft]:
    """Random laws and drafts of one shape; honest only as far as shapes and supports go."""
    source = torch.Generator().manual_seed(5)
    law = LAW_OF.get(rule, Law.WITHOUT_REPLACEMENT)
    nodes = 4 if law is Law.CHAIN else len(SHAPE)
    parents = torch.arange(-1, nodes - 1) if law is Law.CHAIN else SHAPE
    p, q = (torch.randn(rows, nodes, vocabulary, generator=source).softmax(-1) for _ in range(2))
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=source).view(rows, nodes)
    tree = TokenTree(tokens, parents.expand(rows, -1).contiguous(), depth=3, linear=law is Law.CHAIN)
    return p, Draft(tree, law, q)


def coins(rows: int, offset: int = 0) -> HashedRng:
    return HashedRng(Noise(torch.arange(rows) + offset, torch.full((rows,), 7)))


@pytest.mark.parametrize("rule", SPECS)
def test_row_alone_and_padded_in_a_batch(rule: str) -> None:
    p, draft = some_batch(rule, rows=40)
    extra = 3
    wide = TokenTree(
        torch.nn.functional.pad(draft.tree.tokens, (0, extra), value=2),
        torch.nn.functional.pad(draft.tree.parents, (0, extra), value=PAD),
        depth=draft.tree.depth + 1,
        linear=draft.tree.linear,
    )
    pad = (0, 0, 0, extra)
    batch = Draft(wide, draft.law, torch.nn.functional.pad(draft.q, pad, value=torch.nan))
    function = function_of(rule)
    together = function(torch.nn.functional.pad(p, pad, value=0.5), batch, coins(40))
    assert len(together.accepted().unique()) > 2
    for b in range(40):
        tree = TokenTree(
            draft.tree.tokens[b : b + 1], draft.tree.parents[b : b + 1], draft.tree.depth, draft.tree.linear
        )
        alone = function(p[b : b + 1], Draft(tree, draft.law, draft.q[b : b + 1]), coins(1, offset=b))
        assert together.path[b].tolist() == [*alone.path[0].tolist(), -1]
        assert together.bonus[b] == alone.bonus[0]


@pytest.mark.parametrize("rule", SPECS)
def test_nothing_is_read_back_and_shapes_are_fixed(rule: str) -> None:
    """Fake tensors have no values: reading one, or a shape that depends on one, raises."""
    with FakeTensorMode(allow_non_fake_inputs=False):
        rows, nodes, vocabulary = 2, 5, 7
        tokens = torch.zeros(rows, nodes, dtype=torch.long)
        draft = Draft(TokenTree(tokens, tokens - 1, depth=3), Law.FIXED, torch.rand(rows, nodes, vocabulary))
        noise = Noise(torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.long))
        verdict = function_of(rule)(torch.rand(rows, nodes, vocabulary), draft, HashedRng(noise))
        assert greedy(tokens, draft.tree).path.shape == verdict.path.shape == (rows, 4)
        assert verdict.emitted(draft.tree).shape == (rows, 4)


@pytest.mark.parametrize("rule", ["block", "token", "traversal", "recursive"])
def test_running_coins_keep_the_law(rule: str) -> None:
    """100,000 rows with consecutive seeds, drafted and judged by the same noise: chi-square of two tokens."""
    rows, (p, q) = 100_000, (random_table(3, 3, seed) for seed in (41, 42))
    noise = Noise(torch.arange(rows), torch.full((rows,), 3))
    tokens = torch.zeros(rows, 3, dtype=torch.long)
    law = [torch.zeros(rows, 3, dtype=torch.float64), q[0].expand(rows, -1)]
    tokens[:, 1] = draw(law[1], noise.bits(RandomStream.DRAFT, torch.full((rows,), 1)))
    law.append(q[1][tokens[:, 1]])
    tokens[:, 2] = draw(law[2], noise.bits(RandomStream.DRAFT, torch.full((rows,), 2)))
    at_nodes = torch.stack([p[0].expand(rows, -1), p[1][tokens[:, 1]], p[2][tokens[:, 1] * 3 + tokens[:, 2]]], 1)
    draft = Draft(TokenTree.chain(tokens), Law.CHAIN, torch.stack(law, 1))
    verdict = verify(Target(at_nodes.argmax(-1), at_nodes), draft, HashedRng(noise), rule)
    said = verdict.emitted(draft.tree)
    first, longer = said[:, 0], said[:, 1] >= 0
    assert stats.chisquare(first.bincount(minlength=3), rows * p[0][0]).pvalue > 1e-4
    exact = outcomes(RULES[rule].function, grow([-1, 0, 1], Law.CHAIN, p, q)).emitted
    counts = torch.bincount((first * 3 + said[:, 1])[longer], minlength=9)
    expected = exact[1] + exact[2].view(9, 3).sum(1)
    frequencies = (
        torch.cat([counts, (~longer).sum()[None]]),
        torch.cat([expected, exact[0].sum()[None]]) * rows,
    )
    assert stats.chisquare(*frequencies).pvalue > 1e-4


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Tokens, parents (some padding) and best tokens of few kinds, so that paths are often right."""
    size = draw(st.integers(1, 9))
    kind = st.integers(0, 1)
    parents = [-1]
    for i in range(1, size):
        real = [j for j in range(i) if parents[j] != PAD]
        parents.append(draw(st.sampled_from([*real, PAD])))
    column = st.lists(kind, min_size=size, max_size=size)
    return draw(column), parents, draw(column)


@given(st.lists(trees(), min_size=1, max_size=3))
@settings(max_examples=100, deadline=None)
def test_walk_finds_the_longest_right_path(rows: list[tuple[list[int], list[int], list[int]]]) -> None:
    width = max(len(tokens) for tokens, _, _ in rows)
    tokens, parents, best = (
        torch.tensor([row[i] + [fill] * (width - len(row[i])) for row in rows])
        for i, fill in ((0, 0), (1, PAD), (2, 0))
    )
    verdict = greedy(best, TokenTree(tokens, parents, depth=width - 1))
    for b, row in enumerate(rows):
        path = _slow_walk(*row)
        assert verdict.path[b].tolist() == path + [-1] * (width - len(path))
        assert verdict.bonus[b] == row[2][path[-1]]


def _slow_walk(tokens: list[int], parents: list[int], best: list[int], node: int = 0) -> list[int]:
    right = [i for i, parent in enumerate(parents) if parent == node and tokens[i] == best[node]]
    tails = [_slow_walk(tokens, parents, best, child) for child in right]
    longest = max((len(tail) for tail in tails), default=0)
    deepest = [tail for tail in tails if len(tail) == longest]
    return [node, *min(deepest, key=lambda tail: tail[-1])] if deepest else [node]


def test_verdict_counts_and_emits() -> None:
    tree = TokenTree.chain(torch.tensor([[9, 1, 2], [9, 3, 4], [9, 5, 6]]))
    verdict = Verdict(torch.tensor([[0, -1, -1], [0, 1, -1], [0, 1, 2]]), torch.tensor([7, 8, 0]))
    assert verdict.accepted().tolist() == [0, 1, 2]
    assert verdict.emitted(tree).tolist() == [[7, -1, -1], [3, 8, -1], [5, 6, 0]]
