"""Trees by context: which nodes are kept where scores are equal, and where the plan asks for less."""

import math
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from slow_nets import DraftRunner, Grown, Path, grow
from watched_nets import CLOSE, VOCAB, Proposal, doubled, first_step, gap, listen, reader, target

import random_heads as heads
import tiny
from foredraft.core.drafter import LevelPrice, Plan
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.tree import PAD
from foredraft.drafters.eagle3 import Eagle3Drafter, Options
from foredraft.drafters.trees.candidates import SHARPEST, Candidates, keep_best
from foredraft.drafters.trees.dynamic import frontier
from foredraft.model.ops import TORCH

TEXTS = [(3, 1, 4), (1, 5, 9, 2, 6, 5, 3, 5), (8, 9)]
SHAPE = {"nodes": 9, "depth": 4, "top_k": 3}


def draft(net: Any, plan: Plan, texts: list[Path] = TEXTS, **shape: Any) -> Proposal:
    drafter = Eagle3Drafter(Options(**{**SHAPE, **shape}), net)
    proposals = listen(drafter, net)
    drafter.propose(first_step(drafter, texts), plan)
    del net.logits
    return proposals[0]


def eagle3(**flags: Any) -> Any:
    return doubled(heads.eagle3(target(), taps=(1, 2, 3), **flags))


def test_each_row_has_the_best_tree_of_its_own_length():
    net = eagle3()
    for lengths in ((4, 4, 4), (1, 4, 2), (0, 3, 1), (0, 0, 1), (9, 0, 2)):
        proposal = draft(net, Plan(lengths))
        assert proposal.draft.tree.depth == min(max(lengths), 4)
        for b, text in enumerate(TEXTS):
            grown = grow(reader(net, text), min(lengths[b], 4), 3, 9)
            assert set(proposal.paths(b)) == grown.tree
            check_scores(proposal, b, grown)


def check_scores(proposal: Proposal, b: int, grown: Grown) -> None:
    """The draft says how likely it holds each of its paths."""
    draft = proposal.draft
    assert draft.scores is not None
    said = draft.scores[b][draft.tree.valid[b]].tolist()
    wanted = [0.0, *(grown.candidates[path] for path in proposal.paths(b))]
    assert said == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("shape", [{"nodes": 1}, {"nodes": 500}, {"top_k": 1}, {"depth": 1}, {"top_k": 99, "depth": 2}])
def test_shapes_at_their_ends(shape: dict[str, int]):
    """More nodes or children than there are; a chain; one level."""
    net = eagle3(vocabulary=torch.tensor([1, 2, 5, 9, 14]))
    proposal = draft(net, Plan((4, 4, 4)), **shape)
    size = {**SHAPE, **shape}
    for b, text in enumerate(TEXTS):
        wanted = grow(reader(net, text), size["depth"], size["top_k"], size["nodes"]).tree
        assert set(proposal.paths(b)) == wanted and len(wanted) <= size["nodes"]


@pytest.mark.parametrize(("value", "rerank"), [(False, True), (True, False), (False, False)])
def test_trees_without_value_and_without_re_rank(value: bool, rerank: bool):
    """The two switches of EAGLE-2's ablation."""
    net, differ = eagle3(), 0
    net.lm_head.weight *= 3  # so that parents differ in probability
    proposal = draft(net, Plan((4, 4, 4)), nodes=12, value=value, rerank=rerank)
    for b, text in enumerate(TEXTS):
        grown = grow(reader(net, text), 4, 3, 12, value=value, rerank=rerank)
        assert set(proposal.paths(b)) == grown.tree
        assert rerank or all(sum(len(path) == level for path in grown.tree) == 3 for level in (1, 2, 3, 4))
        check_scores(proposal, b, grown)
        differ += grown.tree != grow(reader(net, text), 4, 3, 12).tree
    assert differ


@pytest.mark.parametrize("sure", [1e4, 1e6])
def test_a_child_that_is_certain_does_not_come_without_its_parent(sure: float):
    """Its score is its parent's: log 1 is 0 (sglang#36201)."""
    net = eagle3()
    net.lm_head.weight *= sure
    for nodes in (1, 2, 3, 5):
        proposal = draft(net, Plan((4, 4, 4)), nodes=nodes)
        for b, text in enumerate(TEXTS):
            grown = grow(reader(net, text), 4, 3, nodes)
            assert sum(score == 0.0 for score in grown.candidates.values()) == 4
            assert set(proposal.paths(b)) == grown.tree
            assert max(map(len, grown.tree)) == min(nodes, 4)


