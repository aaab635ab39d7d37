"""Lossy rules in the loop: each step of a batch follows its rule, drafts are the likeliest tokens."""

import pytest

import foredraft
from foredraft.core.sampling.params import SamplingParams
from native import needs_compiler
from runs import run_each

PROMPTS = ["Once upon a time there was", "def fibonacci(n):", "The capital of France is", "1 2 3 4 5"]
DRAFTER = "blockwise:sample-medusa,num_assistant_tokens_schedule=constant"


@pytest.mark.parametrize("weights", [None, pytest.param("int8", marks=needs_compiler)])
def test_greedy_steps_accept_the_best_three(weights: str | None):
    """Against the scores of the finished texts: accepted tokens are among the best three, and the next one is not."""
    exact = foredraft.load("sample", DRAFTER, weights=weights)
    lossy = foredraft.load(exact, DRAFTER, verifier="approximate,top_k=3")
    found = lossy.generate(PROMPTS, max_new_tokens=40, record_steps=True)
    others = rejected = 0
    for prompt, result in zip(PROMPTS, found, strict=True):
        tokens = lossy.encode(prompt)
        best = [list(each.top) for each in lossy.score([*tokens, *result.tokens], top=3)[len(tokens) :]]
        place = 0
        for step in result.steps:
            assert step.path == list(range(1, len(step.path) + 1)), "a chain"
            assert step.tokens[1 : len(step.path) + 1] == step.emitted[:-1]
            for number, token in enumerate(step.emitted):
                allowed = best[place + number][: 3 if number < len(step.path) else 1]
                assert token in allowed
                others += token != allowed[0]
            if len(step.path) + 1 < len(step.tokens):
                rejected += 1
                assert step.tokens[len(step.path) + 1] not in best[place + len(step.path)]
            place += len(step.emitted)
        assert place == len(result.tokens) and not result.stats.lossless
    assert others and rejected
    plain = exact.generate(PROMPTS, max_new_tokens=40)
    assert sum(each.stats.target_forwards for each in found) < sum(each.stats.target_forwards for each in plain)
    assert all(each.stats.lossless for each in plain) and exact.kind.lossless and not lossy.kind.lossless


@pytest.mark.parametrize("weights", [None, pytest.param("int8", marks=needs_compiler)])
@pytest.mark.parametrize("verifier", ["approximate,top_k=3", "approximate,top_k=3,min_block=2", "typical"])
def test_greedy_rows_beside_sampled_ones_have_the_texts_that_they_have_alone(verifier: str, weights: str | None):
    """Also where the sampled rows keep fewer tokens than pass."""
    with foredraft.load("sample", DRAFTER, verifier=verifier, weights=weights) as generator:
        alone = generator.generate(PROMPTS, max_new_tokens=24)
        params = [SamplingParams(max_new_tokens=24, temperature=t, top_k=2, seed=3) for t in (0.0, 1.0, 0.0, 0.7)]
        mixed = run_each(generator, [generator.encode(prompt) for prompt in PROMPTS], params)
    for row in (0, 2):
        assert mixed[row].tokens == alone[row].tokens
    assert all(mixed[row].tokens != alone[row].tokens for row in (1, 3))


def test_sampled_drafts_are_the_likeliest_tokens():
    """The exact rule's drafts follow the noise of the seed; those of lossy rules are the heads' best guesses."""
    exact = foredraft.load("sample", DRAFTER)
    greedy = exact.generate(PROMPTS[0], max_new_tokens=8, record_steps=True).steps[0].tokens
    for verifier, same in ((None, False), ("typical", True), ("approximate,min_block=2", True)):
        with foredraft.load(exact, DRAFTER, verifier=verifier) as generator:
            drafts = [
                generator.generate(PROMPTS[0], max_new_tokens=8, temperature=1, seed=seed, record_steps=True)
                for seed in range(4)
            ]
        assert all(each.steps[0].tokens == greedy for each in drafts) == same


def test_a_step_emits_the_smallest_block_at_least():
    with foredraft.load("sample", DRAFTER, verifier="approximate,min_block=3") as generator:
        for temperature in (0, 1):
            for result in generator.generate(PROMPTS, max_new_tokens=30, temperature=temperature, record_steps=True):
                for step in result.steps[:-1]:
                    assert len(step.emitted) >= min(3, len(step.tokens)), step
