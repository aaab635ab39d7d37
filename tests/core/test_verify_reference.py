"""Rules against slow, plain Python on random trees, and bounds on the number of their operators."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.kit.operators import Operators
from foredraft.core.draft import Draft, Law, Target
from foredraft.core.rng import HashedRng, Noise, RandomStream, VerifierRng
from foredraft.core.tree import PAD, TokenTree
from foredraft.core.verify import RULES, verify
from foredraft.drafters.trees.shapes import Template

V, NODES, ROWS = 5, 14, 6


class Fixed(VerifierRng):
    """Given numbers for ``accept``; keeps the law of the bonus token."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers
        self.law = torch.zeros(0)

    def accept(self, probability: Tensor) -> Tensor:
        return self.numbers < probability

    def residual(self, law: Tensor) -> Tensor:
        self.law = law / law.sum(1, keepdim=True)
        return law.argmax(1)

    def target(self, law: Tensor, depths: Tensor) -> Tensor:
        raise AssertionError


def slow_recursive(p: list, q: list, tokens: list, parents: list, numbers: list) -> tuple[list[int], list[float]]:
    """The path and the law of the bonus token; a node is tested when the path has reached its parent."""
    path, law = [0], p[0]
    for node in range(1, len(parents)):
        if parents[node] != path[-1] or not sum(q[node]) > 0:
            continue
        x = tokens[node]
        if numbers[node] < min(1.0, law[x] / q[node][x]):
            path, law = [*path, node], p[node]
        else:
            law = normalized([max(0.0, a - b) for a, b in zip(law, q[node], strict=True)], law)
    return path, law


def slow_traversal(p: list, q: list, tokens: list, parents: list, numbers: list) -> tuple[list[int], list[float]]:
    """Depth first: the first node that passes after all its children ends the path."""

    def visit(node: int, chance: float) -> tuple[list[int], list[float]] | float:
        """The path from ``node`` down and the law; or the node's pass probability after it has failed."""
        law = p[node]
        for child in (i for i, parent in enumerate(parents) if parent == node):
            if not sum(q[child]) > 0:
                continue
            x = tokens[child]
            found = visit(child, min(1.0, chance * law[x] / q[child][x]))
            if isinstance(found, tuple):
                return [node, *found[0]], found[1]
            left = [max(0.0, chance * a - b) for a, b in zip(law, q[child], strict=True)]
            total = sum(left) + 1.0 - chance
            law, chance = normalized(left, law), sum(left) / total if total > 0 else chance
        return ([node], law) if node == 0 or numbers[node] < chance else chance

    found = visit(0, 1.0)
    assert isinstance(found, tuple)
    return found


def normalized(law: list[float], otherwise: list[float]) -> list[float]:
    total = sum(law)
    return [x / total for x in law] if total > 1e-12 else otherwise


SLOW = {"recursive": slow_recursive, "traversal": slow_traversal}


def random_draft(seed: int) -> tuple[Tensor, Draft]:
    """Rows of different shapes: padding anywhere, greedy rows with picked and with drawn tokens, and invalid q."""
    source = random.Random(seed)
    torch.manual_seed(seed)
    p, q = (2 * torch.randn(2, ROWS, NODES, V, dtype=torch.float64)).softmax(-1)
    parents = torch.full((ROWS, NODES), PAD)
    parents[:, 0] = -1
    for row in range(1, ROWS):  # row 0 has no draft
        for node in range(1, NODES):
            real = [i for i in range(node) if parents[row, i] != PAD]
            parents[row, node] = source.choice([*real, real[-1], PAD])
    p[1] = torch.nn.functional.one_hot(p[1].argmax(-1), V)
    tokens = torch.multinomial(q.flatten(0, 1), 1).view(ROWS, NODES)
    tokens[2] = p[2].argmax(-1).gather(0, parents[2].clamp(min=0))
    p[2] = torch.nn.functional.one_hot(p[2].argmax(-1), V)
    q[2] = torch.nn.functional.one_hot(tokens[2], V)
    q[3, source.randrange(1, NODES)] = torch.nan
    q[3, source.randrange(1, NODES)] = 0.0
    tree = TokenTree(tokens, parents, depth=NODES - 1)
    return p, Draft(tree, Law.IID_MANY, q)


