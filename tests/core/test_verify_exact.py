"""Every rule says exactly what the target says: all drafts, all coins, summed; TV < 1e-12."""

import pytest
import torch

from foredraft.core.draft import Draft, Law, Target
from foredraft.core.tree import PAD, TokenTree
from foredraft.core.verify import RULES, verify
from oracle import Draws, Table, difference, grow, loss, outcomes, random_table, same_everywhere

CHAINS = {
    "one": [-1, 0],
    "two": [-1, 0, 1],
    "three": [-1, 0, 1, 2],
    "holes": [-1, PAD, 0, PAD, 2, 4],
    "nothing": [-1],
    "only_padding": [-1, PAD],
}
TREES = {
    "pair": [-1, 0, 0],
    "three_siblings": [-1, 0, 0, 0],
    "binary": [-1, 0, 0, 1, 1, 2, 2],
    "depth_first": [-1, 0, 1, 1, 0, 4],
    "younger_is_longer": [-1, 0, 0, 2, 3],
    "deep": [-1, 0, 0, 1, 3, 2],
    "holes": [-1, PAD, 0, 0, PAD, 3, 3, PAD, 2],
}
ZEROS = {"dense": 0.0, "sparse": 0.4}  # share of tokens that target or draft forbid


def lossless(law: Law) -> list[str]:
    return [name for name, rule in RULES.items() if rule.lossless and law in rule.laws]


CASES = [
    pytest.param(law, rule, shape, id=f"{law.value}-{rule}-{name}")
    for law in Law
    for rule in lossless(law)
    for name, shape in (CHAINS if law is Law.CHAIN else CHAINS | TREES if law is Law.FIXED else TREES).items()
]


@pytest.mark.parametrize("zeros", ZEROS.values(), ids=ZEROS)
@pytest.mark.parametrize(("law", "rule", "shape"), CASES)
def test_law_is_the_targets(law: Law, rule: str, shape: list[int], zeros: float) -> None:
    p, *q = (random_table(3, 4, seed, zeros) for seed in (1, 2, 3))
    assert loss(RULES[rule].function, grow(shape, law, p, *q), p) < 1e-12


@pytest.mark.parametrize("law", Law)
def test_wider_vocabulary(law: Law) -> None:
    p, *q = (random_table(4, 4, seed, 0.2) for seed in (4, 5, 6))
    shape = [-1, 0, 1, 2] if law is Law.CHAIN else [-1, 0, 0, 0, 1, 4]
    draws = grow(shape, law, p, *q)
    for rule in lossless(law):
        assert loss(RULES[rule].function, draws, p) < 1e-12, rule


@pytest.mark.parametrize("law", Law)
def test_verify_takes_the_default_and_is_exact(law: Law) -> None:
    p, *q = (random_table(3, 3, seed) for seed in (7, 8, 9))
    draws = grow([-1, 0, 1] if law is Law.CHAIN else [-1, 0, 0, 1], law, p, *q)

    def rule(p, draft, coins):
        return verify(Target(p.argmax(-1), p), draft, coins)

    assert loss(rule, draws, p) < 1e-12


@pytest.mark.parametrize("law", [law for law in Law if law is not Law.FIXED])
def test_supports_that_do_not_meet(law: Law) -> None:
    p, q = same_everywhere((0.3, 0.7, 0.0, 0.0), 3), same_everywhere((0.0, 0.0, 0.4, 0.6), 3)
    draws = grow([-1, 0, 1] if law is Law.CHAIN else [-1, 0, 0, 1], law, p, q, q)
    for rule in lossless(law):
        result = outcomes(RULES[rule].function, draws)
        assert difference(result, p) < 1e-12, rule
        assert result.expected_tokens == pytest.approx(1.0, abs=1e-12), rule


@pytest.mark.parametrize("law", Law)
def test_rows_of_different_shapes_share_a_batch(law: Law) -> None:
    """What a ragged batch emits is what its rows emit alone, to the last prefix."""
    p, *q = (random_table(3, 4, seed) for seed in (11, 12, 13))
    if law is Law.CHAIN:
        shapes = [[-1, 0, PAD, 1, PAD], [-1, PAD, 0, 2, 3], [-1, PAD, PAD, PAD, PAD], [-1, 0, 1, 2, PAD]]
    else:
        shapes = [[-1, 0, 0, 1, 2], [-1, PAD, 0, 0, 0], [-1, PAD, PAD, PAD, PAD], [-1, 0, 1, PAD, 3]]
    alone = [grow(shape, law, p, *q) for shape in shapes]
    together = _stack(alone)
    for rule in lossless(law):
        result = outcomes(RULES[rule].function, together).emitted
        for length, emitted in enumerate(result):
            parts = [outcomes(RULES[rule].function, draws).emitted for draws in alone]
            expected = sum(part[length] for part in parts if length < len(part)) / len(parts)
            assert torch.allclose(emitted, torch.as_tensor(expected, dtype=emitted.dtype), atol=1e-14), rule


