"""Beam search finds what transformers' ``generate(num_beams=K, do_sample=False)`` finds, for ragged prompts as well."""

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import runs
import tiny
from foredraft.core.errors import NumericsError, OptionError, PromptError
from foredraft.core.sampling.params import SamplingParams
from foredraft.drafters.draft_model import DraftModel, Options as DraftOptions
from foredraft.engine.beam.cache import assign_rows
from foredraft.engine.beam.search import BeamOptions, Hypothesis, beam_search
from foredraft.model.hf.causal_lm import CausalLM

NEW = 12
ENDS = (5, 17, 29, 33, 41, 58, 77, 90)
EARLY = (False, True, "never")
"""Enough ids that one of them is soon said."""
Found = list[tuple[list[int], float]]


@functools.cache
def models(name: str, spread: float = 1.0, **changes: int) -> tuple[PreTrainedModel, CausalLM]:
    """A stock model for transformers, and one with the same weights behind ``CausalLM``."""
    stock, ours = [tiny.build(name, spread=spread, **changes) for _ in range(2)]
    return stock, CausalLM(ours)


@functools.cache
def said(name: str) -> tuple[int, ...]:
    """Ids in the order in which the best texts of a model come upon them, from the fourth token on."""
    found = ours(models(name)[1], tiny.prompts((1, 6, 19)), (), num_beams=3, max_new_tokens=NEW)
    return tuple(
        dict.fromkeys(token for column in zip(*[texts[0][0][3:] for texts in found], strict=True) for token in column)
    )


def stock(model: PreTrainedModel, prompts: list[list[int]], eos: tuple[int, ...], **options: Any) -> list[Found]:
    """What transformers finds for each prompt alone."""
    ends = {"eos_token_id": list(eos)} if eos else {}
    if "bad_words_ids" in options:
        options["bad_words_ids"] = [list(word) for word in options["bad_words_ids"]]
    found = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **ends,
            **options,
        )
        texts = [cut(line, eos) for line in out.sequences[:, len(prompt) :].tolist()]
        found.append(list(zip(texts, out.sequences_scores.tolist(), strict=True)))
    return found


def cut(tokens: list[int], eos: tuple[int, ...]) -> list[int]:
    """Up to the first end, which stays."""
    end = next((i for i, token in enumerate(tokens) if token in eos), len(tokens))
    return tokens[: end + 1]


def spelt(tokens: list[int]) -> str:
    return "".join(f"{token}," for token in tokens)


def ours(target: CausalLM, prompts: list[list[int]], eos: tuple[int, ...], **options: Any) -> list[Found]:
    found = beam_search(target, prompts, BeamOptions.from_options(options), eos, spelt)
    assert all(text.text == spelt(text.tokens) for texts in found for text in texts)
    return [[(text.tokens, text.score) for text in texts] for texts in found]


def same(found: list[Found], expected: list[Found]) -> None:
    assert [[text for text, _ in texts] for texts in found] == [[text for text, _ in texts] for texts in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert [score for _, score in mine] == pytest.approx([score for _, score in theirs], rel=1e-5, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "beams", "ends"),
    [*itertools.product(["llama"], [2, 3, 5], [0, 1, 4]), *itertools.product(["gpt2", "mistral"], [3], [0, 4])],
)
def test_finds_what_transformers_finds(name: str, beams: int, ends: int):
    model, target = models(name)
    eos = said(name)[:ends]
    prompts = tiny.prompts((1, 6, 19))
    settings = (
        list(itertools.product(EARLY, (0.5, 1.0, 2.0)))[beams % 2 :: 2] if eos else [(False, 1.0), ("never", 2.0)]
    )
    lengths = set()
    for number, (early, penalty) in enumerate(settings):
        options = {"num_beams": beams, "max_new_tokens": NEW, "early_stopping": early, "length_penalty": penalty}
        options["num_return_sequences"] = 1 + (beams - 1) * (number % 2 == 0)
        found = ours(target, prompts, eos, **options)
        same(found, stock(model, prompts, eos, **options))
        lengths |= {len(text) for texts in found for text, _ in texts}
    assert (len(lengths) > 1) == (ends > 0), "no text ended early, so nothing was shown"


