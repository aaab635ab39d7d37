"""Rules that change the law by design: typical acceptance, and blockwise decoding's approximate acceptance."""

import math

import pytest
import torch

from foredraft.core.draft import Draft, Law, Target, Verdict
from foredraft.core.errors import OptionError
from foredraft.core.rng import HashedRng, Noise
from foredraft.core.tree import PAD, TokenTree
from foredraft.core.verify import DEFAULT, RULES, rule_of, verify
from oracle import Draws, EnumeratingRng, function_of, grow, loss, random_table

P, Q = random_table(3, 4, 31), random_table(3, 4, 32)
TREE = [-1, 0, 0, 1, 1, 2]
SPECS = ("typical", "approximate,top_k=2", "approximate,distance=1,ordered=0x2", "approximate,min_block=2")


def test_lossy_rules_are_marked_and_change_the_law() -> None:
    assert [name for name, rule in RULES.items() if not rule.lossless] == ["typical", "approximate"]
    assert rule_of(DEFAULT).lossless
    for spec in SPECS:
        assert not rule_of(spec).lossless
        for law in (Law.FIXED, Law.WITHOUT_REPLACEMENT):
            assert loss(function_of(spec), grow(TREE, law, P, Q), P) > 0.05, spec


# ---- typical acceptance


@pytest.mark.parametrize(
    ("spec", "epsilon", "delta"),
    [("typical", 0.09, 0.3), ("typical,epsilon=0.25", 0.25, 0.5), ("typical,epsilon=0.3,delta=0.9", 0.3, 0.9)],
)
def test_typical_acceptance_is_the_papers(spec: str, epsilon: float, delta: float) -> None:
    picked = grow(TREE, Law.FIXED, P, Q)
    path = function_of(spec)(picked.p, picked.draft, EnumeratingRng(torch.zeros(1, 0), 3)).path
    assert path.tolist() == [_typical_path(picked, epsilon, delta)]


def _typical_path(draws: Draws, epsilon: float, delta: float) -> list[int]:
    """The longest chain of typical tokens, then the likeliest, by Medusa's threshold, node by node."""
    tree, p = draws.draft.tree, draws.p[0].tolist()
    best = (0, 1.0, [0])
    paths = {0: (0, 1.0, [0])}
    for node, (parent, token) in enumerate(zip(tree.parents[0].tolist(), tree.tokens[0].tolist(), strict=True)):
        if node == 0 or parent not in paths:
            continue
        entropy = -sum(x * math.log(x) for x in p[parent] if x > 0)
        if p[parent][token] > min(epsilon, delta * math.exp(-entropy)):
            depth, chance, path = paths[parent]
            paths[node] = (depth + 1, chance * p[parent][token], [*path, node])
            best = max(best, paths[node])
    return best[2] + [-1] * (tree.depth + 1 - len(best[2]))


@pytest.mark.parametrize(
    ("spec", "parents", "tokens", "path"),
    [
        ("typical", [-1, 0], [0, 1], [0, 1]),  # .1 passes by epsilon .09
        ("typical", [-1, 0], [0, 2], [0, -1]),
        ("typical", [-1, 0, 0], [0, 1, 0], [0, 2]),  # of two siblings the likelier is taken
        ("typical", [-1, 0, 0], [0, 0, 1], [0, 1]),
        ("typical,epsilon=0.2", [-1, 0], [0, 1], [0, -1]),  # delta .447 exp(-.518) = .266: epsilon decides
        ("typical,epsilon=0.2,delta=0.1", [-1, 0], [0, 1], [0, 1]),  # .0596
        ("typical,epsilon=0.04", [-1, 0], [0, 2], [0, 1]),
        ("typical,epsilon=0", [-1, 0], [0, 2], [0, 1]),
    ],
)
def test_typical_threshold_and_ties(spec: str, parents: list[int], tokens: list[int], path: list[int]) -> None:
    """min(epsilon, delta exp(-H)) at the law .85, .1, .05, whose entropy is .518."""
    p = torch.tensor([0.85, 0.1, 0.05], dtype=torch.float64).expand(1, len(tokens), 3)
    tree = TokenTree(torch.tensor([tokens]), torch.tensor([parents]), depth=1)
    coins = EnumeratingRng(torch.zeros(1, 0), 3)
    assert function_of(spec)(p, Draft(tree, Law.FIXED), coins).path.tolist() == [path]


# ---- approximate acceptance: tokens a = 0, b = 1, c = 2, d = 3

