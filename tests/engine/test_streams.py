"""Streams that are left, dropped or closed, in whatever moment, cost the others nothing."""

import threading
from collections.abc import Callable

import pytest

import runs
import tiny
from foredraft.core.drafter import View
from foredraft.engine.generator import Generator
from foredraft.engine.request import Sequence
from runs import NEW, plain

FIRST, SECOND = tiny.prompts((6, 11))


def running(g: Generator) -> Sequence:
    """The one request in the batch."""
    (sequence,) = g.engine._batch.sequences
    return sequence


def leave_by_break(g: Generator) -> None:
    for _ in g.stream(FIRST, max_new_tokens=NEW):
        break


def leave_by_error(g: Generator) -> None:
    with pytest.raises(ZeroDivisionError):
        for _ in g.stream(FIRST, max_new_tokens=NEW):
            raise ZeroDivisionError


def drop(g: Generator) -> None:
    stream = g.stream(FIRST, max_new_tokens=NEW)
    next(stream)
    del stream


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_error, drop])
def test_a_stream_that_is_left_is_not_advanced_again(leave: Callable[[Generator], None]):
    g = tiny.generator(runs.model())
    leave(g)
    left = running(g)
    assert left.counters.forwards == 1 and not left.finished
    assert g.generate(SECOND, max_new_tokens=NEW).tokens == plain(SECOND)
    assert left.finish_reason == "cancelled" and left.counters.forwards == 1
    assert tiny.pending(g) == 0


def test_a_stream_that_is_closed_is_cancelled_at_once():
    g = tiny.generator(runs.model())
    stream = g.stream(FIRST, max_new_tokens=NEW)
    taken = [next(stream), next(stream)]
    assert stream.finish_reason is None
    stream.close()
    assert stream.finish_reason == stream.result.finish_reason == "cancelled" and tiny.pending(g) == 0
    assert stream.result.tokens == plain(FIRST)[: len(stream.result.tokens)] != []
    assert stream.result.pieces[:2] == taken, "what was handed out before is in the result, too"
    assert [token for piece in stream.result.pieces for token in piece.tokens] == stream.result.tokens
    stream = g.stream(FIRST, max_new_tokens=NEW)
    next(stream)
    assert stream.result.finish_reason == "cancelled" and tiny.pending(g) == 0, "asking for the result closes it"


def test_a_stream_that_is_dropped_while_it_waits_never_runs():
    g = tiny.generator(runs.model(), max_rows=1)
    busy = g.stream(FIRST, max_new_tokens=NEW)
    next(busy)
    waits = g.stream(SECOND, max_new_tokens=NEW)
    sequence = waits._sequence
    next(busy)  # a step has seen it
    del waits
    assert list(busy) and busy.result.tokens == plain(FIRST)
    assert sequence.finish_reason == "cancelled" and sequence.counters.forwards == 0


@pytest.mark.parametrize("other_thread", [False, True], ids=["same thread", "other thread"])
def test_a_stream_that_is_dropped_in_the_middle_of_a_step(other_thread: bool):
    """As the garbage collector may do it; a finalizer that took the engine's lock would change rows or hang."""
    held = []

    def drop_it(view: View) -> None:
        if not other_thread:
            held.clear()
        elif held:
            thread = threading.Thread(target=held.clear, daemon=True)
            thread.start()
            thread.join(20)
            assert not thread.is_alive(), "the finalizer waits for the step, and the step for it"

    g = tiny.generator(runs.model(), runs.watched(drop_it))
    held.append(g.stream(FIRST, max_new_tokens=NEW))
    sequence = held[0]._sequence
    assert g.generate(SECOND, max_new_tokens=NEW).tokens == plain(SECOND)
    assert held == []
    assert (sequence.finish_reason, sequence.counters.forwards) == ("cancelled", 1)


def test_threads_that_share_a_generator_get_whole_results():
    g = tiny.generator(runs.model())
    prompts = tiny.prompts((3, 5, 8, 13, 21, 4), seed=3)
    found: dict[int, list[list[int]]] = {number: [] for number in range(len(prompts))}

    def work(number: int) -> None:
        for _ in range(3):
            result = g.generate(prompts[number], max_new_tokens=4 + number)
            assert result.stats.tokens == len(result.tokens) == 4 + number
            stream = g.stream(prompts[number], max_new_tokens=4 + number)
            tokens = [token for piece in stream for token in piece.tokens]
            assert tokens == result.tokens == stream.result.tokens
            found[number].append(tokens)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [len(each) for each in found.values()] == [3] * len(prompts)
    for number, prompt in enumerate(prompts):
        assert found[number][0] == plain(prompt)[: 4 + number]


def test_a_stream_and_an_engine_say_what_they_are():
    g = tiny.generator(runs.model())
    assert repr(g.engine) == f"Engine({g.engine.target.name}, running=0, waiting=0, max_rows=32)"
    stream = g.stream([1, 2], max_new_tokens=3, eos_token_id=())
    assert repr(stream) == "Stream(tokens=0, running)" and "waiting=1" in repr(g.engine)
    list(stream)
    assert repr(stream) == "Stream(tokens=3, finish_reason=length)"
    assert repr(g.astream([1, 2])) == "AsyncStream(tokens=0, running)"
