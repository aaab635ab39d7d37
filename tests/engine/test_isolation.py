"""A fault in the work for one row ends this row; the others go on with the texts that they would have had."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import runs
import tiny
from dialects import toy
from foredraft.core.errors import ForedraftError, OptionError
from foredraft.core.sampling import warp
from foredraft.core.sampling.grammar import Grammar
from foredraft.core.sampling.history import BadWords, HistoryRules
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.truncation import Truncation
from foredraft.engine import request
from foredraft.engine.detokenizer import IncrementalDetokenizer, IncrementalText
from foredraft.engine.generator import Generator
from foredraft.engine.prefix_cache import PrefixCache
from foredraft.engine.prompt_reader import PromptReader
from foredraft.engine.request import RequestStats, Sequence
from foredraft.engine.state import Batch
from foredraft.engine.step import StepResult
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.text.grammar import Matcher

LETTERS = [chr(ord("a") + index) for index in range(26)] + ["1", "2", ",", "ab", "bc", "12", "."]
VOCAB, EOS, NEW = 40, LETTERS.index("."), 14
LISTS = Grammar.regex("([a-c]{1,4}[12]{1,3},){6,20}[a-c]")
PROMPTS = [[0, 1, 2, 26, 28, 0, 1, 2], [3, 9, 4], [1, 26, 28, 1, 26], [7, 7, 20, 3, 2, 1]]
SAMPLED = {
    "temperature": 1.3,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
    "min_new_tokens": 10,
    "bad_words_ids": [[4, 5]],
}
INNOCENT: list[dict[str, Any]] = [{"grammar": LISTS}, {**SAMPLED, "seed": 5}, {**SAMPLED, "seed": 6, "grammar": LISTS}]
TOP_K, PENALTY, TOP = 7, 1.25, 3
GUILTY = SamplingParams(
    temperature=0.9,
    top_k=TOP_K,
    repetition_penalty=PENALTY,
    frequency_penalty=0.125,
    no_repeat_ngram_size=6,
    bad_words_ids=((1, 2, 3),),
    logit_bias={5: 0.25},
    min_new_tokens=2,
    logits_processor=(lambda ids, scores: scores,),
    stop_strings=("zzzzzz",),
    logprobs=TOP,
    grammar=LISTS,
    prediction=(0, 1, 26, 28) * 6,
    record_steps=True,
    max_new_tokens=NEW,
    seed=9,
)
DRAFTERS = ["other", *(pytest.param(name, marks=pytest.mark.slow) for name in ("none", "other tree", "lookup tree"))]
"""The first draws its drafts by the rows' own rules, so that these run in all places."""


@functools.cache
def models() -> tuple[CausalLM, CausalLM]:
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 1, "max_position_embeddings": 256}
    return CausalLM(tiny.build("llama", **sizes)), CausalLM(tiny.build("llama", seed=5, **sizes))


@functools.cache
def letters() -> Any:
    return toy(LETTERS)


def build(name: str) -> Generator:
    return runs.drafting(name, *models(), eos=[EOS], tokenizer=letters(), prefix_cache=True, max_rows=4)


def submitted(g: Generator) -> list[Sequence]:
    """Three innocent requests, and the one that will be guilty."""
    params = [*(SamplingParams(max_new_tokens=NEW, **each) for each in INNOCENT), GUILTY]
    return [g.submit([prompt], own)[0] for prompt, own in zip(PROMPTS, params, strict=True)]


def step_to_the_end(g: Generator, sequences: list[Sequence]) -> None:
    while not all(each.finished for each in sequences):
        g.engine.contained_step()


@functools.cache
def undisturbed(name: str) -> list[list[int]]:
    """What all four say when nothing fails."""
    g = build(name)
    sequences = submitted(g)
    g.engine.run(sequences)
    assert all(each.error is None for each in sequences)
    return [each.tokens for each in sequences]


class Planted(Exception):
    """The fault; nothing else may raise it."""


@dataclass
class Plant:
    """A call that fails for the guilty request.

    ``mine``: whether the call's arguments, the object first, are those of this request. ``skip``: calls that succeed
    before.
    """

    owner: Any
    name: str
    mine: Callable[..., bool]
    skip: int = 0

    @property
    def label(self) -> str:
        return f"{self.owner.__name__.rpartition('.')[2]}.{self.name}"

    @contextmanager
    def planted(self, guilty: Sequence) -> Iterator[list[int]]:
        """Within, the call fails; yields the number of failures."""
        kept, calls, failures = vars(self.owner)[self.name], 0, [0]
        inner = kept.__func__ if isinstance(kept, classmethod) else kept

        def failing(*args: Any, **options: Any) -> Any:
            nonlocal calls
            if self.mine(guilty, *args, *options.values()):
                calls += 1
                if calls > self.skip:
                    failures[0] += 1
                    raise Planted("planted")
            return inner(*args, **options)

        setattr(self.owner, self.name, classmethod(failing) if isinstance(kept, classmethod) else failing)
        try:
            yield failures
        finally:
            setattr(self.owner, self.name, kept)


