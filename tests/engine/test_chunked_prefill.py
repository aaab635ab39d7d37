"""Prompts are read in chunks between the steps of others: who waits how long, and that nothing else changes."""

from typing import Any

import pytest
import torch

import random_heads as heads
import runs
import tiny
from foredraft.core.errors import ForedraftError
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.generator import Generator
from foredraft.engine.request import Sequence
from runs import small, tapped

LONG = 3000
CHUNK = 64


def submit(g: Generator, length: int, *, new: int = 8, seed: int = 1) -> Sequence:
    return g.submit(tiny.prompts((length,), seed=seed), SamplingParams(max_new_tokens=new))[0]


def steps_to_first_token(g: Generator, sequence: Sequence) -> int:
    for count in range(1, LONG):
        g.engine.step()
        if sequence.tokens:
            return count
    raise AssertionError("It was never read.")


@pytest.mark.parametrize("running", [False, True], ids=["alone", "beside others"])
def test_short_prompts_do_not_wait_for_a_long_one(running: bool):
    """Its reader is never starved either: a quarter of each step's tokens is its own."""
    g = small("none", max_prefill_tokens=CHUNK)
    unloaded = steps_to_first_token(g, submit(g, 20, new=1))
    if running:
        submit(g, 5, new=400)
        g.engine.step()
    long = submit(g, LONG)
    g.engine.step()
    steps, waits = 1, []
    while not long.tokens:
        short = submit(g, 40, new=2, seed=steps)
        waits.append(steps_to_first_token(g, short))
        steps += waits[-1]
    g.engine.run([long])
    g.engine.close()
    assert unloaded == 1 and max(waits) <= 2 * unloaded
    assert len(waits) > 10 and LONG // CHUNK < steps <= 4 * LONG // CHUNK


def test_a_step_reads_no_more_than_its_chunk_while_rows_run():
    g = small("none", max_prefill_tokens=CHUNK)
    running = submit(g, 5, new=200)
    g.engine.step()
    others = [submit(g, length, new=1, seed=length) for length in (500, 70, 30, 90, 1)]
    tokens = 2
    while not all(other.finished for other in others):
        with runs.forwards(tapped()) as sizes:
            g.engine.step()
        assert sum(rows * nodes for rows, nodes in sizes[:-1]) <= 1.5 * CHUNK, "the last forward is the step's"
        assert len(running.tokens) == tokens, "it goes on by a token a step"
        tokens += 1
    g.engine.close()


def test_prompts_alone_are_read_in_large_chunks():
    g = small("none", max_prefill_tokens=CHUNK)
    sequences = [submit(g, 2 * CHUNK + 1, new=1, seed=seed) for seed in range(3)]
    with runs.forwards(tapped()) as sizes:
        g.engine.step()
    assert sizes == [(3, 2 * CHUNK), (3, 1)] and all(each.finished for each in sequences)


@pytest.mark.parametrize("kind", ["none", "draft model", "eagle3", "medusa", "relay", "cascade", "online eagle3"])
def test_outputs_do_not_depend_on_chunks(kind: str):
    """Requests of many lengths that come one after the other, and share prompts: the same tokens and drafts."""
    lengths = (30, 1, 100, 7, 64, 65, 2)
    whole, parts = small(kind, max_prefill_tokens=10_000), small(kind, max_prefill_tokens=7, max_rows=4)
    wanted = [whole.generate(prompt, max_new_tokens=12) for prompt in tiny.prompts(lengths)]
    sequences = []
    for prompt in tiny.prompts(lengths):
        sequences += parts.submit([prompt], SamplingParams(max_new_tokens=12), 2 if len(prompt) > 60 else 1)
        parts.engine.step()
    parts.engine.run(sequences)
    found = {each.prompt: (each.tokens, each.counters.accepted) for each in sequences}
    assert found == {
        tuple(prompt): (result.tokens, result.stats.accepted)
        for prompt, result in zip(tiny.prompts(lengths), wanted, strict=True)
    }
    assert all(each.tokens == found[each.prompt][0] for each in sequences)
    assert not parts.engine._stepper.cache._buffer_rows


@pytest.mark.parametrize("kind", heads.READERS)
def test_a_drafter_reads_a_long_prompt_while_the_target_does(kind: str, monkeypatch: pytest.MonkeyPatch):
    """So no step reads more than two chunks with each of its models, not even that of the first draft."""
    g = small(kind, max_prefill_tokens=CHUNK)
    widths = heads.own_reads(monkeypatch, g.engine._stepper.cache)
    long = submit(g, 1000, new=12)
    while not long.tokens:
        widths.clear()
        g.engine.step()
        models = 2 if kind in ("cascade", "bandit") else 1
        assert CHUNK < sum(widths) < models * (2 * CHUNK + 16)
    widths.clear()
    g.engine.run([long])
    assert long.counters.drafted > 0 and 0 < max(widths) < 16
    widths.clear()
    off = g.submit(tiny.prompts((1000,), seed=2), SamplingParams(max_new_tokens=4, speculate=False))[0]
    g.engine.run([off])
    if kind == "eagle3":
        assert widths == [], "it is not drafted for"


