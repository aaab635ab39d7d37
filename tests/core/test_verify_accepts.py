"""How much each rule accepts: what theory promises, and no more than that."""

import math
from itertools import product

import pytest
import torch

from foredraft.core.draft import Law
from foredraft.core.verify import RULES
from oracle import Draws, Table, grow, outcomes, random_table, same_everywhere

SEEDS = range(6)
ONE_LEVEL = ([-1, 0, 0], [-1, 0, 0, 0])


def tokens(rule: str, draws: Draws) -> float:
    return outcomes(RULES[rule].function, draws).expected_tokens


def tables(seed: int, vocabulary: int = 3, levels: int = 4) -> list[Table]:
    return [random_table(vocabulary, levels, 100 * seed + i, 0.25 * (seed % 2)) for i in range(3)]


def bound(draws: Draws, p: Table) -> float:
    """min over token sets A of p(A) + 1 - P(children lie in A): what optimal transport allows at one node."""
    vocabulary = p[0].shape[1]
    children = torch.nn.functional.one_hot(draws.draft.tree.tokens[:, 1:], vocabulary).sum(1) > 0
    sets = torch.tensor(list(product([False, True], repeat=vocabulary)))
    inside = (~children[:, None] | sets).all(-1).double()  # [R, sets]
    return float((sets.double() @ p[0][0] + 1 - draws.weights @ inside).min())


@pytest.mark.parametrize("seed", SEEDS)
def test_chain_rules_in_order(seed: int) -> None:
    p, q, _ = tables(seed)
    for shape in ([-1, 0], [-1, 0, 1], [-1, 0, 1, 2]):
        draws = grow(shape, Law.CHAIN, p, q)
        block, token, target = (tokens(rule, draws) for rule in ("block", "token", "target_sampling"))
        assert block >= token - 1e-12
        assert token >= target - 1e-12


def test_block_gains_what_its_paper_says() -> None:
    """Section 2 of 2403.10444: 10/9 accepted tokens by token verification, 11/9 by block verification."""
    p, q = same_everywhere((1 / 3, 2 / 3), 3), same_everywhere((2 / 3, 1 / 3), 3)
    draws = grow([-1, 0, 1], Law.CHAIN, p, q)
    assert tokens("token", draws) == pytest.approx(1 + 10 / 9, abs=1e-12)
    assert tokens("block", draws) == pytest.approx(1 + 11 / 9, abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("one", "other"), [("block", "traversal"), ("token", "recursive")])
def test_tree_rules_on_a_chain_are_the_chain_rules(one: str, other: str, seed: int) -> None:
    """The same law of every prefix emitted, hence also the same expected tokens."""
    p, q, _ = tables(seed)
    draws = grow([-1, 0, 1, 2], Law.CHAIN, p, q)
    first, second = (outcomes(RULES[rule].function, draws) for rule in (one, other))
    assert all(torch.allclose(a, b, atol=1e-13) for a, b in zip(first.emitted, second.emitted, strict=True))
    assert first.expected_tokens == pytest.approx(second.expected_tokens, abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_expected_tokens_of_independent_positions(k: int) -> None:
    """(1 - a^(k+1)) / (1 - a), Leviathan et al., equation 1."""
    p, q = same_everywhere((0.5, 0.3, 0.2), k + 1), same_everywhere((0.2, 0.7, 0.1), k + 1)
    alpha = 0.2 + 0.3 + 0.1
    expected = (1 - alpha ** (k + 1)) / (1 - alpha)
    assert tokens("token", grow(range(-1, k), Law.CHAIN, p, q)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("law", [law for law in Law if law is not Law.FIXED])
def test_perfect_draft_is_accepted_whole(law: Law) -> None:
    p, *_ = tables(0)
    draws = grow([-1, 0, 1, 2] if law is Law.CHAIN else [-1, 0, 0, 1, 3], law, p, p, p)
    for name, rule in RULES.items():
        if rule.lossless and law in rule.laws and name != "target_sampling":
            assert tokens(name, draws) == pytest.approx(4.0, abs=1e-6 if name == "kseq" else 1e-12), name


@pytest.mark.parametrize("seed", SEEDS)
def test_fixed_trees_reach_each_node_as_often_as_the_target(seed: int) -> None:
    p, q, _ = tables(seed)
    draws = grow([-1, 0, 0, 1, 1, 2, 3], Law.FIXED, p, q)
    tree, row = draws.draft.tree, draws.p[0]
    reach = [1.0]
    for parent, token in zip(tree.parents[0, 1:].tolist(), tree.tokens[0, 1:].tolist(), strict=True):
        reach.append(reach[parent] * float(row[parent, token]))
    assert tokens("target_sampling", draws) == pytest.approx(sum(reach), abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", ONE_LEVEL, ids=["two", "three"])
def test_one_level(shape: list[int], seed: int) -> None:
    """At one node: nothing beats the bound, and three rules stand where theory puts them."""
    p, *q = tables(seed, vocabulary=4, levels=2)
    k = len(shape) - 1
    for law in Law:
        if law is Law.CHAIN:
            continue
        draws = grow(shape, law, p, *q)
        most = bound(draws, p)
        met = {name: tokens(name, draws) - 1 for name, rule in RULES.items() if rule.lossless and law in rule.laws}
        assert max(met.values()) <= most + 1e-12, law
        if law is Law.FIXED:
            assert met["target_sampling"] == pytest.approx(most, abs=1e-12)
            continue
        assert met["traversal"] == pytest.approx(met["recursive"], abs=1e-12), law
        if law in (Law.IID, Law.IID_MANY):  # SpecInfer, theorem 4.3
            assert met["recursive"] >= met["target_sampling"] - 1e-12, law
        if law is Law.IID:  # SpecTr, theorem 2
            assert met["kseq"] >= (1 - (1 - 1 / k) ** k) * most - 1e-6


def test_traversal_gains_on_balanced_trees_and_may_lose_on_lopsided_ones() -> None:
    """No theorem orders traversal and recursive rejection: long branches of younger siblings turn it."""
    p, q = same_everywhere((0.5, 0.5), 6), same_everywhere((0.4, 0.6), 6)
    lopsided = grow([-1, 0, 1, 1, 3, 4, 5], Law.WITHOUT_REPLACEMENT, p, q)
    assert tokens("traversal", lopsided) == pytest.approx(2.93224, abs=1e-9)
    assert tokens("recursive", lopsided) == pytest.approx(3.01951, abs=1e-9)
    p, q, _ = tables(2)
    balanced = grow([-1, 0, 0, 1, 1, 2, 2], Law.WITHOUT_REPLACEMENT, p, q)
    assert tokens("traversal", balanced) > tokens("recursive", balanced) + 1e-3
    assert math.isclose(float(balanced.weights.sum()), 1.0)