def owned(get: Callable[[Sequence], object], place: int = 0) -> Callable[..., bool]:
    """This argument is, or holds, what the guilty request owns."""

    def mine(guilty: Sequence, *args: Any) -> bool:
        given, own = args[place], get(guilty)
        return any(each is own for each in given.values()) if isinstance(given, dict) else given is own

    return mine


def itself(guilty: Sequence) -> object:
    return guilty


def told(guilty: Sequence) -> object:
    return guilty._detokenizer


RULES = [
    Plant(warp, "check_token_ids", lambda guilty, *args: True),
    Plant(warp, "_bias", lambda guilty, *args: True),
    *(Plant(owner, "of", lambda guilty, *args: True) for owner in (HistoryRules, BadWords, Truncation)),
]
"""Where a request's rules are made. They run on the paths of all rows at once, and must not fail there."""
PLANTS = [
    # when it is admitted
    Plant(PrefixCache, "preferred", owned(itself, 2)),
    Plant(PromptReader, "add", owned(itself, 1)),
    Plant(PromptReader, "_reuse", lambda guilty, reader, reading, *_: guilty in reading.requests.values()),
    Plant(PromptReader, "_start", lambda guilty, reader, reading, *_: guilty in reading.requests.values()),
    Plant(PrefixCache, "hold", owned(itself, 2)),
    Plant(Batch, "admit", owned(itself, 1)),
    # when it is masked
    Plant(Matcher, "masks", owned(lambda guilty: guilty.matcher), skip=2),
    # when its results are converted
    Plant(StepResult, "trace", lambda guilty, *_: True, skip=1),
    Plant(Sequence, "extend", owned(itself), skip=1),
    Plant(Matcher, "advance", owned(lambda guilty: guilty.matcher), skip=1),
    Plant(IncrementalDetokenizer, "push", owned(told), skip=1),
    Plant(IncrementalDetokenizer, "_find", owned(told), skip=1),
    Plant(IncrementalDetokenizer, "finish", owned(told)),
    Plant(IncrementalText, "push", owned(lambda guilty: guilty._detokenizer._text), skip=1),
    Plant(Sequence, "_emit", owned(itself), skip=1),
    Plant(Sequence, "add_logprobs", owned(itself), skip=1),
    Plant(request, "token_logprobs", lambda guilty, laws, tokens, count: count == TOP, skip=1),
    Plant(RequestStats, "add", owned(lambda guilty: guilty.counters), skip=1),
]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.label)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_fault_in_the_work_for_one_row_ends_this_row_alone(name: str, plant: Plant):
    wanted, g = undisturbed(name), build(name)
    sequences = submitted(g)
    *innocents, guilty = sequences
    with plant.planted(guilty) as failures:
        step_to_the_end(g, sequences)
    assert failures[0] > 0
    assert isinstance(guilty.error, ForedraftError) and "planted" in str(guilty.error)
    assert isinstance(guilty.error.__cause__, Planted) or "Prefill" in str(guilty.error)
    assert guilty.tokens == wanted[3][: len(guilty.tokens)]
    assert [each.error for each in innocents] == [None] * 3
    assert [each.tokens for each in innocents] == wanted[:3]
    assert tiny.pending(g) == 0
    again = submitted(g)
    g.engine.run(again)
    assert [each.error for each in again] == [None] * 4
    assert [each.tokens for each in again[:3]] == wanted[:3]  # the other's random numbers are its own


@pytest.mark.parametrize("plant", RULES, ids=lambda plant: plant.label)
def test_what_the_rules_of_a_request_refuse_is_refused_when_it_is_made(plant: Plant):
    wanted, g = undisturbed("other"), build("other")
    *innocents, guilty = submitted(g)
    g.engine.cancel([guilty])
    with plant.planted(guilty), pytest.raises(Planted, match="^planted$"):
        g.submit(PROMPTS[3:], GUILTY)
    step_to_the_end(g, innocents)
    assert [each.tokens for each in innocents] == wanted[:3]


