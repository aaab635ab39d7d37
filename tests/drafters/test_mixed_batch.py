"""Greedy rows beside sampled ones: each is drafted for as it would be among its own kind."""

import functools

import pytest
import torch

import specs
import tiny
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Drafter, Plan
from foredraft.core.rng import HashedRng, Noise
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.tree import TokenTree
from foredraft.core.verify import greedy, rule_of
from foredraft.engine.policy import Constant
from foredraft.model.hf.causal_lm import CausalLM
from oracle import SPECS, function_of
from reference import reference

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=1.0, top_k=9, seed=0)
PARAMS = [SAMPLED, GREEDY, SAMPLED, GREEDY]
TEXTS = tiny.prompts((5, 9, 3, 7), seed=3)
SIZES = {"vocab_size": tiny.VOCAB, "num_hidden_layers": 2}


@functools.cache
def model(seed: int) -> CausalLM:
    return CausalLM(tiny.build("llama", seed=seed, spread=1.0, **SIZES))


CHAIN, SPECINFER = "draft_model:draft", "specinfer:draft,expansion=3x2x1"
TREES = ("draft_model:draft,branching=3x2x1", SPECINFER, "specinfer:draft+other,expansion=2x1x1")


def drafter(spec: str) -> Drafter:
    return specs.build(spec, model(1), {"draft": model(2), "other": model(3)})


def proposed(spec: str, lines: list[int], params: list[SamplingParams], confidence: float = 0.0) -> Draft:
    """The first draft for these lines of the table alone."""
    texts, fresh = [TEXTS[line] for line in lines], drafter(spec)
    tiny.admit(fresh, texts)
    view = tiny.view(texts, params, seeds=[7 + line for line in lines], draws=True)
    return fresh.propose(view, Plan((3,) * len(texts), confidence=confidence))


def paths(draft: Draft, row: int) -> set[tuple[int, ...]]:
    return set(tiny.paths(draft.tree, row).values())


@pytest.mark.parametrize("spec", TREES)
def test_each_row_has_the_tree_that_it_has_among_its_own_kind(spec: str):
    mixed = proposed(spec, [0, 1, 2, 3], PARAMS)
    greedy, sampled = proposed(spec, [1, 3], [GREEDY] * 2), proposed(spec, [0, 2], [SAMPLED] * 2)
    assert mixed.law is sampled.law and mixed.q is not None and sampled.q is not None
    for own, row in enumerate((1, 3)):
        assert paths(mixed, row) == paths(greedy, own)
        assert len(paths(mixed, row)) > 7, "a chain, which this is not about"
        valid = mixed.tree.valid[row].nonzero()[1:, 0]
        assert (mixed.q[row, valid, mixed.tree.tokens[row, valid]] == 1.0).all()
        assert (mixed.q[row, valid].sum(-1) == 1.0).all()
    for own, row in enumerate((0, 2)):
        assert torch.equal(mixed.tree.tokens[row], sampled.tree.tokens[own])
        assert torch.equal(mixed.tree.parents[row], sampled.tree.parents[own])
        assert torch.allclose(mixed.q[row, 1:], sampled.q[own, 1:], atol=1e-5)


@pytest.mark.parametrize(
    ("rule", "law"),
    [
        (name, law)
        for name in SPECS
        for law in (Law.WITHOUT_REPLACEMENT, Law.IID, Law.IID_MANY)
        if law in rule_of(name).laws
    ],
)
def test_under_every_rule_picked_siblings_are_followed_to_the_end(rule: str, law: Law):
    rows, vocab = 4000, 4
    generator = torch.Generator().manual_seed(1)
    parents = torch.tensor([-1, 0, 0, 0, 1, 1, 2, 4, 4, 6]).expand(rows, -1)
    order = torch.rand(rows, 10, vocab, generator=generator).argsort(-1)  # of the children of each node, best first
    rank = torch.tensor([0, 0, 1, 2, 0, 1, 0, 0, 1, 0])
    tokens = order[torch.arange(rows)[:, None], parents.clamp(min=0), rank]
    q = torch.nn.functional.one_hot(tokens, vocab).float()
    best = torch.randint(vocab, (rows, 10), generator=generator)
    p = torch.nn.functional.one_hot(best, vocab).float()
    draft = Draft(TokenTree(tokens, parents, depth=3), law, q)
    coins = HashedRng(Noise(torch.arange(rows), torch.ones(rows, dtype=torch.long)))
    found, wanted = function_of(rule)(p, draft, coins), greedy(best, draft.tree)
    assert torch.equal(found.path, wanted.path) and torch.equal(found.bonus, wanted.bonus)
    assert set(wanted.accepted().tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        *[(spec, rule) for spec in TREES for rule in ("traversal", "recursive", "target_sampling")],
        (SPECINFER, "kseq"),
    ],
)
def test_greedy_texts_are_those_of_the_row_alone(spec: str, rule: str):
    g = tiny.generator(model(1), drafter(spec), Constant(3), rule=rule)
    params = [SamplingParams(max_new_tokens=16, temperature=p.temperature, seed=4) for p in PARAMS]
    sequences = [g.submit([text], own)[0] for text, own in zip(TEXTS, params, strict=True)]
    g.engine.run(sequences)
    for line in (1, 3):
        assert sequences[line].tokens == reference(model(1), TEXTS[line], params[line])


def test_a_greedy_chain_ends_at_its_unsure_token_beside_sampled_rows_too():
    ends = set()
    for confidence in (0.05, 0.1, 0.2, 0.3, 0.5, 0.9):
        mixed = proposed(CHAIN, [0, 1, 2, 3], PARAMS, confidence)
        greedy = proposed(CHAIN, [1, 3], [GREEDY] * 2, confidence)
        sampled = proposed(CHAIN, [0, 2], [SAMPLED] * 2, confidence)
        assert mixed.scores is not None and greedy.scores is not None
        for alone, lines in ((greedy, (1, 3)), (sampled, (0, 2))):
            assert alone.scores is not None
            for own, row in enumerate(lines):
                assert paths(mixed, row) == paths(alone, own)
                valid = alone.tree.valid[own].nonzero()[:, 0]
                assert torch.allclose(mixed.scores[row, valid], alone.scores[own, valid], atol=1e-4)
        ends |= set(greedy.tree.valid.sum(1).tolist())
    assert len(ends) > 1
