"""Processors and criteria of users inside ``generate``: what they are shown, and what is said of wrong ones."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    LogitsProcessor,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TypicalLogitsWarper,
)

import foredraft
import tiny
from foredraft.core.errors import OptionError

WIDTH, NEW, PAD = 10, 14, 95
CHAIN = "draft_model,num_assistant_tokens=3,num_assistant_tokens_schedule=constant,assistant_confidence_threshold=0"
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture(scope="module")
def model() -> Any:
    made = tiny.build()
    made.generation_config.update(pad_token_id=PAD, eos_token_id=None)
    return made


@pytest.fixture
def spec() -> Any:
    return foredraft.speculative((CHAIN, tiny.build()))


def prompts(shape: str) -> dict[str, Any]:
    ids = torch.randint(2, 90, (3, WIDTH), generator=torch.Generator().manual_seed(9))
    mask = torch.ones_like(ids)
    if shape == "padded":
        mask[0, :3] = mask[2, :6] = 0
    rows = slice(1) if shape == "one" else slice(None)
    return {"inputs": torch.where(mask == 0, PAD, ids)[rows], "attention_mask": mask[rows]}


class Notes(LogitsProcessor):
    """Notes down what it is shown, and bans what it saw in the call before the last: a state."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[list[int]], tuple[int, ...], torch.dtype]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append((input_ids.tolist(), tuple(scores.shape), scores.dtype))
        scores[:, len(self.seen) % 90] = -torch.inf  # in place, as transformers allows
        return scores


class Ends(StoppingCriteria):
    """Notes down what it is shown, and ends single rows."""

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **more: Any) -> Any:
        self.seen.append(input_ids.tolist())
        return torch.tensor([len(self.seen) > 5 + 3 * row for row in range(len(input_ids))])


@pytest.mark.parametrize("shape", ["one", "equal", "padded"])
@pytest.mark.parametrize("ends", [None, [94]])
def test_they_are_called_as_transformers_calls_them(shape: str, ends: Any, model: Any, spec: Any):
    """The same calls in the same order: rows that have ended, padding and places of rows included."""
    theirs, ours = (Notes(), Ends()), (Notes(), Ends())
    given = {**prompts(shape), **GREEDY, "eos_token_id": ends}
    wanted = model.generate(**given, logits_processor=[theirs[0]], stopping_criteria=[theirs[1]])
    found = model.generate(**given, logits_processor=[ours[0]], stopping_criteria=[ours[1]], custom_generate=spec)
    assert torch.equal(found, wanted)
    assert ours[0].seen == theirs[0].seen and ours[1].seen == theirs[1].seen
    assert spec.stats.accepted > 2 and spec.stats.accepted == sum(spec.stats.accepted_by_depth)


STOCK: dict[str, tuple[dict[str, Any], Callable[[], list[Any]]]] = {
    "a penalty on padding": ({}, lambda: [RepetitionPenaltyLogitsProcessor(1.6)]),
    "a penalty on a part of the prompt": ({}, lambda: [RepetitionPenaltyLogitsProcessor(1.6, 4)]),
    "a warper of greedy rows": ({}, lambda: [TypicalLogitsWarper(0.3)]),
    "two of a kind": ({}, lambda: [RepetitionPenaltyLogitsProcessor(1.3), RepetitionPenaltyLogitsProcessor(1.4)]),
    "a minimum with ends of its own": ({"eos_token_id": [94]}, lambda: [MinLengthLogitsProcessor(WIDTH + 8, 60)]),
    "top-k before the temperature": (
        {"do_sample": True, "temperature": 0.5, "top_k": 5},
        lambda: [TopKLogitsWarper(1), TemperatureLogitsWarper(3.0)],
    ),
}


@pytest.mark.parametrize("shape", ["one", "padded"])
@pytest.mark.parametrize("name", STOCK)
def test_transformers_own_processors_by_hand(name: str, shape: str, model: Any, spec: Any):
    options, make = STOCK[name]
    given = {**prompts(shape), **GREEDY, **options}
    wanted = model.generate(**given, logits_processor=make())
    assert torch.equal(model.generate(**given, logits_processor=make(), custom_generate=spec), wanted)


@pytest.mark.parametrize("shape", ["one", "padded"])
def test_transformers_own_criteria_by_hand(shape: str, model: Any, spec: Any):
    given = {**prompts(shape), **GREEDY}
    said = model.generate(**given)[0, WIDTH:].tolist()
    for options, criteria in (
        ({}, [MaxLengthCriteria(WIDTH + 5)]),
        ({"eos_token_id": [94]}, [EosTokenCriteria([94, said[4]])]),
    ):
        wanted = model.generate(**given, **options, stopping_criteria=criteria)
        found = model.generate(**given, **options, stopping_criteria=criteria, custom_generate=spec)
        assert torch.equal(found, wanted)


def test_samples_are_those_of_calls_without_processors(model: Any, spec: Any):
    given = {**prompts("padded"), "max_new_tokens": NEW, "do_sample": True, "temperature": 0.9, "top_k": 20}
    torch.manual_seed(4)
    wanted = model.generate(**given, custom_generate=spec)
    accepted = spec.stats.accepted
    torch.manual_seed(4)
    found = model.generate(**given, custom_generate=spec, logits_processor=[lambda ids, scores: scores * 1.0])
    assert torch.equal(found, wanted)
    assert 0 < spec.stats.accepted <= accepted  # all rows wait for the slowest


