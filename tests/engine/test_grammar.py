"""Requests with grammars: the same texts with and without drafts, in mixed batches, to their ends."""

import functools
import json
import re
from typing import Any

import pytest
import torch

import foredraft
import runs
import tiny
from dialects import toy
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Drafter, Plan, View
from foredraft.core.errors import NumericsError, OptionError
from foredraft.core.sampling.grammar import Grammar
from foredraft.core.tree import TokenTree
from foredraft.engine import step, tail
from foredraft.engine.generator import Generator
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.recording.recorder import Compiled

LETTERS = [chr(ord("a") + i) for i in range(26)] + ["1", "2", ",", "ab", "bc", "12", "."]
"""The last ends an output."""
VOCAB = 40
EOS = LETTERS.index(".")
LISTS = Grammar.regex("([a-c]{1,4}[12]{1,3},){3,8}[a-c]")


@functools.cache
def models() -> tuple[CausalLM, CausalLM]:
    """A target, and a draft that is none of its kin."""
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 1, "max_position_embeddings": 256}
    return CausalLM(tiny.build("llama", **sizes)), CausalLM(tiny.build("llama", seed=5, **sizes))


DRAFTERS = ["none", "lookup tree", "self", "other", "other tree", "liar"]
PROMPTS = [[0, 1, 2, 26, 28, 0, 1, 2], [3], [1, 26, 28, 1, 26]]


def generator(name: str, **options: Any) -> Generator:
    target, draft = models()
    options = {"eos": [EOS], "tokenizer": toy(LETTERS), **options}
    if name == "liar":
        return tiny.generator(target, tiny.liar([[0, 1, 2, 26]], vocab=VOCAB), **options)
    return runs.drafting(name, target, draft, **options)


def said(results: list[foredraft.Result]) -> list[list[int]]:
    return [result.tokens for result in results]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4, "no_repeat_ngram_size": 4, "logit_bias": {0: 2.0}, "bad_words_ids": [[1, 1]]},
    {"logits_processor": [lambda ids, scores: scores - scores.logsumexp(-1, keepdim=True)], "min_new_tokens": 20},
]


@functools.cache
def lists(name: str, setting: int) -> list[foredraft.Result]:
    return generator(name).generate(PROMPTS, grammar=LISTS, max_new_tokens=60, **SETTINGS[setting])


@pytest.mark.parametrize("setting", range(3), ids=["plain", "penalties", "processor"])
@pytest.mark.parametrize("name", DRAFTERS[1:])
def test_greedy_texts_are_those_of_plain_decoding(name: str, setting: int):
    found = lists(name, setting)
    assert said(found) == said(lists("none", setting))
    for result in found:
        assert result.finish_reason == "stop"
        assert result.tokens[-1] == EOS
        assert re.fullmatch(r"([a-c]{1,4}[12]{1,3},){3,8}[a-c]\.", result.text)


@pytest.mark.parametrize("name", ["lookup tree", "liar"])
@pytest.mark.parametrize("options", [{}, {"top_k": 5, "top_p": 0.8}, {"min_p": 0.2, "frequency_penalty": 0.5}])
def test_a_seed_gives_the_same_text_with_and_without_drafts(name: str, options: dict[str, Any]):
    sampling = {"temperature": 1.5, "seed": 5, "max_new_tokens": 60, "grammar": LISTS, **options}
    wanted = generator("none").generate(PROMPTS, num_return_sequences=3, **sampling)
    found = generator(name).generate(PROMPTS, num_return_sequences=3, **sampling)
    assert said(found) == said(wanted)
    assert len({tuple(tokens) for tokens in said(found)}) == 9
    assert sum(result.stats.accepted for result in found)


@pytest.mark.parametrize("name", DRAFTERS)
def test_rows_with_and_without_grammars_share_a_batch(name: str):
    params = [
        foredraft.SamplingParams(max_new_tokens=30, grammar=grammar)
        for grammar in (LISTS, None, Grammar.choice(["abc", "bca"]))
    ]
    g = generator(name)
    together = runs.run_each(g, PROMPTS, params)
    for prompt, own, sequence in zip(PROMPTS, params, together, strict=True):
        assert sequence.tokens == generator("none").generate(prompt, own).tokens
    assert together[2].text in ("abc.", "bca.")
    assert together[0].text != together[1].text


