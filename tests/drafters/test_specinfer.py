"""SpecInfer: merged trees are exact under every rule, and accept more than trees apart."""

from dataclasses import replace

import pytest
import torch

import tiny
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Plan
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.tree import PAD, TokenTree, merge_duplicates
from foredraft.core.verify import RULES
from foredraft.drafters.specinfer import Options, SpecInfer, _joined
from foredraft.engine.policy import Constant
from foredraft.model.hf.causal_lm import CausalLM
from oracle import Draws, grow, loss, outcomes, random_table

PAIR = [-1, 0, 1, 0, 3]
"""Two models, each a chain of two below the root: all of the first one's nodes, then the second's."""
BUSHES = [-1, 0, 1, 1, 0, 4, 4]


def merged(draws: Draws, twins: bool = True) -> Draws:
    return replace(draws, draft=replace(draws.draft, tree=merge_duplicates(draws.draft.tree, keep_duplicates=twins)))


@pytest.mark.parametrize("shape", [PAIR, BUSHES, [-1, 0, 0, 1, 2, 2]], ids=["chains", "bushes", "siblings"])
@pytest.mark.parametrize("rule", ["recursive", "traversal", "target_sampling"])
def test_a_merged_tree_is_exact(shape: list[int], rule: str):
    p, *q = (random_table(3, 3, seed, zeros) for seed, zeros in ((1, 0.0), (2, 0.2), (3, 0.0)))
    assert loss(RULES[rule].function, merged(grow(shape, Law.IID_MANY, p, *q)), p) < 1e-12


def test_one_model_merged_with_itself_is_exact_under_k_seq():
    p, q = (random_table(3, 3, seed, 0.2) for seed in (1, 2))
    for shape in (BUSHES, [-1, 0, 0, 0, 1, 2, 3]):
        assert loss(RULES["kseq"].function, merged(grow(shape, Law.IID, p, q)), p) < 1e-12


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_three_models_and_three_levels(rule: str):
    p, *q = (random_table(2, 4, seed) for seed in (4, 5, 6, 7))
    draws = merged(grow([-1, 0, 1, 2, 0, 4, 5, 0, 7, 8], Law.IID_MANY, p, *q))
    assert loss(RULES[rule].function, draws, p) < 1e-12


def test_this_sum_sees_a_draft_whose_models_are_mistaken_for_each_other():
    p, *q = (random_table(3, 3, seed) for seed in (1, 2, 3))
    lie = merged(grow(BUSHES, Law.IID_MANY, p, *q, claim=Law.IID))
    for rule in ("recursive", "traversal"):
        assert loss(RULES[rule].function, lie, p) > 1e-3


@pytest.mark.parametrize("seed", [8, 18, 28])
def test_merging_accepts_more_and_traversal_most(seed: int):
    p, *q = (random_table(3, 4, seed + i) for i in range(3))
    draws = grow([-1, 0, 1, 2, 0, 4, 5], Law.IID_MANY, p, *q)
    apart, together = (
        {rule: outcomes(RULES[rule].function, each).expected_tokens for rule in ("recursive", "traversal")}
        for each in (draws, merged(draws))
    )
    assert all(together[rule] > apart[rule] + 1e-3 for rule in together)
    assert together["traversal"] > together["recursive"] + 1e-3


def test_trees_of_several_sizes_and_depths_are_joined():
    """With shared noise a sampled row's trees differ in shape: each child keeps its parent."""
    chain = TokenTree.chain(torch.tensor([[9, 1, 2, 3]]))
    bush = TokenTree(torch.tensor([[9, 4, 5]]), torch.tensor([[-1, 0, 1]]), depth=2)
    for trees in ([chain, bush, bush], [bush, chain, bush], [bush, bush, chain]):
        whole = _joined([Draft(tree, Law.FIXED) for tree in trees]).tree
        tokens, parents = whole.tokens[0].tolist(), whole.parents[0].tolist()
        above = {token: tokens[parent] for token, parent in zip(tokens[1:], parents[1:], strict=True)}
        assert above == {1: 9, 2: 1, 3: 2, 4: 9, 5: 4} and whole.depth == 3


def test_children_of_twins_go_to_the_first():
    tokens = torch.tensor([[9, 5, 6, 5, 7, 5, 8, 7, 1]])
    parents = torch.tensor([[-1, 0, 1, 0, 3, 0, 5, PAD, 4]])
    tree = merge_duplicates(TokenTree(tokens, parents, depth=3), keep_duplicates=True)
    assert tree.parents.tolist() == [[-1, 0, 1, 0, 1, 0, 1, PAD, 4]]
    assert merge_duplicates(TokenTree(tokens, parents, depth=3), keep_duplicates=False).parents.tolist() == [
        [-1, 0, 1, PAD, 1, PAD, 1, PAD, 4]
    ]
    deep = TokenTree(torch.tensor([[9, 1, 2, 3, 1, 2, 4]]), torch.tensor([[-1, 0, 1, 2, 0, 4, 5]]), depth=3)
    assert merge_duplicates(deep, keep_duplicates=False).parents.tolist() == [[-1, 0, 1, 2, PAD, PAD, 2]]


def proposed(models: list[CausalLM], params: SamplingParams, options: Options) -> Draft:
    drafter = SpecInfer(options, models, tiny.VOCAB)
    texts = tiny.prompts((3, 9))
    tiny.admit(drafter, texts)
    return drafter.propose(tiny.view(texts, params, seeds=(21, 63), draws=True), Plan((3, 3)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_model_drafts_as_it_does_alone(temperature: float):
    models = [CausalLM(tiny.build("llama", seed=seed)) for seed in (3, 5)]
    options = Options(expansion=(2, 2, 1), merge=False)
    params = SamplingParams(temperature=temperature)
    both = proposed(models, params, options)
    assert both.tree.tokens.shape[1] == 1 + 2 * 10
    first = proposed(models[:1], params, options).tree
    assert torch.equal(both.tree.tokens[:, :11], first.tokens)
    if temperature:
        assert torch.equal(both.tree.parents[:, :11], first.parents) and both.law is Law.IID_MANY
        return
    second = proposed(models[1:], params, options).tree
    wanted = [paths(tree, row) for tree in (first, second) for row in range(2)]
    assert [paths(both.tree, row) for row in range(2)] == [wanted[0] | wanted[2], wanted[1] | wanted[3]]


def paths(tree: TokenTree, row: int) -> set[tuple[int, ...]]:
    found = tiny.paths(tree, row)
    assert len(set(found.values())) == len(found), "a picked path stands there once"
    return set(found.values())


def test_of_two_drafts_one_is_the_target():
    """Whoever of them is right, nothing that it says is lost: every draft is accepted whole."""
    target, wrong = CausalLM(tiny.build("llama")), CausalLM(tiny.build("llama", seed=5))
    drafter = SpecInfer(Options(expansion=(1, 2, 1)), [wrong, target], target.vocab_size)
    g = tiny.generator(target, drafter, Constant(3))
    result = g.generate(tiny.prompts(), max_new_tokens=24)
    lengths = [r.stats.acceptance_length for r in result]
    assert min(lengths) == 4.0