@pytest.mark.parametrize("rule", SLOW)
@pytest.mark.parametrize("known", [False, True], ids=["one by one", "by turns"])
def test_rule_is_its_slow_reference(rule: str, known: bool) -> None:
    accepted = 0
    for seed in range(40):
        p, draft = random_draft(seed)
        if known:
            draft = replace(draft, tree=draft.tree.counted())
        rng = Fixed(torch.rand(ROWS, NODES, dtype=torch.float64))
        verdict = verify(Target(p.argmax(-1), p), draft, rng, rule)
        accepted += int(verdict.accepted().sum())
        for row in range(ROWS):
            columns = (p, draft.q, draft.tree.tokens, draft.tree.parents, rng.numbers)
            path, law = SLOW[rule](*(column[row].tolist() for column in columns))
            assert verdict.path[row].tolist() == path + [-1] * (NODES - len(path)), (seed, row)
            assert rng.law[row].tolist() == pytest.approx(law, abs=1e-9), (seed, row)
    assert accepted > 200


@pytest.mark.parametrize("rule", SLOW)
def test_turns_that_are_too_small_cost_the_draft_only(rule: str) -> None:
    p, draft = random_draft(1)
    counts = draft.tree.counted().turns
    for turns in ((), counts[:1], (1,) * len(counts), (*counts[:-1], 0), (0,) * len(counts)):
        rng = Fixed(torch.zeros(ROWS, NODES, dtype=torch.float64))
        tree = replace(draft.tree, turns=turns)
        verdict = verify(Target(p.argmax(-1), p), replace(draft, tree=tree), rng, rule)
        rows = [row for row in range(ROWS) if _fits(replace(tree, turns=None), row, turns)]
        assert len(rows) < ROWS
        known = Fixed(rng.numbers)
        expected = verify(Target(p.argmax(-1), p), draft, known, rule)
        for row in range(ROWS):
            kept = row in rows or not turns
            path = expected.path[row].tolist() if kept else [0] + [-1] * (NODES - 1)
            assert verdict.path[row].tolist() == path
            assert torch.allclose(rng.law[row], known.law[row] if kept else p[row, 0])


def _fits(tree: TokenTree, row: int, turns: tuple[int, ...]) -> bool:
    own = TokenTree(tree.tokens[row : row + 1], tree.parents[row : row + 1], tree.depth).counted().turns
    return len(own) <= len(turns) and all(a <= b for a, b in zip(own, turns, strict=False))


MOST = {"target_sampling": 70 * 6, "recursive": 190, "traversal": 200, "token": 130, "block": 150}
"""Operators of a rule. Before it, a step hashes the seeds for drafting, and addresses need the paths of a tree. Target
sampling runs a race over the whole vocabulary at each of the six depths of this tree; hashed together, the races of a
large batch would not fit into memory."""


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("rule", MOST)
def test_operators_are_few(rule: str, rows: int) -> None:
    template = Template.of("eagle")
    chain = Law.CHAIN in RULES[rule].laws and len(RULES[rule].laws) == 1
    parents = torch.arange(-1, 9) if chain else torch.tensor([-1, *template.parents])
    p, q = torch.randn(2, rows, len(parents), 64).softmax(-1)
    tokens = torch.multinomial(q.flatten(0, 1), 1).view(rows, -1)
    depth = len(parents) - 1 if chain else template.depth
    tree = TokenTree(tokens, parents.expand(rows, -1).contiguous(), depth, linear=chain)
    tree = tree if chain else tree.counted()
    draft = Draft(tree, Law.CHAIN if chain else Law.WITHOUT_REPLACEMENT, q)
    noise = Noise(torch.arange(rows), torch.full((rows,), 7))
    noise.bits(RandomStream.DRAFT, tokens)
    assert bool((tree.depths <= depth).all())
    rng = HashedRng(noise, torch.zeros(rows, dtype=torch.bool))
    with torch.inference_mode(), Operators() as operators:
        verify(Target(p.argmax(-1), p), draft, rng, rule)
    assert 0 < operators.count <= MOST[rule]
