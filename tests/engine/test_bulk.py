"""Bulk runs: prompts are read as rows become free, and one bad prompt costs no other its result."""

import functools
import operator
from collections.abc import Iterator

import pytest

import runs
import tiny
from foredraft.core.drafter import View
from foredraft.core.errors import ForedraftError, NumericsError, OptionError, PromptError
from foredraft.model.hf.causal_lm import CausalLM

NEW = 6
ROWS = 4
PROMPTS = tiny.prompts([1 + (7 * number) % 13 for number in range(25)])


@functools.cache
def model() -> CausalLM:
    return tiny.poisoned()


BAN = {77: -1e4}
CLEAN = [[token if token != 77 else 7 for token in prompt] for prompt in PROMPTS]


@functools.cache
def wanted() -> list[list[int]]:
    results = tiny.generator(model()).generate(CLEAN, max_new_tokens=NEW, logit_bias=BAN)
    return [result.tokens for result in results]


def test_all_come_by_their_number_and_few_are_read_ahead():
    g = tiny.generator(model(), max_rows=ROWS)
    prompts, found, told = iter(CLEAN), {}, []
    bulk = g.as_completed(
        prompts, max_new_tokens=NEW, logit_bias=BAN, progress=lambda done, tokens: told.append((done, tokens))
    )
    assert operator.length_hint(prompts) == len(CLEAN), "none is read yet"
    for completed in bulk:
        assert completed.error is None and completed.index not in found
        found[completed.index] = completed.result.tokens
        read = len(CLEAN) - operator.length_hint(prompts)
        assert read - len(found) <= ROWS and tiny.pending(g) <= ROWS
    assert [found[number] for number in range(len(CLEAN))] == wanted()
    assert told == [(done, NEW * done) for done in range(1, len(CLEAN) + 1)]


def test_the_batch_is_full_until_prompts_run_out():
    rows: list[int] = []
    prompts = iter(CLEAN)

    def count(view: View) -> None:
        if operator.length_hint(prompts):
            rows.append(len(view.rows))

    g = tiny.generator(model(), runs.watched(count, vocab=77), max_rows=ROWS)
    assert len(list(g.as_completed(prompts, max_new_tokens=NEW, logit_bias=BAN))) == len(CLEAN)
    assert set(rows) == {ROWS}


def test_bad_prompts_are_handed_out_with_their_error_and_the_others_go_on():
    g = tiny.generator(model(), max_rows=ROWS)
    prompts: list = list(CLEAN)
    prompts[3], prompts[9], prompts[17], prompts[20] = [], [1, 96], "a text", [5, 77, 5]
    found = {each.index: each for each in g.as_completed(prompts, max_new_tokens=NEW, logit_bias=BAN)}
    assert sorted(found) == list(range(len(CLEAN)))
    sentences = {
        3: (PromptError, "Prompt 3: The prompt is empty"),
        9: (PromptError, "Prompt 9: The prompt has token ids outside"),
        17: (PromptError, "Prompt 17: This model came without a tokenizer"),
        20: (NumericsError, "Prompt 20: No next token can be chosen"),
    }
    for number, (kind, sentence) in sentences.items():
        error = found[number].error
        assert isinstance(error, kind) and str(error).startswith(sentence)
        with pytest.raises(kind, match=sentence):
            _ = found[number].result
    for number in set(found) - set(sentences):
        assert found[number].result.tokens == wanted()[number]


def test_a_list_with_a_bad_prompt_is_refused_by_its_number():
    g = tiny.generator(model())
    with pytest.raises(PromptError, match="Prompt 2: The prompt is empty"):
        g.generate([*CLEAN[:2], []])
    with pytest.raises(PromptError, match="Prompt 1: The prompt has token ids outside"):
        g.beam_search([[1], [96]])
    with pytest.raises(PromptError, match="^The prompt is empty"):
        g.generate([])
    with pytest.raises(NumericsError, match="Prompt 1: No next token can be chosen"):
        g.generate([CLEAN[0], [5, 77, 5]], num_return_sequences=2, max_new_tokens=NEW, logit_bias=BAN)
    with pytest.raises(NumericsError, match="^No next token can be chosen"):
        g.generate([5, 77, 5], max_new_tokens=NEW, logit_bias=BAN)
    assert tiny.pending(g) == 0


def test_a_fault_of_one_step_costs_the_prompts_of_that_step():
    steps = 0

    def second_fails(view: View) -> None:
        nonlocal steps
        steps += 1
        if steps == 2:
            raise ZeroDivisionError("a fault of the drafter")

    g = tiny.generator(model(), runs.watched(second_fails, vocab=77), max_rows=ROWS)
    found = {each.index: each for each in g.as_completed(CLEAN, max_new_tokens=NEW, logit_bias=BAN)}
    failed = [number for number, each in found.items() if each.error is not None]
    assert failed == list(range(ROWS))
    for number in failed:
        error = found[number].error
        assert isinstance(error, ForedraftError)
        assert f"Prompt {number}: " in str(error) and "a fault of the drafter" in str(error)
    for number in set(found) - set(failed):
        assert found[number].result.tokens == wanted()[number]


def test_leaving_the_loop_cancels_what_runs():
    g = tiny.generator(model(), max_rows=ROWS)
    for _ in g.as_completed(CLEAN, max_new_tokens=NEW, logit_bias=BAN):
        break
    left = list(g.engine._batch.sequences)
    forwards = [sequence.counters.forwards for sequence in left]
    assert g.generate(CLEAN[0], max_new_tokens=NEW, logit_bias=BAN).tokens == wanted()[0]
    assert [sequence.counters.forwards for sequence in left] == forwards
    assert all(sequence.finished for sequence in left) and tiny.pending(g) == 0


def test_an_error_of_the_callers_own_prompts_is_raised():
    g = tiny.generator(model(), max_rows=ROWS)

    def prompts() -> Iterator[list[int]]:
        yield CLEAN[0]
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        list(g.as_completed(prompts(), max_new_tokens=NEW))
    assert g.generate(CLEAN[0], max_new_tokens=NEW, logit_bias=BAN).tokens == wanted()[0]
    assert tiny.pending(g) == 0


def test_what_cannot_be_is_refused_at_the_call():
    g = tiny.generator(model())
    with pytest.raises(OptionError, match="Did you mean max_new_tokens"):
        g.as_completed([[1]], max_new_token=3)  # type: ignore[call-arg]
    with pytest.raises(PromptError, match="as_completed runs many prompts"):
        g.as_completed("one")
    for nothing in (None, 3):
        with pytest.raises(PromptError, match="Prompts are a list or another iterable, not a"):
            g.as_completed(nothing)  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptionError, match="progress must be a function of \\(done, tokens\\), not an int"):
        g.as_completed([[1]], progress=3)  # pyright: ignore[reportArgumentType]
    assert list(g.as_completed([])) == []


def test_each_prompt_has_a_random_stream_that_its_number_decides():
    def run(rows: int) -> list[list[int]]:
        g = tiny.generator(model(), max_rows=rows)
        bulk = g.as_completed([CLEAN[1]] * 6, max_new_tokens=NEW, temperature=1.0, seed=3, logit_bias=BAN)
        return [each.result.tokens for each in sorted(bulk, key=lambda each: each.index)]

    found = run(2)
    assert found == run(6) and len({tuple(tokens) for tokens in found}) == 6
    alone = tiny.generator(model()).generate(CLEAN[1], max_new_tokens=NEW, temperature=1.0, seed=3, logit_bias=BAN)
    assert found[0] == alone.tokens
