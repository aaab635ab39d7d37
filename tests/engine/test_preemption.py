"""Memory follows what rows hold: a long request takes its own share alone, and where outputs outgrow the memory, the
last requests wait again and go on as if nothing had happened."""

from collections.abc import Callable
from typing import Any

import pytest

import native
import runs
import tiny
from foredraft.compose.load import load
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.engine import Engine
from foredraft.engine.generator import Generator
from foredraft.engine.request import Sequence
from foredraft.model.kv.cache import BUCKET

SAMPLED = {"temperature": 1.0, "seed": 3}
NEW = 120
SHORT = 90


def finish(engine: Engine, sequences: list[Sequence], check: Callable[[], object] = lambda: None) -> int:
    """Run these to their ends; the most that were in the batch together."""
    together = 0
    while not all(each.finished for each in sequences):
        engine.step()
        together = max(together, len(engine._batch))
        check()
    return together


def held(engine: Engine) -> int:
    cache = engine.cache
    return sum(cache.held(row) for row in range(cache.rows))


def submitted(g: Generator, prompts: list[list[int]], **options: Any) -> list[Sequence]:
    params = SamplingParams(**{"max_new_tokens": NEW, **options})
    return [g.submit([prompt], params)[0] for prompt in prompts]


def test_a_long_request_takes_no_more_memory_than_its_own():
    budget, prompts = 6 * BUCKET, tiny.prompts((40,) * 24)
    alone = runs.small("none", max_rows=24, max_slots=budget)
    together = finish(alone.engine, submitted(alone, prompts, max_new_tokens=20))
    g = runs.small("none", max_rows=24, max_slots=budget)
    long, *others = submitted(g, [tiny.prompts((700,))[0], *prompts], max_new_tokens=20)
    most = 0
    while not long.tokens:
        g.engine.step()
    while not long.finished:
        g.engine.step()
        most = max(most, len(g.engine._batch))
        assert held(g.engine) <= budget
    own, short = g.engine.cache.held(0), 2 * 64
    assert together == budget // short and most == 1 + (budget - own) // short
    finish(g.engine, others)


def test_tokens_that_an_output_does_not_have_take_no_memory():
    """Six requests that might need twice the memory."""
    g = runs.small("none", max_rows=8, max_slots=3 * BUCKET)
    sequences = submitted(g, tiny.prompts((10,) * 6), max_new_tokens=200)
    for _ in range(8):
        g.engine.step()
    assert len(g.engine._batch) == 6 and held(g.engine) == 6 * 64
    g.engine.cancel(sequences)


@pytest.mark.parametrize(
    ("kind", "options", "prefixes"),
    [
        ("none", {}, False),
        ("none", {**SAMPLED, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3}, True),
        ("draft model", SAMPLED, True),
        ("eagle3", SAMPLED, False),
        ("medusa", {}, True),
        ("cascade", SAMPLED, True),
        ("relay", {}, False),
    ],
)
def test_requests_that_wait_again_say_what_they_say_alone(kind: str, options: dict, prefixes: bool):
    prompts = tiny.prompts((30, 35, 20, 32, 28), seed=2)
    plain = runs.small(kind)
    wanted = [plain.generate(prompt, max_new_tokens=SHORT, **options).tokens for prompt in prompts]
    budget = 448
    g = runs.small(kind, max_rows=8, max_slots=budget, prefix_cache=prefixes)
    sequences = submitted(g, prompts, max_new_tokens=SHORT, **options)
    finish(g.engine, sequences, lambda: held(g.engine) <= budget or pytest.fail("more memory than there is"))
    assert g.engine.preemptions > 0 and [each.tokens for each in sequences] == wanted
    for each in sequences:
        assert (each.stats.tokens, each.stats.prompt_tokens) == (SHORT, len(each.prompt))
        assert each.stats.cached_tokens < len(each.prompt)
    again = submitted(g, prompts[:1], max_new_tokens=SHORT, **options)
    finish(g.engine, again)
    assert again[0].tokens == wanted[0]


@native.needs_compiler
@pytest.mark.parametrize("kv_cache_dtype", ["float16", "int8"])
def test_outputs_on_the_native_engine_are_the_same_bits(kv_cache_dtype: str):
    target = native.native("llama", "int4", kv_cache_dtype, max_position_embeddings=1024)
    prompts, options = tiny.prompts((30, 70, 20, 50, 45), seed=4), {**SAMPLED, "logprobs": 3}
    plain = tiny.generator(target)
    wanted = submitted(plain, prompts, **options)
    finish(plain.engine, wanted)
    g = tiny.generator(target, max_rows=8, max_slots=2 * BUCKET)
    sequences = submitted(g, prompts, **options)
    finish(g.engine, sequences)
    assert g.engine.preemptions > 0 and plain.engine.preemptions == 0
    for own, alone in zip(sequences, wanted, strict=True):
        assert own.tokens == alone.tokens and own.logprobs == alone.logprobs


