"""Cascades on whole models and by specification; the law of what they draft is ``engine/test_inner.py``'s matter."""

import functools

import pytest

import foredraft
import specs
import tiny
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Constant
from foredraft.model.hf.causal_lm import CausalLM
from reference import reference

PROMPTS = tiny.prompts((1, 5, 17))


def test_greedy_texts_are_the_references_at_every_depth():
    target, near, far = (CausalLM(tiny.build("llama", seed=seed)) for seed in (3, 5, 6))
    expected = [reference(target, prompt, SamplingParams(max_new_tokens=24)) for prompt in PROMPTS]
    low = "cascade:far+[max_gram,num_assistant_tokens=3,bigrams=yes],num_assistant_tokens=3"
    high = f"cascade:near+[{low}],num_assistant_tokens=4,inner_tokens=2"
    for spec in (low, high, f"cascade:target+[{high}],num_assistant_tokens=6"):
        drafter = specs.build(spec, target, {"near": near, "far": far})
        results = tiny.generator(target, drafter, Constant(6)).generate(PROMPTS, max_new_tokens=24)
        assert [result.tokens for result in results] == expected
        assert sum(result.stats.drafted for result in results) > 0


def test_a_cascade_drafts_what_its_middle_drafts_alone():
    """Greedy: the same tokens drafted and accepted as by a draft model's chain, whatever drafts inside."""
    target, middle, small = (CausalLM(tiny.build("llama", seed=seed, vocab_size=6)) for seed in (3, 5, 6))
    part = "[draft_model:small,num_assistant_tokens=2]"
    prompts = tiny.prompts((1, 5, 17), vocab=6)
    found = []
    for spec in ("draft_model:middle,num_assistant_tokens=4", f"cascade:middle+{part},num_assistant_tokens=4"):
        drafter = specs.build(spec, target, {"middle": middle, "small": small})
        results = tiny.generator(target, drafter, Constant(4, confidence=1e-9)).generate(prompts, max_new_tokens=40)
        found.append([(r.tokens, r.stats.drafted, r.stats.accepted) for r in results])
    assert found[0] == found[1] and any(0 < accepted < drafted for _, drafted, accepted in found[0])


SAID_TO = ["def add(", "import os\n\n\ndef read_lines(path):"]
LENGTHS = {"max_new_tokens": 12, "min_new_tokens": 12}


@functools.cache
def sample() -> tuple[Generator, list[list[int]]]:
    """The bundled model, and what it says."""
    plain = foredraft.load("sample", "none", dtype="float32", device="cpu")
    return plain, [result.tokens for result in plain.batch(SAID_TO, **LENGTHS)]


@pytest.mark.parametrize(
    "spec",
    [
        "cascade:sample-draft+max_gram",
        "cascade:sample-draft+[cascade:sample-draft+prompt_lookup],num_assistant_tokens=5",
        "cascade:sample-draft+[draft_model:sample-draft,num_assistant_tokens=3],inner_tokens=2",
        "cascade:sample-draft+[relay:[draft_model:sample-draft,num_assistant_tokens=2]+[max_gram]]",
        "relay:[draft_model:sample-draft,num_assistant_tokens=3]+[max_gram,num_assistant_tokens=4]",
    ],
)
def test_specs(spec: str):
    plain, expected = sample()
    nested = foredraft.load(plain.engine.target, spec, tokenizer=plain.tokenizer.inner, policy=Constant(4))
    assert [result.tokens for result in nested.batch(SAID_TO, **LENGTHS)] == expected
    sampled = nested.batch(SAID_TO, temperature=1.0, seed=0, **LENGTHS)
    seeds = (result.seed for result in sampled)
    alone = [nested.generate(p, temperature=1.0, seed=s, **LENGTHS).tokens for p, s in zip(SAID_TO, seeds, strict=True)]
    assert [result.tokens for result in sampled] == alone and sum(result.stats.accepted for result in sampled) > 0


@pytest.fixture(scope="module")
def slim(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a model whose vocabulary is not padded as the target's is."""
    folder = str(tmp_path_factory.mktemp("slim"))
    tokenizer = tiny.tokenizer()
    tiny.build("llama", seed=5, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "inner",
    [
        "early_exit,assistant_early_exit=1",
        "layer_skip,skip_mlp=0",
        "partial",
        "sequoia:SLIM,nodes=4,depth=2,acceptance=0.5/0.2",
        "universal:SLIM,method=tli",
        "specinfer:SLIM+SLIM",
    ],
)
def test_inside_a_narrower_middle_laws_are_as_wide_as_the_targets(inner: str, slim: str):
    tokenizer = tiny.tokenizer()
    target = tiny.build("llama", vocab_size=len(tokenizer) + 7)
    spec = f"cascade:{slim}+[{inner.replace('SLIM', slim)}],num_assistant_tokens=5"
    g = foredraft.load(target, spec, tokenizer=tokenizer, policy=Constant(5))
    prompts = [*PROMPTS, [len(tokenizer) + 3, 5, len(tokenizer) + 6]]  # also of padding, which the middle cannot read
    for temperature in (0.0, 1.0):
        results = g.generate(prompts, max_new_tokens=12, temperature=temperature, seed=1)
        assert sum(result.stats.drafted for result in results) > 0
        assert all(len(result.tokens) == 12 or result.finish_reason == "stop" for result in results)
    g.close()