@pytest.mark.parametrize("penalty", [-2.0, 0.0])
def test_a_penalty_that_likes_short_texts(penalty: float):
    """Two of these texts tell how far "never" looks ahead when no text is better for being longer."""
    vocab, eos = 24, (0, 1, 2)
    model, target = models("llama", 2.5, seed=39, vocab_size=vocab)
    prompts = tiny.prompts((4, 17, 8, 6), vocab)
    for early in EARLY:
        options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 2 * NEW}
        options |= {"length_penalty": penalty, "early_stopping": early}
        same(ours(target, prompts, eos, **options), stock(model, prompts, eos, **options))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text"])
def test_a_ragged_batch_is_each_prompt_alone(name: str):
    _, target = models(name)
    prompts = tiny.prompts((33, 1, 2, 17, 8, 2))
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 20}
    together = ours(target, prompts, ENDS, **options)
    same(together, [ours(target, [prompt], ENDS, **options)[0] for prompt in prompts])
    assert len({len(texts[0][0]) for texts in together}) > 1, "all ended at once"


RULES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 8},
    {"bad_words_ids": ((44,), (12, 86), (27, 72))},
    {"repetition_penalty": 0.8, "no_repeat_ngram_size": 3, "min_new_tokens": 4},
]


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: "+".join(rules))
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_penalties_and_bans_hold_for_log_probabilities(name: str, rules: dict[str, Any]):
    model, target = models(name)
    prompts, eos = tiny.prompts((4, 11)), said(name)[:4]
    options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 2 * NEW, "length_penalty": 0.7}
    same(ours(target, prompts, eos, **options, **rules), stock(model, prompts, eos, **options, **rules))


def test_every_rule_changes_something():
    _, target = models("llama")
    prompts, eos = tiny.prompts((4, 11)), said("llama")[:4]
    options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 2 * NEW, "length_penalty": 0.7}
    plain = ours(target, prompts, eos, **options)
    for rules in [*RULES, {"logit_bias": {3: 4.0}}, {"frequency_penalty": 1.0}]:
        assert ours(target, prompts, eos, **options, **rules) != plain, rules


def test_logit_bias_is_transformers_sequence_bias():
    model, target = models("llama")
    prompts = tiny.prompts((6,))
    options = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": NEW}
    expected = stock(model, prompts, ENDS, sequence_bias=[[[3], 4.0], [[9], -2.0]], **options)
    same(ours(target, prompts, ENDS, logit_bias={3: 4.0, 9: -2.0}, **options), expected)