def test_a_batch_without_grammars_computes_no_masks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(step, "masked")
    monkeypatch.delattr(step, "HostTree")
    assert generator("lookup tree").generate(PROMPTS, max_new_tokens=8)


def chain_of(tokens: list[int]) -> Drafter:
    """Drafts the same tokens in every step."""

    def propose(view: View, plan: Plan) -> Draft:
        drafted = torch.tensor([tokens] * len(view.rows))
        return Draft(TokenTree.chain(torch.cat([view.roots[:, None], drafted], 1)), Law.FIXED)

    return tiny.ScriptedDrafter(propose, max_nodes=len(tokens))


@pytest.mark.parametrize("eos", [[EOS], []])
def test_an_output_ends_inside_a_block(eos: list[int]):
    drafted = [0, 1, 2, *eos, 3, 3, 3]
    g = tiny.generator(models()[0], chain_of(drafted), eos=eos, tokenizer=toy(LETTERS))
    result = g.generate([3], grammar=Grammar.regex("abc"), logit_bias={LETTERS.index("ab"): -100.0, 30: -100.0})
    assert result.tokens == [0, 1, 2, *eos]
    assert result.finish_reason == "stop"
    assert result.stats.target_forwards == 1, "all in one block"


def test_length_ends_an_output_before_its_grammar_does():
    result = generator("liar").generate([3], grammar=LISTS, max_new_tokens=3)
    assert (len(result.tokens), result.finish_reason) == (3, "length")


def test_ids_beyond_the_vocabulary_end_no_output():
    wanted = lists("none", 0)
    found = generator("none").generate(PROMPTS, grammar=LISTS, max_new_tokens=60, eos_token_id=[EOS, VOCAB, 2**40])
    assert said(found) == said(wanted)


def test_a_stop_string_ends_an_output_before_its_grammar_does():
    result = generator("liar").generate([3], grammar=LISTS, max_new_tokens=60, stop_strings=",")
    assert result.finish_reason == "stop"
    assert re.fullmatch("[a-c]+[12]+", result.text)


def test_logprobs_are_those_of_the_model_without_the_grammar():
    result = generator("self").generate([3], grammar=LISTS, max_new_tokens=8, logprobs=3)
    plain = models()[0].stock_logits(torch.tensor([[3, *result.tokens[:-1]]]))[0].log_softmax(-1)
    assert result.logprobs is not None
    for place, (token, row) in enumerate(zip(result.logprobs, plain, strict=True)):
        assert token.logprob == pytest.approx(float(row[result.tokens[place]]), abs=1e-4)
        assert token.top.keys() == set(row.topk(3).indices.tolist())


@pytest.mark.parametrize("name", ["none", "liar", "other tree"])
def test_a_grammar_that_leaves_no_token_ends_its_request_alone(name: str):
    g = generator(name)
    params = [
        foredraft.SamplingParams(max_new_tokens=9, temperature=1.0, grammar=Grammar.regex(pattern))
        for pattern in ("abé", "abc+")
    ]
    bad, good = runs.run_each(g, [[3], [3]], params)
    assert isinstance(bad.error, NumericsError)
    assert "the grammar left no token (1 tokens" in str(bad.error) or "(2 tokens" in str(bad.error)
    assert good.error is None and good.text.startswith("abc")