def test_without_a_padding_token_rows_end_with_an_end(model: Any, spec: Any):
    own: Any = tiny.build()
    own.generation_config.update(pad_token_id=None, eos_token_id=None)
    given = {**prompts("equal"), **GREEDY}
    said = own.generate(**given)[0, WIDTH:].tolist()
    wanted = own.generate(**given, eos_token_id=[said[3], 94])
    assert (wanted[0, WIDTH + 4 :] == said[3]).all()
    assert torch.equal(own.generate(**given, eos_token_id=[said[3], 94], custom_generate=spec), wanted)


def test_a_stop_string_may_begin_in_the_prompt(model: Any, spec: Any):
    tokenizer = tiny.tokenizer(eos="~")
    given = {**prompts("one"), **GREEDY}
    text = tokenizer.decode(model.generate(**given)[0])
    stop = text[WIDTH - 1 : WIDTH + 1]
    wanted = model.generate(**given, stop_strings=stop, tokenizer=tokenizer)
    assert wanted.shape[1] == WIDTH + 1
    assert torch.equal(spec.generate(model, **given, stop_strings=stop, tokenizer=tokenizer), wanted)


def test_what_a_criterion_cuts_off_is_not_counted(model: Any, spec: Any):
    tokenizer = tiny.tokenizer(eos="~")
    given = {**prompts("one"), **GREEDY, "eos_token_id": 94}
    said = model.generate(**given)[0, WIDTH:]
    stop = tokenizer.decode(said[1:2])  # the first step accepts three tokens
    found = spec.generate(model, **given, stop_strings=stop, tokenizer=tokenizer)
    assert found.shape[1] == WIDTH + 2
    assert (spec.stats.tokens, spec.stats.accepted, spec.stats.accepted_by_depth) == (2, 2, (1, 1))


IDLE = [lambda ids, scores: scores]
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a rule of the papers": (
        {"verifier": "block"},
        {"do_sample": True},
        "verifier='block' judges a draft by the laws at all of its tokens",
    ),
    "a lossy rule": ({"verifier": "approximate,top_k=2"}, {}, "verifier='approximate,top_k=2' judges a draft"),
    "few rows": ({"max_batch_size": 2}, {}, "3 rows have to run together, .*max_batch_size is 2"),
    "little memory": (
        {"kv_cache_memory_bytes": 2**17},
        {"max_new_tokens": 180},
        "3 rows have to run together, .*the KV cache holds .* tokens: give fewer prompts",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_asked_in_order_is_refused_before_anything_runs(name: str, model: Any):
    loading, options, sentence = REFUSED[name]
    calls: list[int] = []
    own = [lambda ids, scores: calls.append(1) or scores]
    spec = foredraft.speculative((CHAIN, tiny.build()), **loading)
    with pytest.raises(OptionError, match=sentence):
        spec.generate(model, **prompts("equal"), **{**GREEDY, **options}, logits_processor=own)
    assert calls == []
    wanted = model.generate(**prompts("one"), **GREEDY)
    assert torch.equal(model.generate(**prompts("one"), **GREEDY, custom_generate=foredraft.speculative()), wanted)


def test_padding_on_the_right_and_empty_rows_are_refused(model: Any, spec: Any):
    for zeros in (slice(7, None), slice(None)):
        given = prompts("equal")
        given["attention_mask"][1, zeros] = 0
        with pytest.raises(OptionError, match="leaves out the last token of row 1: pad on the left"):
            spec.generate(model, **given, **GREEDY)


def wrong_type(ids: Tensor, scores: Tensor) -> None:
    """Forgets to return anything."""


WRONG: dict[str, tuple[Any, str]] = {
    "nothing": (wrong_type, "wrong_type returned nothing; it must return scores of the shape"),
    "one row": (lambda ids, scores: scores[0], r"returned a tensor of shape \(96,\); it must"),
    "narrow": (lambda ids, scores: scores[:, :50], r"returned a tensor of shape \(3, 50\)"),
    "an array": (lambda ids, scores: scores.numpy(), "returned a ndarray"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_processor_is_named(name: str, model: Any, spec: Any):
    processor, sentence = WRONG[name]
    with pytest.raises(OptionError, match=sentence):
        spec.generate(model, **prompts("equal"), **GREEDY, logits_processor=[processor])
    wanted = model.generate(**prompts("equal"), **GREEDY)
    assert torch.equal(spec.generate(model, **prompts("equal"), **GREEDY), wanted)


def test_an_error_of_a_processor_is_raised_as_it_is(model: Any, spec: Any):
    def fails(ids: Tensor, scores: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        spec.generate(model, **prompts("equal"), **GREEDY, logits_processor=[fails])


def test_threads_take_turns(model: Any, spec: Any):
    found: dict[int, Tensor] = {}

    def call(number: int) -> None:
        processors = [Notes()] if number % 2 else None
        found[number] = model.generate(**prompts("padded"), **GREEDY, logits_processor=processors, custom_generate=spec)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, output in found.items():
        processors = [Notes()] if number % 2 else None
        assert torch.equal(output, model.generate(**prompts("padded"), **GREEDY, logits_processor=processors))
    assert len(found) == 4
