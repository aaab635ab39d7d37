"""Pairs of draft and rule that look right and are not: refused by the tag, and lossy without it."""

from dataclasses import replace

import pytest
import torch

from foredraft.core.draft import Draft, Law, Target, Verdict
from foredraft.core.errors import LawError, OptionError
from foredraft.core.rng import HashedRng, Noise, VerifierRng
from foredraft.core.tree import PAD, TokenTree
from foredraft.core.verify import DEFAULT, RULES, check_legal, verify
from oracle import (
    Draws,
    EnumeratingRng,
    continued,
    grow,
    loss,
    outcomes,
    prune,
    random_table,
    same_everywhere,
    total_variation,
)

P, Q = random_table(3, 4, 31), random_table(3, 4, 32)
TREE = [-1, 0, 0, 1, 1, 2]
SEVERAL = (Law.WITHOUT_REPLACEMENT, Law.IID)


def lost(rule: str, draws: Draws) -> float:
    return loss(RULES[rule].function, draws, P)


@pytest.mark.parametrize("rule", ["token", "block", "recursive", "traversal"])
def test_argmax_draft_with_softmax_q(rule: str) -> None:
    p, q = same_everywhere((0.5, 0.3, 0.2), 2), same_everywhere((0.6, 0.3, 0.1), 1)
    with pytest.raises(LawError):
        check_legal(rule, Law.FIXED)
    lie = grow([-1, 0], Law.FIXED, p, q, claim=Law.CHAIN)
    law = continued(outcomes(RULES[rule].function, lie).emitted, p).view(3, 3).sum(1)
    assert torch.allclose(law, torch.tensor([5 / 6, 0, 1 / 6], dtype=law.dtype), atol=1e-12)
    assert total_variation(law, p[0][0]) == pytest.approx(1 / 3, abs=1e-12)


@pytest.mark.parametrize("claim", SEVERAL, ids=lambda law: law.value)
def test_top_k_with_a_claimed_q(claim: Law) -> None:
    lie = grow(TREE, Law.FIXED, P, Q, claim=claim)
    for rule in (name for name, rule in RULES.items() if rule.lossless and claim in rule.laws):
        assert (lost(rule, lie) < 1e-12) == (rule == "target_sampling"), rule
        assert rule == "target_sampling" or lost(rule, lie) > 0.01, rule


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("law", SEVERAL, ids=lambda law: law.value)
def test_sampled_tree_pruned_by_confidence(law: Law, keep: int) -> None:
    """Keeping the likeliest nodes looks at what was drawn; the honest tag of such a tree is FIXED."""
    pruned = prune(grow(TREE, law, P, Q), Q, keep)
    assert bool(((pruned.draft.tree.parents != PAD).sum(1) == keep + 1).all())
    assert lost("target_sampling", pruned) < 1e-12
    for rule in ("recursive", "traversal"):
        assert lost(rule, pruned) > 0.01, rule
        with pytest.raises(LawError):
            check_legal(rule, Law.FIXED)


@pytest.mark.parametrize("rule", ["token", "block", "traversal"])
def test_unsure_token_may_end_a_chain_but_not_vanish(rule: str) -> None:
    draws = grow([-1, 0, 1, 2], Law.CHAIN, P, Q)
    drawn = draws.draft.q.gather(2, draws.draft.tree.tokens.clamp(min=0)[..., None])[..., 0]
    unsure = (drawn < 0.4).long()
    unsure[:, 0] = 0
    before = unsure.cumsum(1) - unsure  # unsure tokens above the node
    kept, thrown = before > 0, before + unsure > 0
    assert lost(rule, _without(draws, kept)) < 1e-12
    assert lost(rule, _without(draws, thrown)) > 0.01


@pytest.mark.parametrize("law", [Law.IID, Law.IID_MANY], ids=lambda law: law.value)
def test_equal_siblings_must_not_be_merged(law: Law) -> None:
    """Dropping a token that was drawn twice is pruning, too: its second rejection changes what is left."""
    p, *q = (same_everywhere(row, 2) for row in ((0.2, 0.4, 0.4), (0.7, 0.2, 0.1), (0.6, 0.3, 0.1)))
    draws = grow([-1, 0, 0], law, p, *q)
    tokens = draws.draft.tree.tokens
    twice = torch.zeros_like(tokens, dtype=torch.bool)
    twice[:, 2] = tokens[:, 1] == tokens[:, 2]
    merged = _without(draws, twice)
    assert loss(RULES["target_sampling"].function, merged, p) < 1e-12
    for rule in ("recursive", "traversal"):
        assert loss(RULES[rule].function, draws, p) < 1e-12
        assert loss(RULES[rule].function, merged, p) > 0.01, rule


def _without(draws: Draws, nodes: torch.Tensor) -> Draws:
    tree = draws.draft.tree
    tree = replace(tree, parents=torch.where(nodes, PAD, tree.parents))
    return replace(draws, draft=replace(draws.draft, tree=tree))