@pytest.mark.parametrize("name", ["none", "liar", "other tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammars_end_wins_against_a_minimum_of_tokens(name: str, temperature: float):
    g = generator(name)
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": temperature, "seed": 2}
    params = [
        foredraft.SamplingParams(grammar=Grammar.choice(["ab"]), min_new_tokens=9, **options),
        foredraft.SamplingParams(grammar=Grammar.regex("a(bc)*"), min_new_tokens=9, **options),
        foredraft.SamplingParams(min_new_tokens=9, **options),
    ]
    short, long, free = runs.run_each(g, [[3], [3], [3]], params)
    assert (short.text, short.finish_reason, short.error) == ("ab.", "stop", None), "this vocabulary's end is a dot"
    assert long.error is free.error is None
    assert len(long.tokens) >= 9 and len(free.tokens) >= 9


def test_a_processor_that_allows_an_illegal_token_fails_its_request():
    def always_z(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(scores).index_fill(1, torch.tensor([25]), 9.0)

    with pytest.raises(OptionError, match="A logits processor allowed token 25, which the grammar forbids here"):
        generator("liar").generate([3], grammar=LISTS, logits_processor=[always_z])


def test_an_interrupted_step_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch):
    g = generator("lookup tree")
    stream = g.stream(PROMPTS[0], grammar=LISTS, max_new_tokens=60)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(tail, "read_back", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            g.engine.step()
    assert tiny.pending(g) == 0
    wanted = generator("none").generate(PROMPTS[0], grammar=LISTS, max_new_tokens=60)
    assert g.generate(PROMPTS[0], grammar=LISTS, max_new_tokens=60).tokens == wanted.tokens


def test_bad_grammars_are_refused_before_anything_runs():
    g = generator("none")
    for grammar in (Grammar.regex("("), {"type": "array", "uniqueItems": True}, "nonsense"):
        with pytest.raises(OptionError):
            g.generate([[3], [4]], grammar=grammar)
    assert tiny.pending(g) == 0
    with pytest.raises(OptionError, match="came without one"):
        tiny.generator(models()[0]).generate([3], grammar="json")
    with pytest.raises(OptionError, match="Unknown beam search option 'grammar'"):
        g.beam_search([3], grammar="json")  # type: ignore[call-arg]


def test_streams_and_many_prompts_take_grammars():
    g = generator("lookup tree")
    with g.stream(PROMPTS[0], grammar=LISTS, max_new_tokens=60) as stream:
        text = "".join(piece.text for piece in stream)
    assert text == g.generate(PROMPTS[0], grammar=LISTS, max_new_tokens=60).text
    done = {each.index: each.result for each in g.as_completed(PROMPTS, grammar=LISTS, max_new_tokens=60)}
    assert [done[i].tokens for i in range(3)] == said(g.generate(PROMPTS, grammar=LISTS, max_new_tokens=60))


def test_exact_mode_has_the_same_texts():
    options: dict[str, Any] = {"grammar": LISTS, "max_new_tokens": 60}
    wanted = generator("none").generate(PROMPTS, **options)
    assert said(generator("lookup tree", exact_nodes=1 + 4 * 3).generate(PROMPTS, **options)) == said(wanted)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "home": {"type": "boolean"}},
            "required": ["zip", "home"],
        },
    },
    "required": ["name", "age", "tags", "address"],
}


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle3:sample-eagle3", "draft_model:sample-draft", "sequoia:sample-draft"])
def test_200_of_200_answers_of_the_bundled_model_are_valid(drafter: str):
    jsonschema_rs = pytest.importorskip("jsonschema_rs")
    g = foredraft.load("sample", f"{drafter},num_assistant_tokens_schedule=constant")
    prompts = [f"A record of person {i} as JSON:\n" for i in range(200)]
    results = g.generate(prompts, grammar=SCHEMA, temperature=1.0, seed=1, max_new_tokens=120)
    assert sum(result.stats.accepted for result in results)
    validator = jsonschema_rs.validator_for(SCHEMA)
    assert all(validator.is_valid(json.loads(result.text)) for result in results)
    assert {result.finish_reason for result in results} == {"stop"}


@pytest.mark.slow
def test_compiled_texts_of_a_prediction_under_a_grammar():
    options: dict[str, Any] = {"grammar": LISTS, "max_new_tokens": 6, "temperature": 1.0, "seed": 3}
    target = CausalLM(tiny.build("llama", vocab_size=VOCAB, num_hidden_layers=1), fast=False)
    recorder = Compiled("eager")
    made = [tiny.generator(target, eos=[EOS], tokenizer=toy(LETTERS), recorder=each) for each in (None, recorder)]
    wanted = made[0].generate(PROMPTS[0], **options).tokens
    assert made[1].generate(PROMPTS[0], prediction=wanted, **options).tokens == wanted
    assert set(recorder.recordings) == {"forward", "tail"} and not recorder._logged