class Processors:
    """Processors that fail at call ``fatal``; ``after``: calls of the last one after that."""

    def __init__(self, fatal: int, length: int = 0) -> None:
        self._fatal, self._length, self._calls, self.failed, self.after = fatal, length, 0, 0, 0

    def fail(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        if ids.shape[1] < self._length or self._calls < self._fatal:
            return scores
        self.failed += 1
        scores.fill_(float("nan"))
        raise Planted("planted")

    def watch(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.after += self.failed
        return scores


@pytest.mark.parametrize(
    ("fatal", "length"),
    [*((call, 0) for call in range(1, 9)), (1, len(PROMPTS[3]) + 2)],
    ids=lambda given: str(given),
)
@pytest.mark.parametrize("name", ["other", "none", pytest.param("other tree", marks=pytest.mark.slow)])
def test_processors_that_fail_end_their_row_alone_and_are_not_called_again(name: str, fatal: int, length: int):
    """In the draft or in the law of the target, which it reaches after the draft."""
    wanted, g = undisturbed(name), build(name)
    *innocents, ended = submitted(g)
    g.engine.cancel([ended])
    own = Processors(fatal, length)
    params = replace(GUILTY, logits_processor=(own.fail, own.watch))
    guilty = g.submit(PROMPTS[3:], params)[0]
    step_to_the_end(g, [*innocents, guilty])
    assert isinstance(guilty.error, ForedraftError) and isinstance(guilty.error.__cause__, Planted)
    assert (own.failed, own.after) == (1, 0)
    assert guilty.tokens == wanted[3][: len(guilty.tokens)]
    assert [each.tokens for each in innocents] == wanted[:3] and [each.error for each in innocents] == [None] * 3
    assert params.logits_processor == (own.fail, own.watch)  # a next request has no error of this one
    again = g.submit(PROMPTS[3:], GUILTY)[0]
    step_to_the_end(g, [again])
    assert again.tokens == wanted[3]


def test_an_interruption_in_a_processor_is_no_error_of_its_request():
    g = build("other")

    def interrupt(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    sequences = g.submit(PROMPTS[:1], SamplingParams(logits_processor=(interrupt,)))
    with pytest.raises(KeyboardInterrupt):
        g.engine.run(sequences)
    assert sequences[0].error is None and sequences[0].finish_reason == "cancelled" and tiny.pending(g) == 0


@pytest.mark.parametrize("holder", ["policy", "drafter"])
def test_a_fault_in_the_release_of_a_row_harms_no_request(holder: str, monkeypatch: pytest.MonkeyPatch):
    wanted, g = undisturbed("other"), build("other")
    sequences = submitted(g)

    def fail(row: int) -> None:
        raise Planted("planted")

    monkeypatch.setattr(getattr(g.engine, holder), "release", fail)
    step_to_the_end(g, sequences)
    assert [each.error for each in sequences] == [None] * 4
    assert [each.tokens for each in sequences] == wanted


def test_a_call_in_one_thread_does_not_raise_the_error_of_another_request():
    wanted, g = undisturbed("other"), build("other")
    *innocents, guilty = submitted(g)
    plant = next(each for each in PLANTS if each.label == "Sequence.extend")
    with plant.planted(guilty):
        g.engine.run(innocents)
        assert guilty.error is not None
    assert [each.tokens for each in innocents] == wanted[:3]


def test_a_call_raises_the_error_that_ended_its_own_request():
    g = build("other")

    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise Planted("planted")

    with pytest.raises(Planted, match="^planted$"):
        g.generate(PROMPTS[0], max_new_tokens=4, logits_processor=fail)
    with pytest.raises(Planted, match="^planted$"):
        list(g.stream(PROMPTS[0], max_new_tokens=4, logits_processor=fail))
    assert tiny.pending(g) == 0


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda ids, scores: None, "returned nothing; it must return scores of the shape"),
        (lambda ids, scores: scores[:, :9], r"returned a tensor of shape \(\d+, 9\)"),
        (lambda ids, scores: scores.sum(0), r"returned a tensor of shape \(40,\)"),
        (lambda ids, scores: scores.tolist(), "returned a list"),
    ],
    ids=["nothing", "narrow", "one row", "a list"],
)
def test_a_processor_that_returns_no_scores_is_named(wrong: Any, sentence: str):
    g = build("other")
    first, last = g.submit(PROMPTS[:1], SamplingParams(logits_processor=(wrong,))) + g.submit(
        PROMPTS[1:2], SamplingParams(max_new_tokens=4)
    )
    with pytest.raises(OptionError, match=f"^The logits processor <lambda> {sentence}"):
        g.engine.run([first])
    g.engine.run([last])
    assert len(last.tokens) == 4 and isinstance(first.error, OptionError)