def test_a_long_prompt_that_leaves_half_read_leaves_nothing_with_the_drafter():
    g = small("eagle3", max_prefill_tokens=CHUNK)
    drafter: Any = g.engine.drafter
    wanted = g.generate(tiny.prompts((1000,))[0], max_new_tokens=12)
    for _ in range(2):
        long = submit(g, 1000, seed=3)
        for _ in range(3):
            g.engine.step()
        assert drafter._state._rows.count
        g.engine.cancel([long])
        assert not drafter._state._rows.count
        again = g.generate(tiny.prompts((1000,))[0], max_new_tokens=12)
        assert (again.tokens, again.stats.accepted) == (wanted.tokens, wanted.stats.accepted)


def test_padding_stays_within_the_cache():
    """Two prompts of like length left, one of them at the end of the longest row: together they would pass it."""
    g = small("none", max_prefill_tokens=512)
    prompts = tiny.prompts((4000, 500), seed=3)
    wanted = [g.generate(prompt, max_new_tokens=3).tokens for prompt in prompts]
    first = g.submit([prompts[0]], SamplingParams(max_new_tokens=3))[0]
    g.engine.step()
    second = g.submit([prompts[1]], SamplingParams(max_new_tokens=3))[0]
    slots = []
    while not first.finished or not second.finished:
        g.engine.step()
        slots.append(g.engine._stepper.cache.slots)
    assert [first.tokens, second.tokens] == wanted and len({*slots[:-1]}) == 1


def test_prefill_seconds_are_those_of_the_steps_that_read_the_prompt():
    g = small("none", max_prefill_tokens=CHUNK)
    running, long = submit(g, 5, new=30), submit(g, 1000, new=1)
    g.engine.run([running, long])
    stats = long.stats
    assert 0 < running.stats.prefill_seconds < stats.prefill_seconds < stats.seconds
    assert stats.seconds - stats.prefill_seconds < 0.5 * stats.prefill_seconds, "one step, and no other request's"


# Requests leave in the middle of their prompt.


@pytest.mark.parametrize("kind", ["none", "eagle3"])
def test_a_prompt_that_is_cancelled_leaves_its_row_clean(kind: str):
    """Half of it is read, NaN among it: the row's next request notices nothing."""
    poisoned = tiny.poisoned()
    poisoned.tap((0, 1, 2))
    g = tiny.generator(poisoned, heads.small_drafter(kind, tapped()), max_prefill_tokens=8, max_rows=2)
    [prompt] = tiny.prompts((9,), vocab=70)
    params = SamplingParams(max_new_tokens=6, logit_bias={77: -1e4})
    wanted = g.generate(prompt, params).tokens
    running = g.submit([[1, 2, 3]], SamplingParams(max_new_tokens=60, logit_bias={77: -1e4}))[0]
    g.engine.step()
    for _ in range(2):
        bad = g.submit([[77] * 60], params)[0]
        g.engine.step()
        assert g.engine.prefilling == 1
        g.engine.cancel([bad])
        assert g.engine.prefilling == 0 and bad.finish_reason == "cancelled" and bad.tokens == []
        assert g.generate(prompt, params).tokens == wanted
    assert not running.finished
    g.engine.cancel([running])
    assert not g.engine._stepper.cache._buffer_rows


def test_a_request_that_shares_its_prompt_outlives_the_one_it_is_read_for():
    g = small("eagle3", max_prefill_tokens=16)
    [prompt] = tiny.prompts((200,))
    wanted = g.generate(prompt, max_new_tokens=6).tokens
    running = submit(g, 4, new=100)
    g.engine.step()
    first, second = g.submit([prompt], SamplingParams(max_new_tokens=6), 2)
    g.engine.step()
    g.engine.cancel([first])
    [third] = g.submit([prompt], SamplingParams(max_new_tokens=6))
    with runs.forwards(tapped()) as sizes:
        g.engine.run([second, third])
    assert second.tokens == third.tokens == wanted and first.tokens == []
    assert sum(nodes for rows, nodes in sizes if nodes == 16) <= 199, "it is read once"
    g.engine.cancel([running])


def test_an_error_in_a_prompt_ends_its_request_alone():
    g = small("eagle3", max_prefill_tokens=160)
    prompts = tiny.prompts((4, 400, 300))
    wanted = [g.generate(prompt, max_new_tokens=40).tokens for prompt in prompts]
    [running] = g.submit([prompts[0]], SamplingParams(max_new_tokens=40))
    g.engine.step()
    bad, good = (g.submit([prompt], SamplingParams(max_new_tokens=40))[0] for prompt in prompts[1:])
    g.engine.step()

    def fails(module: object, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        if kwargs["input_ids"].shape == (1, 40):  # the oldest prompt's share
            raise MemoryError("no room for this chunk")

    hook = tapped().model.register_forward_pre_hook(fails, with_kwargs=True)
    g.engine.contained_step()
    hook.remove()
    g.engine.run([running, good])
    assert isinstance(bad.error, ForedraftError) and "Prefill of this request failed: no room" in str(bad.error)
    assert [running.tokens, good.tokens] == [wanted[0], wanted[2]]
    assert g.generate(prompts[1], max_new_tokens=40).tokens == wanted[1]


def test_closing_ends_prompts_that_are_being_read():
    g = small("draft model", max_prefill_tokens=8)
    sequences = [submit(g, 4, new=100), submit(g, 90, seed=2)]
    g.engine.step()
    g.engine.close()
    assert [each.finish_reason for each in sequences] == ["cancelled"] * 2
    assert not g.engine._stepper.cache._buffer_rows