LOGITS = {
    "after x": [4.0, 3.0, 2.0, 1.0],
    "after a": [1.0, 2.0, 4.0, 3.0],
    "after b": [1.0, 4.0, 2.0, 3.0],
    "after c": [3.0, 1.0, 2.0, 4.0],
}


def greedy(spec: str, tokens: list[int], parents: list[int] | None = None) -> tuple[list[int], int]:
    """Emitted tokens of one greedy row by a draft after the root x, and the number of accepted ones."""
    verdict, tree = verdict_of(spec, [tokens], [parents or list(range(-1, len(tokens) - 1))])
    emitted = [token for token in verdict.emitted(tree)[0].tolist() if token >= 0]
    return emitted, int(verdict.accepted())


def verdict_of(spec: str, tokens: list[list[int]], parents: list[list[int]]) -> tuple[Verdict, TokenTree]:
    rows = [[LOGITS["after x"], *([LOGITS[f"after {'abca'[t]}"] for t in row[1:]])] for row in tokens]
    scores = torch.tensor(rows)
    tree = TokenTree(torch.tensor(tokens), torch.tensor(parents), depth=len(tokens[0]) - 1)
    noise = Noise(torch.arange(len(tokens)), torch.full((len(tokens),), 5))
    target = Target(scores.argmax(-1), None, None, scores)
    return verify(target, Draft(tree, Law.FIXED), HashedRng(noise), spec), tree


@pytest.mark.parametrize(
    ("spec", "draft", "emitted", "accepted"),
    [
        (DEFAULT, [9, 0, 2], [0, 2, 3], 2),  # x a c, then d
        (DEFAULT, [9, 1, 1], [0], 0),
        ("approximate,top_k=2", [9, 1, 1], [1, 1, 1], 2),  # b is second after x, and first after b
        ("approximate,top_k=2", [9, 2, 0], [0], 0),  # c is third
        ("approximate,top_k=3", [9, 2, 0], [2, 0, 2], 2),
        ("approximate,top_k=2", [9, 0, 0], [0, 2], 1),  # a is last after a
        ("approximate,top_k=99", [9, 3, 0], [3, 0, 2], 2),
        ("approximate,min_block=2", [9, 3, 0], [3, 2], 1),  # d is taken, and then the target's own token
        ("approximate,min_block=2", [9, 0, 1], [0, 2], 1),  # the exact token is enough
        ("approximate,min_block=3", [9, 3, 0], [3, 0, 2], 2),
        ("approximate,min_block=9", [9, 3, 0], [3, 0, 2], 2),  # as far as the draft goes
        ("approximate,top_k=2,min_block=2", [9, 2, 2], [2, 3], 1),  # c by force; c is third after c
        ("approximate,distance=1,ordered=0x3", [9, 1, 2], [1, 2, 3], 2),  # a is the best after x, b after b
        ("approximate,distance=1,ordered=0x3", [9, 2, 2], [0], 0),
        ("approximate,distance=2,ordered=0x3", [9, 2, 2], [2, 2, 3], 2),
        ("approximate,distance=1,ordered=1x3", [9, 1, 2], [0], 0),  # a is not ordered
    ],
)
def test_greedy_rows_by_hand(spec: str, draft: list[int], emitted: list[int], accepted: int) -> None:
    assert greedy(spec, draft) == (emitted, accepted)


def test_a_tree_takes_the_targets_token_first_and_then_the_likeliest() -> None:
    siblings = [-1, 0, 0, 0]
    assert greedy("approximate,top_k=3", [9, 2, 1, 0], siblings) == ([0, 2], 1)
    assert greedy("approximate,top_k=3", [9, 2, 1, 3], siblings) == ([1, 1], 1)
    assert greedy("approximate,top_k=2", [9, 2, 3, 2], siblings) == ([0], 0)
    assert greedy("approximate,min_block=2", [9, 3, 2, 3], siblings) == ([2, 3], 1)
    assert greedy("approximate,top_k=2", [9, 1, 0, 2], [-1, 0, 0, 2]) == ([0, 2, 3], 2)


