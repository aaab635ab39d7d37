"""Speculative beam search finds what the plain search finds, in fewer forwards of the target."""

import functools
from typing import Any

import pytest
import torch

import runs
import tiny
from foredraft.compose.load import load
from foredraft.core.errors import NumericsError, OptionError
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.beam.search import BeamOptions, Hypothesis, beam_search
from foredraft.engine.beam.speculative import DraftBeam, speculative_beam_search
from foredraft.model.hf.causal_lm import CausalLM

NEW = 14
PROMPTS = tiny.prompts((1, 5, 19))
ENDS = (5, 17, 29, 33, 41, 58, 77, 90)


@functools.cache
def target(name: str = "llama") -> CausalLM:
    return CausalLM(tiny.build(name, spread=1.0))


@functools.cache
def draft(kind: str, name: str = "llama") -> CausalLM:
    """The target itself, the same a little shaken, one that knows nothing, and one of another width."""
    if kind == "same":
        return CausalLM(tiny.build(name, spread=1.0))
    if kind == "narrow":
        return CausalLM(tiny.build(name, seed=5, spread=1.0, vocab_size=60, num_hidden_layers=1))
    if kind == "short":
        return CausalLM(tiny.build(name, spread=1.0, max_position_embeddings=24))
    model = tiny.build(name, spread=1.0, **({"seed": 5} if kind == "wrong" else {}))
    if kind == "near":
        tiny.nudge(model, 0.02)
    return CausalLM(model)


def options(**given: Any) -> BeamOptions:
    return BeamOptions.from_options({"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": NEW, **given})


def same(found: list[list[Hypothesis]], expected: list[list[Hypothesis]]) -> None:
    assert [[each.tokens for each in one] for one in found] == [[each.tokens for each in one] for one in expected]
    scores = [[each.score for each in one] for one in found]
    assert scores == [pytest.approx([each.score for each in one], abs=1e-4) for one in expected]


def both(chosen: BeamOptions, kind: str = "near", eos: tuple[int, ...] = ENDS, name: str = "llama") -> None:
    own = target(name)
    expected = beam_search(own, PROMPTS, chosen, eos, str)
    same(speculative_beam_search(own, draft(kind, name), PROMPTS, chosen, eos, str), expected)


@pytest.mark.parametrize("kind", ["same", "near", "wrong", "narrow", "short"])
@pytest.mark.parametrize("eos", [(), ENDS], ids=["endless", "ends"])
def test_whatever_the_draft_says(kind: str, eos: tuple[int, ...]):
    both(options(), kind, eos)


@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("penalty", [1.0, 0.0, -1.0, 2.0])
def test_every_way_to_end(early: bool | str, penalty: float):
    both(options(early_stopping=early, length_penalty=penalty))


@pytest.mark.parametrize("ahead", [1, 2, 7, 40])
@pytest.mark.parametrize("beams", [2, 5])
def test_however_far_it_looks(ahead: int, beams: int):
    both(options(num_assistant_tokens=ahead, num_beams=beams, num_return_sequences=2), "same")


@pytest.mark.parametrize(
    "rules",
    [
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 6},
        {"bad_words_ids": tuple((token,) for token in range(40))},
        {"frequency_penalty": 0.7, "presence_penalty": 0.3},
    ],
    ids=lambda rules: next(iter(rules)),
)
def test_rules_hold_on_every_beams_own_text(rules: dict[str, Any]):
    both(options(**rules))


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt2"])
def test_other_architectures(name: str):
    both(options(), "near", ENDS, name)


def test_the_end_of_the_targets_context():
    own = CausalLM(tiny.build("llama", spread=1.0, max_position_embeddings=25))
    chosen = options(num_assistant_tokens=6)
    expected = beam_search(own, PROMPTS, chosen, (), str)
    same(speculative_beam_search(own, draft("same"), PROMPTS, chosen, (), str), expected)
    assert len(expected[2][0].tokens) == 6


def forwards(monkeypatch: pytest.MonkeyPatch, own: CausalLM, chosen: BeamOptions, draft_beam: CausalLM) -> int:
    with monkeypatch.context() as patch:
        calls = runs.noted(patch, CausalLM, "forward")
        speculative_beam_search(own, draft_beam, PROMPTS, chosen, (), str)
    return sum(model is own for model, *_ in calls)


