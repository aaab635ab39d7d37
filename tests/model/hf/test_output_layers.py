"""Targets that read more tokens than they generate: an output layer with fewer rows than the embedding."""

import functools

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import foredraft
import tiny
from foredraft.core.errors import PromptError
from foredraft.core.sampling.params import SamplingParams
from foredraft.model.hf.head_parts import parts_of

ROWS, READ = 96, 128


@functools.cache
def narrow() -> LlamaForCausalLM:
    model = tiny.build("llama", seed=3, vocab_size=READ)
    model.lm_head = nn.Linear(model.config.hidden_size, ROWS, bias=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        nn.init.normal_(model.lm_head.weight, std=0.5)
    return model


def prompts() -> list[list[int]]:
    body = [100, 101, 5, 6, 110, 7, 8, 127, 9, 10]
    return [body * 4, [5, 6, 7] * 4, [127]]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    "drafter", ["none", "prompt_lookup", "lookahead", "draft_model", "early_exit,assistant_early_exit=1"]
)
def test_prompts_may_have_tokens_that_are_never_generated(drafter: str, fast: bool):
    model = narrow()
    given = ("draft_model", tiny.build("llama", seed=3, vocab_size=READ)) if drafter == "draft_model" else drafter
    with foredraft.load(model, given, fast=fast) as g:
        results = g.generate(prompts(), max_new_tokens=12)
        sampled = g.generate(prompts(), max_new_tokens=12, temperature=1.5, repetition_penalty=1.3, seed=1, top_k=90)
        with pytest.raises(PromptError, match="vocabulary of 128"):
            g.generate([128], max_new_tokens=1)
    for prompt, result in zip(prompts(), results, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert result.tokens == expected[0, len(prompt) :].tolist()
    with foredraft.load(model, "none", fast=fast) as g:
        options = SamplingParams(max_new_tokens=12, temperature=1.5, repetition_penalty=1.3, seed=1, top_k=90)
        assert [r.tokens for r in sampled] == [r.tokens for r in g.generate(prompts(), options)]
    assert all(token < ROWS for result in sampled for token in result.tokens)


def test_inside_transformers_generate():
    prompt = torch.tensor([prompts()[0]])
    plain = narrow().generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    drafted = narrow().generate(
        prompt,
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
        custom_generate=foredraft.speculative("prompt_lookup"),
    )
    assert torch.equal(plain, drafted)


def test_heads_get_logits_of_the_same_width():
    parts = parts_of(narrow())
    logits = parts.head(torch.randn(2, narrow().config.hidden_size))
    assert logits.shape == (2, parts.vocab_size) and logits[:, :ROWS].isfinite().all()
    assert (logits[:, ROWS:] == -torch.inf).all()