@pytest.mark.parametrize(
    ("drawn", "claim", "rule"),
    [
        (Law.WITHOUT_REPLACEMENT, Law.IID, "recursive"),
        (Law.WITHOUT_REPLACEMENT, Law.IID, "kseq"),
        (Law.IID, Law.WITHOUT_REPLACEMENT, "traversal"),
        (Law.IID_MANY, Law.IID, "recursive"),
    ],
    ids=lambda value: getattr(value, "value", value),
)
def test_every_tag_counts(drawn: Law, claim: Law, rule: str) -> None:
    q = [Q, random_table(3, 4, 33)]
    assert lost(rule, grow(TREE, drawn, P, *q, claim=claim)) > 0.01


def test_what_is_illegal_is_lossy() -> None:
    """Rules on honest drafts of laws that they were not made for."""
    q = [Q, random_table(3, 4, 33)]
    for law in (Law.WITHOUT_REPLACEMENT, Law.IID_MANY):
        assert lost("kseq", grow(TREE, law, P, *q)) > 1e-3, law
    assert lost("token", grow(TREE, Law.IID, P, *q)) > 1e-3


@pytest.mark.parametrize("rule", ["token", "block", "recursive", "traversal", "kseq"])
def test_impossible_claim_does_no_harm_to_a_greedy_row(rule: str) -> None:
    """q swears by another token than the one it hands in: nothing is left of p - q, and p is still followed."""
    best = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64).expand(1, 3, 3)
    draft = Draft(TokenTree.chain(torch.tensor([[0, 2, 2]])), Law.CHAIN, best)
    verdict = RULES[rule].function(best, draft, EnumeratingRng(torch.zeros(1, 0), 3))
    assert verdict.path.tolist() == [[0, -1, -1]] and verdict.bonus.tolist() == [1]


class NoCoins(VerifierRng):
    """Greedy drafts are judged without chance."""

    def accept(self, probability):
        raise AssertionError

    residual = accept

    def target(self, law, depth, going):
        raise AssertionError


LEGAL = {
    Law.FIXED: ["target_sampling"],
    Law.CHAIN: ["block", "recursive", "target_sampling", "token", "traversal"],
    Law.WITHOUT_REPLACEMENT: ["recursive", "target_sampling", "traversal"],
    Law.IID: ["kseq", "recursive", "target_sampling", "traversal"],
    Law.IID_MANY: ["recursive", "target_sampling", "traversal"],
}


@pytest.mark.parametrize("law", Law, ids=lambda law: law.value)
def test_table_of_rules(law: Law) -> None:
    tree = TokenTree.chain(torch.tensor([[5, 1, 2]]))
    draft = Draft(tree, law, None if law is Law.FIXED else torch.full((1, 3, 4), 0.25))
    greedy, sampled = Target(torch.tensor([[1, 3, 0]]), None), Target(torch.tensor([[1, 3, 0]]), torch.ones(1, 3, 4))
    assert sorted(name for name, rule in RULES.items() if law in rule.laws) == sorted(
        [*LEGAL[law], "approximate", "typical"]
    )
    assert law in RULES[DEFAULT].laws and RULES[DEFAULT].lossless and not RULES[DEFAULT].draws
    for name, rule in RULES.items():
        if rule.relaxed:
            continue
        verdict = verify(greedy, draft, NoCoins(), name)  # all rules follow a one-hot, whatever the law
        assert verdict.path.tolist() == [[0, 1, -1]] and verdict.bonus.tolist() == [3]
        if law not in rule.laws:
            with pytest.raises(LawError, match=f"{name}.*{law.value}.*{LEGAL[law][-1]}") as caught:
                verify(sampled, draft, NoCoins(), name)
            assert rule.why in str(caught.value) and str(caught.value).count(". ") == 0
    assert isinstance(verify(greedy, draft, NoCoins()), Verdict)


def test_unknown_rule_lists_the_known_ones() -> None:
    with pytest.raises(OptionError) as caught:
        check_legal("blok", Law.CHAIN)
    assert "Did you mean block?" in str(caught.value)
    assert all(name in str(caught.value) for name in RULES)


def test_rule_without_its_q() -> None:
    draft = Draft(TokenTree.chain(torch.tensor([[0, 1]])), Law.CHAIN, None)
    p = torch.full((1, 2, 4), 0.25)
    for rule in ("token", "block", "recursive", "traversal", "kseq"):
        with pytest.raises(LawError, match="needs the q"):
            RULES[rule].function(p, draft, NoCoins())


@pytest.mark.parametrize("rule", ["token", "block", "recursive", "traversal"])
def test_a_q_that_is_no_law_costs_speed_and_nothing_else(rule: str) -> None:
    """NaN at the second node of a chain: what comes out first still follows p."""
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).expand(1, 3, 4)
    found, law, count = torch.zeros(4, dtype=torch.float64), (0.7, 0.1, 0.1, 0.1), 4000
    for x, chance in enumerate(law):
        q = torch.tensor(law, dtype=torch.float64).repeat(count, 3, 1)
        q[:, 2] = torch.nan
        tree = TokenTree.chain(torch.tensor([0, x, 1]).expand(count, -1))
        noise = Noise(torch.arange(count) + 10_000 * x, torch.ones(count, dtype=torch.long))
        target = Target(tree.tokens, p.expand(count, -1, -1))
        verdict = verify(target, Draft(tree, Law.CHAIN, q), HashedRng(noise), rule)
        found += chance * verdict.emitted(tree)[:, 0].bincount(minlength=4).double() / count
    assert (found - p[0, 0]).abs().max() < 0.02