def test_a_draft_that_is_the_target_saves_all_that_can_be_saved(monkeypatch: pytest.MonkeyPatch):
    """One forward for the prompts, one plain step, then five steps a forward."""
    chosen = options(num_assistant_tokens=4, max_new_tokens=21)
    assert forwards(monkeypatch, target(), chosen, draft("same")) == 1 + 1 + 20 // 5
    wrong = forwards(monkeypatch, target(), chosen, draft("wrong"))
    assert 16 <= wrong <= 22, "a draft that knows nothing saves nothing, and costs no forward of the target"


def test_the_host_reads_once_a_level_and_once_a_step_of_each_prompt(monkeypatch: pytest.MonkeyPatch):
    """All looks at values, where a look makes the host wait for the device."""
    own, draft_beam = target(), draft("same")

    def readings(new: int) -> tuple[int, int]:
        chosen = options(num_assistant_tokens=4, max_new_tokens=new)
        with monkeypatch.context() as patch:
            lists, numbers = (runs.noted(patch, torch.Tensor, name) for name in ("tolist", "__int__"))
            speculative_beam_search(own, draft_beam, PROMPTS, chosen, (), str)
        return len(lists), len(numbers)

    short, long = readings(11), readings(21)
    assert long[0] - short[0] == 2 * (1 + 4 + 5 * len(PROMPTS)), "two forwards more: roots, four levels, five steps"
    assert long[1] == short[1]


def test_a_generator_with_a_draft_model_searches_with_it(monkeypatch: pytest.MonkeyPatch):
    own = target()
    drafter, _ = tiny.draft_model(draft("same"), own)
    asked = []
    monkeypatch.setattr(drafter.__class__, "beam_model", lambda self: asked.append(1) or draft("same"))
    plain, fast = tiny.generator(own), tiny.generator(own, drafter)
    given = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": NEW}
    found = fast.beam_search(PROMPTS, **given)
    assert asked == [1]
    expected = plain.beam_search(PROMPTS, **given)
    same(found, expected)  # type: ignore[arg-type]
    fast.beam_search(PROMPTS, num_assistant_tokens=0, **given)
    assert asked == [1]


def test_the_bundled_pair():
    fast = load("sample", drafter="draft_model")
    plain = load(fast.engine.target, tokenizer=fast.tokenizer, drafter=None)
    prompts = ["def fibonacci(n):", "The capital of"]
    found = fast.beam_search(prompts, num_beams=3, max_new_tokens=16)
    same(found, plain.beam_search(prompts, num_beams=3, max_new_tokens=16))  # type: ignore[arg-type]
    fast.close()


def test_numbers_that_are_none_are_said():
    model = tiny.build("llama", spread=1.0, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    own = CausalLM(model, verify=False)
    with pytest.raises(NumericsError, match="NaN or \\+inf logits"):
        speculative_beam_search(own, draft("near"), PROMPTS, options(), (), str)


def test_what_cannot_be_is_said():
    with pytest.raises(OptionError, match="num_assistant_tokens must be a whole number, 0 or more"):
        options(num_assistant_tokens=-1)
    assert speculative_beam_search(target(), draft("near"), [], options(), (), str) == []
    assert SamplingParams() == BeamOptions().params


@torch.inference_mode()
def test_a_trie_is_padded_to_the_beam_that_most_of_it_stands_below():
    """The most nodes that the page on beam search speaks of: all of a level below one beam, for each of several."""
    draft_beam = DraftBeam(draft("same"), torch.tensor([PROMPTS[1]]), [len(PROMPTS[1])], 3, 100)
    draft_beam.skip(torch.tensor([1, 2, 3]))
    draft_beam.move([0, 1, 2], [[0]] * 3)
    trie = draft_beam.search(
        torch.tensor([0.0, -1e3, -1e3]), torch.tensor([1, 2, 3]), 4, torch.tensor([], dtype=torch.long)
    )
    assert tuple(trie.tree.tokens.shape) == (3, 1 + 2 * 3 * 4)
    assert [len(children) for children in trie.children] == [2 * 3 * 4, 0, 0]