def test_ones_own_processor_sees_each_beams_text():
    class Often:
        """Prefers tokens by the sum of the text so far."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            liked = input_ids.sum(1) % scores.shape[1]
            return scores + 3.0 * torch.nn.functional.one_hot(liked, scores.shape[1])

    model, target = models("llama")
    prompts = tiny.prompts((6, 3))
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": NEW}
    expected = stock(model, prompts, ENDS, logits_processor=[Often()], **options)
    same(ours(target, prompts, ENDS, logits_processor=(Often(),), **options), expected)


def test_more_beams_than_texts():
    """Bans leave two tokens, hence at first fewer texts than beams."""
    model, target = models("llama")
    allowed = (11, 12)
    words = tuple((token,) for token in range(tiny.VOCAB) if token not in allowed)
    options = {"num_beams": 5, "num_return_sequences": 5, "max_new_tokens": 5, "bad_words_ids": words}
    prompts = tiny.prompts((6,))
    same(ours(target, prompts, (), **options), stock(model, prompts, (), **options))


def test_as_many_beams_as_there_are_texts_find_the_best_one():
    """With V beams nothing of two tokens is lost, so the search must find the best of all."""
    target = CausalLM(tiny.build("llama", vocab_size=12))
    prompt = [3, 1, 4]
    texts = [[a, b] for a in range(12) for b in range(12)]
    laws = target.stock_logits(torch.tensor([prompt + text for text in texts])).log_softmax(-1)
    scores = [float(law[2, a] + law[3, b]) for law, (a, b) in zip(laws, texts, strict=True)]
    best, score = ours(target, [prompt], (), num_beams=12, max_new_tokens=2, length_penalty=0.0)[0][0]
    assert best == texts[scores.index(max(scores))]
    assert score == pytest.approx(max(scores), abs=1e-4)


def test_the_end_of_the_context_ends_a_text():
    _, target = models("gpt2")
    prompts = tiny.prompts((target.max_length - 3, 4))
    found = ours(target, prompts, (), num_beams=2, max_new_tokens=8)
    assert [len(texts[0][0]) for texts in found] == [3, 8]
    same(found, [ours(target, [p], (), num_beams=2, max_new_tokens=n)[0] for p, n in zip(prompts, (3, 8), strict=True)])


def test_one_forward_a_step_over_the_prompts_that_are_left(monkeypatch: pytest.MonkeyPatch):
    _, target = models("llama")
    forwards = runs.noted(monkeypatch, CausalLM, "forward")
    prompts = tiny.prompts((33, 1, 2, 17))
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 40, "early_stopping": True}
    found = ours(target, prompts, ENDS, **options)
    steps = [step for _, step, *_ in forwards]
    assert all(step.rows == tuple(range(len(step.tokens))) for step in steps), "rows are the first ones"
    prefilled, first, *rest = (tuple(step.tokens.shape) for step in steps)
    assert prefilled == (4, 32) and first == (4, 1) and {nodes for _, nodes in rest} == {1}
    rows = [rows for rows, _ in rest]
    assert rows == sorted(rows, reverse=True) and set(rows) <= {3, 6, 9, 12} and len(set(rows)) > 1
    assert len(rest) + 1 >= max(len(text) for texts in found for text, _ in texts)


@pytest.mark.parametrize(
    ("wanted", "rows"),
    [([0, 1, 2], [0, 1, 2]), ([2, 1, 0], [2, 1, 0]), ([0, 0, 2], [0, 1, 2]), ([1, 1, 1], [1, 0, 2]), ([4, 5], [0, 1])],
)
def test_place_moves_as_few_as_can_be(wanted: list[int], rows: list[int]):
    assert assign_rows(wanted) == rows


def test_generator():
    model, target = models("llama")
    generator = tiny.generator(target, eos=ENDS)
    prompts = tiny.prompts((5, 2))
    one = generator.beam_search(prompts[0], num_beams=3, max_new_tokens=6, num_return_sequences=2)
    assert all(isinstance(text, Hypothesis) for text in one)
    both = generator.beam_search(prompts, num_beams=3, max_new_tokens=6, num_return_sequences=2, eos_token_id=())
    options = {"num_beams": 3, "max_new_tokens": 6, "num_return_sequences": 2}
    same([[(t.tokens, t.score) for t in one]], stock(model, prompts[:1], ENDS, **options))
    found = [[(t.tokens, t.score) for t in texts] for texts in both]
    same(found, stock(model, prompts, (), **options))
    assert len(generator.beam_search(prompts[0], max_new_tokens=2)) == 1


@pytest.mark.parametrize("drafter", [None, "draft_model:draft"])
@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize(
    "given",
    [{}, {"repetition_penalty": 1.7}, {"no_repeat_ngram_size": 2, "min_new_tokens": 3}, {"length_penalty": -2.0}],
)
def test_one_beam_is_greedy_decoding(given: dict[str, Any], early: bool | str, drafter: str | None):
    _, target = models("llama")
    proposer = (
        None if drafter is None else DraftModel(DraftOptions(), models("llama", spread=0.5)[1], target.vocab_size)
    )
    generator = tiny.generator(target, proposer, eos=said("llama")[:3])
    prompts, limits = tiny.prompts((1, 6, 19)), {"max_new_tokens": 2 * NEW}
    plain = {name: value for name, value in given.items() if name != "length_penalty"}
    for ends, reason in ((None, "stop"), ((), "length")):
        wanted = generator.generate(prompts, eos_token_id=ends, logprobs=0, **limits, **plain)
        found = generator.beam_search(prompts, num_beams=1, early_stopping=early, eos_token_id=ends, **limits, **given)
        assert [one.tokens for (one,) in found] == [r.tokens for r in wanted]
        assert reason in {r.finish_reason for r in wanted}
        for (one,), r in zip(found, () if plain else wanted, strict=not plain):
            total = sum(each.logprob for each in r.logprobs)
            assert one.score == pytest.approx(total / len(r.tokens) ** given.get("length_penalty", 1.0), rel=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_beams": 0}, "num_beams must be a whole number, 1 or more, not 0"),
        ({"num_beams": True}, "num_beams must be"),
        ({"num_beams": 2, "num_return_sequences": 3}, r"from 1 to num_beams \(2\), not 3"),
        ({"num_return_sequences": 0}, "from 1 to num_beams"),
        ({"length_penalty": float("nan")}, "length_penalty must be a number"),
        ({"early_stopping": "always"}, "True, False or \"never\", not 'always'"),
        ({"max_new_tokens": 0}, "max_new_tokens must be"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "larger than max_new_tokens"),
        ({"num_beam": 2}, "Unknown beam search option 'num_beam'. Did you mean num_beams?"),
        ({"temperature": 1.0}, "Unknown beam search option 'temperature'"),
        ({"params": SamplingParams(seed=1)}, "Unknown beam search option 'params'"),
        ({"logit_bias": {999: 1.0}}, "token 999 is outside the vocabulary"),
    ],
    ids=str,
)
def test_options_are_checked(options: dict[str, Any], said: str):
    with pytest.raises(OptionError, match=said):
        tiny.generator(models("llama")[1]).beam_search([1, 2], **options)


def test_nothing_is_sampled():
    with pytest.raises(OptionError, match="Beam search has no top_k"):
        BeamOptions(params=SamplingParams(top_k=3))
    with pytest.raises(OptionError, match="Beam search has no stop_strings"):
        BeamOptions(params=SamplingParams(stop_strings=("a",)))


def test_prompts_are_checked():
    generator = tiny.generator(models("llama")[1])
    for bad in ([], [1, tiny.VOCAB], list(range(90)) * 3, "a text, but no tokenizer"):
        with pytest.raises(PromptError):
            generator.beam_search(bad)
    assert beam_search(generator.engine.target, [], BeamOptions(), (), str) == []


@pytest.mark.parametrize(("value", "tokens"), [(math.nan, [3]), (math.inf, [3]), (-math.inf, [*range(tiny.VOCAB)])])
def test_logits_that_are_not_numbers(value: float, tokens: list[int]):
    model = tiny.build("llama")
    target = CausalLM(model)
    model.lm_head.register_forward_hook(lambda *call: call[2].index_fill(-1, torch.tensor(tokens), value))
    with pytest.raises(NumericsError, match="NaN or \\+inf logits"):
        ours(target, [[1, 2]], (), num_beams=2, max_new_tokens=4)


def test_logits_may_be_minus_infinity():
    model = tiny.build("llama")
    target = CausalLM(model)
    model.lm_head.register_forward_hook(lambda *call: call[2].index_fill(-1, torch.arange(9, tiny.VOCAB), -math.inf))
    for tokens, _ in ours(target, [[1, 2]], (), num_beams=2, max_new_tokens=4)[0]:
        assert len(tokens) == 4 and max(tokens) < 9