@pytest.mark.parametrize("nodes", [1, 3, 4, 7, 10, 16, 21])
def test_twins_are_kept_with_their_parents(nodes: int):
    """Tokens that nothing tells apart: any of them may be taken, but every path is one that was drafted."""
    net = eagle3(own_embedding=True)
    net.lm_head.weight[1::2] = net.lm_head.weight[::2]
    net.embed_tokens.weight[1::2] = net.embed_tokens.weight[::2]
    proposal = draft(net, Plan((3, 3, 3)), nodes=nodes, depth=3, top_k=4)
    for b, text in enumerate(TEXTS):
        grown = grow(reader(net, text), 3, 4, nodes)
        ranked = sorted(grown.candidates.values(), reverse=True)
        assert any(a == b for a, b in pairwise(ranked))
        paths = proposal.paths(b)
        assert len(paths) == len(set(paths)) == nodes
        scores = sorted((score_of(reader(net, text), path) for path in paths), reverse=True)
        assert max(abs(a - b) for a, b in zip(scores, ranked, strict=False)) < 1e-4


def score_of(slow: DraftRunner, path: Path) -> float:
    return sum(float((slow.logits(path[:i]) / SHARPEST).log_softmax(-1)[token]) for i, token in enumerate(path))


def test_logits_that_are_all_the_same():
    net = eagle3()
    net.lm_head.weight.zero_()
    proposal = draft(net, Plan((4, 4, 4)), nodes=15)
    for b in range(3):
        paths = proposal.paths(b)
        assert len(paths) == len(set(paths)) == 15
        assert [sum(len(path) == level for path in paths) for level in (1, 2, 3, 4)] == [3, 9, 3, 0]
    assert torch.equal(proposal.draft.tree.tokens, draft(net, Plan((4, 4, 4)), nodes=15).draft.tree.tokens)


@pytest.mark.parametrize("seed", range(20))
def test_keep_best_takes_parents_first(seed: int):
    """Scores of few values, so that most are tied: by score, then the shallower, then the earlier."""
    source = random.Random(seed)
    levels = sorted([1, *source.choices((1, 2, 3), k=source.randint(1, 12))])
    parents, scores = [], []
    for i, level in enumerate(levels):
        above = [j for j in range(i) if levels[j] == level - 1]
        if level > 1 and not above:
            levels[i] = level = 1
        parent = source.choice(above) if level > 1 else -1
        parents.append(1 + parent)
        scores.append((scores[parent] if parent >= 0 else 0.0) - source.choice((0.0, 0.0, 1.0, 2.0)))
    if levels != sorted(levels):
        pytest.skip("a level was missing")
    tokens = torch.arange(50, 50 + len(levels))[None]
    candidates = Candidates(tokens, torch.tensor([parents]), torch.tensor([scores]), torch.tensor(levels), max(levels))
    for nodes in range(1, len(levels) + 2):
        allowed = source.choice((3, 2, 1))
        tree = keep_best(candidates, torch.tensor([7]), nodes, torch.tensor([allowed])).tree
        within = [i for i in range(len(levels)) if levels[i] <= allowed]
        wanted = {i + 1 for i in sorted(within, key=lambda i: (-scores[i], levels[i], i))[:nodes]}
        names = [0, *(int(token) - 49 for token in tree.tokens[0, 1:])]
        found = {names[n]: names[p] for n, p in enumerate(tree.parents[0].tolist()) if n and p != PAD}
        assert found == {name: parents[name - 1] for name in wanted}
        assert int(tree.tokens[0, 0]) == 7 and tree.tokens.shape[1] <= nodes + 1


def test_equal_scores_of_a_level_keep_their_order():
    scores = torch.tensor([[-1.0, 0.0, -1.0, 0.0, -2.0], [0.0] * 5])
    assert frontier(scores, 3).tolist() == [[1, 3, 0], [0, 1, 2]]


def test_logits_that_are_no_numbers_make_scores_that_are():
    logits = torch.tensor([[[0.0, math.nan, math.inf, -math.inf], [math.nan] * 4, [-math.inf] * 4]])
    ids, scores = TORCH.rank(logits, 4, tiny.warp([SamplingParams()], 9), None, SHARPEST)
    assert scores.isfinite().all() and (scores <= 0).all()
    assert all(sorted(line) == [0, 1, 2, 3] for line in ids[0].tolist())