def test_the_last_of_the_lowest_priority_waits_and_comes_back_in_its_place():
    g = runs.small("none", max_rows=8, max_slots=2 * BUCKET)
    prompts = tiny.prompts((30, 33, 36, 39, 42))
    order = [0, 1, 0, 1, 0]
    params = SamplingParams(max_new_tokens=NEW)
    sequences = [g.submit([prompt], params, priority=own)[0] for prompt, own in zip(prompts, order, strict=True)]
    late: list[Sequence] = []
    waited: list[int] = []
    while not all(each.finished for each in (*sequences, *late)):
        g.engine.step()
        if g.engine.preemptions and not late:
            late = submitted(g, tiny.prompts((10,), seed=8))
        for each in g.engine._admission.waiting:
            if each.tokens and sequences.index(each) not in waited:
                waited.append(sequences.index(each))
        queue = [(each.priority, each.arrival) for each in g.engine._admission.waiting]
        assert queue == sorted(queue)
    assert waited == [1, 4]


def test_requests_wait_again_while_their_prompt_is_read_for_several():
    """First the one that would get a copy, then the one into whose row the prompt is read."""
    prompt, first = tiny.prompts((300,))[0], tiny.prompts((100,), seed=3)[0]
    plain = runs.small("none")
    wanted = plain.generate(prompt, max_new_tokens=9).tokens
    g = runs.small("none", max_rows=8, max_slots=4 * BUCKET, max_prefill_tokens=1, prefix_cache=True)
    [running] = submitted(g, [first], max_new_tokens=400)
    while not running.tokens:
        g.engine.step()
    shared = g.submit([prompt, prompt], SamplingParams(max_new_tokens=9))
    g.engine.step()
    assert g.engine.prefilling == 2
    while not g.engine.preemptions:
        g.engine.step()
        assert g.engine.running + g.engine.waiting == 3
    assert g.engine.preemptions == 1 and g.engine._admission.waiting == (shared[1],)
    read = g.engine._reader._readings[0].num_read
    assert read > 100
    g.engine._admission.max_slots = 600  # too little for the prompt beside the running request
    while g.engine.preemptions < 2:
        assert g.engine._reader._readings[0].num_read >= read and not shared[0].tokens
        g.engine.step()
    assert g.engine._admission.waiting == tuple(shared) and g.engine.running == 1
    g.engine.cancel([running])
    finish(g.engine, shared)
    assert [each.tokens for each in shared] == [wanted, wanted]


def test_a_request_that_waits_again_can_be_cancelled():
    g = runs.small("none", max_rows=8, max_slots=2 * BUCKET)
    sequences = submitted(g, tiny.prompts((30,) * 5))
    while not g.engine.preemptions:
        g.engine.step()
    [gone] = [each for each in g.engine._admission.waiting if each.tokens][:1]
    said = list(gone.tokens)
    g.engine.cancel([gone])
    assert gone.tokens == said and gone.finish_reason == "cancelled" and gone not in g.engine._admission.waiting
    finish(g.engine, sequences)


def test_an_interruption_while_requests_go_back_loses_none(monkeypatch: pytest.MonkeyPatch):
    g = runs.small("none", max_rows=8, max_slots=2 * BUCKET)
    sequences = submitted(g, tiny.prompts((30,) * 5))

    def stop(rows: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(g.engine.cache, "zero", stop)
    with pytest.raises(KeyboardInterrupt):
        finish(g.engine, sequences)
    finish(g.engine, sequences)
    assert g.engine.running == g.engine.waiting == 0
    assert {each.finish_reason for each in sequences} == {"cancelled", "length"}
    assert len(g.generate([1, 2, 3], max_new_tokens=30).tokens) == 30


def test_the_exact_mode_reads_nothing_twice():
    """What is read in another shape may differ by rounding, so requests get the memory that they may need."""
    with load(tiny.build("llama"), "prompt_lookup", exact=True, kv_cache_memory_bytes=2 * BUCKET * 256) as g:
        sequences = submitted(g, tiny.prompts((30,) * 5), max_new_tokens=80)
        assert finish(g.engine, sequences) == 2 and g.engine.preemptions == 0


def test_a_draft_models_cache_keeps_to_the_same_limit():
    budget = 2 * BUCKET
    g = runs.small("draft model", max_rows=8, max_slots=budget, prefix_cache=True)
    own = g.engine.drafter._runner.cache

    def check() -> None:
        assert sum(own.held(row) for row in range(own.rows)) <= budget

    for seed in range(3):
        finish(g.engine, submitted(g, tiny.prompts((30, 70, 20, 50, 45), seed=seed), max_new_tokens=60), check)