def test_rows_of_a_batch_and_padding() -> None:
    tokens, parents = [[9, 1, 1], [9, 3, 0], [9, 0, 2], [9, 1, 1]], [[-1, 0, 1], [-1, 0, 1], [-1, 0, 1], [-1, 0, PAD]]
    verdict, tree = verdict_of("approximate,top_k=2", tokens, parents)
    assert verdict.path.tolist() == [[0, 1, 2], [0, -1, -1], [0, 1, 2], [0, 1, -1]]
    assert verdict.emitted(tree).tolist() == [[1, 1, 1], [0, -1, -1], [0, 2, 3], [1, 1, -1]]


def test_a_banned_token_never_passes() -> None:
    scores = torch.tensor([[[4.0, 3.0, -torch.inf, 2.0], [1.0, 0.0, 0.0, 0.0]]])
    tree = TokenTree.chain(torch.tensor([[9, 2]]))
    noise = Noise(torch.tensor([0]), torch.tensor([0]))
    for spec in ("approximate,top_k=4", "approximate,min_block=2", "approximate,distance=3,ordered=0x3"):
        target = Target(scores.argmax(-1), None, None, scores)
        verdict = verify(target, Draft(tree, Law.FIXED), HashedRng(noise), spec)
        assert verdict.path.tolist() == [[0, -1]] and verdict.bonus.tolist() == [0]


def test_a_sampled_row_beside_a_greedy_one() -> None:
    """The sampled row accepts by p and its draw; the greedy one by its scores, though its p is one-hot."""
    scores = torch.tensor([[LOGITS["after x"], LOGITS["after b"]]] * 2)
    hot = torch.nn.functional.one_hot(scores[:1].argmax(-1), 4).float()
    p = torch.cat([scores[:1].softmax(-1), hot])
    tree = TokenTree.chain(torch.tensor([[9, 1], [9, 1]]))
    for seed in range(20):
        noise = Noise(torch.tensor([seed, seed]), torch.tensor([7, 7]))
        target = Target(scores.argmax(-1), p, None, scores)
        found = verify(target, Draft(tree, Law.FIXED), HashedRng(noise), "approximate,top_k=2")
        assert found.path.tolist() == [[0, 1], [0, 1]] and int(found.bonus[1]) == 1
        exact = verify(target, Draft(tree, Law.FIXED), HashedRng(noise))
        near = verify(target, Draft(tree, Law.FIXED), HashedRng(noise), "approximate,distance=1,ordered=0x3")
        drawn = int(exact.emitted(tree)[0, 0])
        assert (int(near.accepted()[0]) == 1) == (abs(drawn - 1) <= 1)
        assert near.bonus[0] == (drawn if drawn == 3 else found.bonus[0])


def test_without_a_guess_that_passes_it_is_target_sampling() -> None:
    """min_block=1 and a distance that no other token has: the law is the target's."""
    assert loss(function_of("approximate,distance=1,ordered=7x9"), grow(TREE, Law.FIXED, P, Q), P) < 1e-12


# ---- specs


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("tipical", "Unknown verifier 'tipical'. Did you mean typical?"),
        ("block,epsilon=1", "The verifier block has no options: leave out epsilon=1."),
        ("typical,alpha=1", "Unknown option of typical 'alpha'. Known: delta, epsilon."),
        ("typical,epsilon=2", "epsilon must be 1 or less, not 2.0."),
        ("typical,delta=-1", "delta must be 0 or more, not -1.0."),
        ("typical,epsilon=nan", "epsilon must be 0 or more, not nan."),
        ("typical,epsilon", "The option 'epsilon' is not of the form option=value."),
        ("typical,epsilon=much", "The option epsilon must be a number, not 'much'."),
        ("approximate", "approximate needs top_k or min_block above 1, or a distance, such as approximate,top_k=2: "),
        ("approximate,top_k=1", "approximate needs top_k or min_block above 1, or a distance"),
        ("approximate,top_k=0", "top_k must be 1 or more, not 0."),
        ("approximate,distance=2", "distance compares token ids, whose order means nothing in a text vocabulary"),
        ("approximate,ordered=3x9", "ordered is for distance"),
        ("approximate,distance=2,ordered=9x3", "ordered must be the first and the last id, such as 3x258"),
        ("approximate,distance=2,ordered=3", "ordered must be the first and the last id, such as 3x258"),
        ("approximate,distance=2,ordered=a", "The option ordered must be whole numbers, such as 4x2x1, not 'a'."),
    ],
)
def test_a_wrong_spec_is_refused_in_a_sentence(spec: str, said: str) -> None:
    with pytest.raises(OptionError) as caught:
        rule_of(spec)
    assert str(caught.value).startswith(said) and str(caught.value).endswith(".")