def _stack(parts: list[Draws]) -> Draws:
    """One batch of all rows, each part having the same share of the weight."""
    trees = [part.draft.tree for part in parts]
    qs = [part.draft.q for part in parts if part.draft.q is not None]
    tree = TokenTree(
        torch.cat([tree.tokens for tree in trees]),
        torch.cat([tree.parents for tree in trees]),
        depth=max(tree.depth for tree in trees),
    )
    draft = Draft(tree, parts[0].draft.law, torch.cat(qs) if qs else None)
    weights = torch.cat([part.weights for part in parts]) / len(parts)
    return Draws(draft, weights, torch.cat([part.p for part in parts]))


@pytest.mark.parametrize("law", Law)
def test_single_precision(law: Law) -> None:
    p, *q = (random_table(3, 4, seed, 0.3) for seed in (14, 15, 16))
    draws = grow([-1, 0, 1, 2] if law is Law.CHAIN else [-1, 0, 0, 1, 2], law, p, *q).to(torch.float32)
    for rule in lossless(law):
        assert loss(RULES[rule].function, draws, p) < 1e-6, rule


@pytest.mark.parametrize("law", Law)
@pytest.mark.parametrize("honest", [True, False], ids=["drawn", "picked_but_claims_q"])
def test_greedy_row_follows_its_one_hot(law: Law, honest: bool) -> None:
    """A one-hot target is followed whatever the siblings claim, and no right token is given away."""
    q = [random_table(3, 4, seed) for seed in (17, 18, 19)]
    ranks = [(t[:, 0] > 0.3).long()[:, None] for t in random_table(3, 4, 20)]  # now q's first, now its second
    best = [t.argsort(-1, descending=True).gather(1, r)[:, 0] for t, r in zip(q[0], ranks, strict=True)]
    p = [torch.nn.functional.one_hot(b, 3).double() for b in best]
    shape = [-1, 0, 1, 2] if law is Law.CHAIN else [-1, 0, 0, 1, 2]
    draws = grow(shape, law, p, *q) if honest else grow(shape, Law.FIXED, p, *q, claim=law)
    walk = outcomes(lambda p, draft, coins: verify(Target(p.argmax(-1), None), draft, coins), draws)
    assert walk.expected_tokens > 1.2
    for rule in lossless(law):
        result = outcomes(RULES[rule].function, draws)
        assert difference(result, p) < 1e-12, rule
        if honest and law in (Law.IID, Law.IID_MANY):  # of equal siblings the greedy walk takes the deeper one
            assert 1.0 < result.expected_tokens < walk.expected_tokens + 1e-9, rule
        else:
            assert result.expected_tokens == pytest.approx(walk.expected_tokens, abs=1e-6), rule


def grown_by_value(p: Table, q: Table, nodes: int, levels: int) -> Draws:
    """All drafts of a policy that looks at what it has drawn (DySpec, 2410.11744): the next sibling is drawn below the
    node with the largest probability of its path times the mass that its elders have left, wherever that is.

    Each draw is decided before it is made, and nothing drawn is left out.
    """
    vocabulary, size = p[0].shape[1], 1 + nodes
    tokens, parents, depth, prefix = (torch.zeros(1, size, dtype=torch.long) for _ in range(4))
    parents[:, 0] = -1
    value, mass = torch.zeros(1, size, dtype=torch.float64), torch.ones(1, size, dtype=torch.float64)
    value[:, 0] = 1.0
    said = torch.full((1, size, vocabulary), torch.nan, dtype=torch.float64)
    weights = torch.ones(1, dtype=torch.float64)
    for node in range(1, size):
        below = torch.where(depth < levels, value * mass, -1.0)
        parent = below[:, :node].argmax(1)
        row = torch.arange(len(parent))
        base = torch.stack([q[int(depth[r, m])][prefix[r, m]] for r, m in zip(row, parent, strict=True)])
        elders = torch.zeros_like(base)
        for other in range(1, node):
            elders[row, tokens[:, other]] += (parents[:, other] == parent).double()
        own = base * (elders == 0)
        own = own / own.sum(1, keepdim=True)
        row, token = own.nonzero(as_tuple=True)
        parent, drawn = parent[row], own[row]
        tokens, parents, depth, prefix, value, mass, said = (
            each[row].clone() for each in (tokens, parents, depth, prefix, value, mass, said)
        )
        weights = weights[row] * own[row, token]
        line = torch.arange(len(row))
        tokens[:, node], parents[:, node], said[:, node] = token, parent, drawn
        depth[:, node], prefix[:, node] = depth[line, parent] + 1, prefix[line, parent] * vocabulary + token
        value[:, node] = value[line, parent] * base[row, token]
        mass[line, parent] -= base[row, token]
    at_nodes = torch.stack(
        [
            torch.stack([p[int(d)][i] for d, i in zip(ds, places, strict=True)])
            for ds, places in zip(depth, prefix, strict=True)
        ]
    )
    return Draws(Draft(TokenTree(tokens, parents, depth=levels), Law.WITHOUT_REPLACEMENT, said), weights, at_nodes)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_where_to_draw_next_may_follow_from_what_was_drawn(rule: str, seed: int) -> None:
    p, q = random_table(3, 4, seed), random_table(3, 4, seed + 10)
    draws = grown_by_value(p, q, nodes=4, levels=3)
    shapes = {tuple(parents) for parents in draws.draft.tree.parents.tolist()}
    assert len(shapes) > 3, "the shape has to depend on what was drawn"
    assert float(draws.weights.sum()) == pytest.approx(1.0)
    assert loss(RULES[rule].function, draws, p) < 1e-12