def test_scores_are_the_shares_of_the_race_at_the_rows_temperature():
    """A greedy target accepts as if the draft's law were sharper than it is."""
    logits = torch.randn(4, 2, 9, generator=torch.Generator().manual_seed(0))
    temperatures = (0.0, 1.7, 1.0, 0.2)
    rows = [SamplingParams(temperature=t) for t in temperatures]
    every = torch.empty(4, 9).exponential_(generator=torch.Generator().manual_seed(1))
    for chosen in ([0, 1, 2, 3], [2], [0], [1, 3], [0, 2]):
        times = None if chosen == [0] else every[chosen]
        ids, scores = TORCH.rank(logits[chosen], 3, tiny.warp([rows[i] for i in chosen], 9), times, SHARPEST)
        for b, i in enumerate(chosen):
            rates = (logits[i] / (temperatures[i] or SHARPEST)).softmax(-1)
            rates = rates / every[i] if temperatures[i] else rates
            best = (rates / rates.sum(-1, keepdim=True)).topk(3)
            assert torch.equal(ids[b], best.indices) and torch.allclose(scores[b].exp(), best.values, atol=1e-6)


@pytest.mark.parametrize("nodes", [1, 2, 5, 9, 40])
def test_of_fewer_nodes_than_it_can_the_likeliest_are_drafted(nodes: int):
    proposal = draft(eagle3(), Plan((4, 2, 4), nodes=nodes))
    for b, text in enumerate(TEXTS):
        grown = grow(reader(eagle3(), text), (4, 2, 4)[b], 3, min(nodes, 9))
        assert set(proposal.paths(b)) == grown.tree


@pytest.mark.parametrize(("worth", "node"), [(0.1, 0.0), (0.5, 0.0), (1.2, 0.0), (2.9, 0.0), (0.1, 0.1), (0.3, 0.3)])
def test_no_level_is_drafted_that_is_not_worth_it(worth: float, node: float):
    """Levels end where the parents of the next one have too little probability together, each less a node's price."""
    net = eagle3()
    net.lm_head.weight *= 0.3
    proposal = draft(net, Plan((4, 4, 4), level_price=LevelPrice(worth, node)), nodes=30)
    promised = []  # by level from the second on, of all rows together
    slow = [grow(reader(net, text), 4, 3, 30) for text in TEXTS]
    for level in (1, 2, 3):
        chances = [math.exp(g.candidates[p]) for g in slow for p in g.frontiers[level]]
        promised.append(sum(max(chance - node, 0.0) for chance in chances))
    levels = 1 + next((i for i, total in enumerate(promised) if total < worth), 3)
    assert len(proposal.calls) == levels
    for b, text in enumerate(TEXTS):
        assert set(proposal.paths(b)) == grow(reader(net, text), levels, 3, 30).tree


def test_nodes_whose_children_cannot_be_worth_a_node_are_not_expanded():
    """A level reads as many as exceed the price in some row; what is worth it stays as it is without a price."""
    price, net = 0.2, eagle3()
    proposal = draft(net, Plan((4, 4, 4), level_price=LevelPrice(0.01, price)), nodes=30)
    slow = [grow(reader(net, text), 4, 3, 30) for text in TEXTS]
    useful = [
        max(sum(math.exp(g.candidates[p]) > price for p in g.frontiers[level]) for g in slow) for level in (1, 2, 3)
    ]
    assert [call.out.shape[1] for call in proposal.calls[1:]] == [count for count in useful if count]
    assert useful[:2] == [2, 1]
    for b, g in enumerate(slow):
        assert {p for p in g.tree if math.exp(g.candidates[p]) > price} <= set(proposal.paths(b))


def test_a_tree_may_be_drafted_again():
    """A proposal changes nothing that the next one sees."""
    net = eagle3()
    drafter = Eagle3Drafter(Options(**SHAPE), net)
    proposals = listen(drafter, net)
    view = first_step(drafter, TEXTS)
    for plan in (Plan((4, 4, 4)), Plan((1, 2, 0)), Plan((4, 4, 4))):
        drafter.propose(view, plan)
    assert [set(proposals[0].paths(b)) for b in range(3)] == [set(proposals[2].paths(b)) for b in range(3)]
    assert all(torch.allclose(a.out, b.out) for a, b in zip(proposals[0].calls, proposals[2].calls, strict=True))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("chunk", [5, 512])
def test_long_texts(window: int | None, chunk: int, monkeypatch: pytest.MonkeyPatch):
    """About the 64 slots in which caches grow; read in one go or in pieces."""
    monkeypatch.setattr("foredraft.drafters.states.feature_cache.CHUNK", chunk)
    net = eagle3(block={"sliding_window": window})
    texts = [tuple(prompt) for prompt in tiny.prompts((61, 64, 65, 2), VOCAB)]
    proposal = draft(net, Plan((4, 4, 4, 4)), texts)
    for b, text in enumerate(texts):
        slow = reader(net, text)
        grown = grow(slow, 4, 3, 9)
        assert set(proposal.paths(b)) == grown.tree
        for call, paths in zip(proposal.calls, grown.frontiers, strict=True):
            assert gap(call.out[b], [slow.logits(path) for path in paths]) < CLOSE
