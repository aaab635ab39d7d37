"""asyncio: calls and streams share one batch and one thread, and what is cancelled stops."""

import asyncio
import gc
import threading
from collections.abc import Callable

import pytest

import runs
import tiny
from foredraft.core.drafter import View
from foredraft.core.errors import ForedraftError, OptionError, PromptError, UsageError
from foredraft.engine.generator import Generator
from foredraft.engine.request import Sequence
from foredraft.engine.stream import AsyncStream
from foredraft.model.text.tokenizer import Tokenizer
from runs import NEW

PROMPTS = tiny.prompts((6, 11, 3, 20))


def plain(number: int) -> list[int]:
    return runs.plain(PROMPTS[number])


def build() -> Generator:
    return tiny.generator(runs.model(), tokenizer=Tokenizer(tiny.tokenizer()))


def watched(hook: Callable[[View], None], **options) -> Generator:
    """A generator that calls ``hook`` in the middle of each step."""
    return tiny.generator(runs.model(), runs.watched(hook), **options)


def test_agenerate_returns_what_generate_does():
    g = build()

    async def calls() -> None:
        one = await g.agenerate(PROMPTS[0], max_new_tokens=NEW)
        assert (one.tokens, one.finish_reason, one.stats.tokens) == (plain(0), "length", NEW)
        several = await g.agenerate(PROMPTS, max_new_tokens=NEW)
        assert [result.tokens for result in several] == [plain(number) for number in range(len(PROMPTS))]
        wanted = g.generate(PROMPTS[0], num_return_sequences=3, temperature=1.0, max_new_tokens=4, seed=5)
        found = await g.agenerate(PROMPTS[0], num_return_sequences=3, temperature=1.0, max_new_tokens=4, seed=5)
        assert [result.tokens for result in found] == [result.tokens for result in wanted]
        with pytest.raises(OptionError, match="Did you mean temperature"):
            await g.agenerate(PROMPTS[0], temprature=1.0)  # type: ignore[call-overload]
        with pytest.raises(OptionError, match="num_return_sequences"):
            await g.agenerate(PROMPTS[0], num_return_sequences=0)
        with pytest.raises(PromptError, match="Prompt 1: The prompt is empty"):
            await g.agenerate([PROMPTS[0], []])

    asyncio.run(calls())
    assert tiny.pending(g) == 0


def test_calls_that_are_awaited_together_share_the_batch():
    """More than asyncio's own pool has threads: each step has all of them, or all that came before it began."""
    count, rows = 40, []
    g = watched(lambda view: rows.append(len(view.rows)), max_rows=64)
    prompts = tiny.prompts(range(1, count + 1))

    async def calls() -> list:
        return await asyncio.gather(*[g.agenerate(prompt, max_new_tokens=NEW) for prompt in prompts])

    results = asyncio.run(calls())
    assert [result.tokens for result in results] == [
        result.tokens for result in build().generate(prompts, max_new_tokens=NEW)
    ]
    assert max(rows) == count and len(rows) <= 2 * NEW


def test_no_thread_is_left_when_no_task_waits():
    before, g = set(threading.enumerate()), build()
    for _ in range(2):
        asyncio.run(g.agenerate(PROMPTS[0], max_new_tokens=4))
        for thread in set(threading.enumerate()) - before:
            thread.join(20)
            assert not thread.is_alive()


async def two_calls(
    g: Generator, inside: threading.Event, submitted: threading.Event
) -> tuple[asyncio.Task, asyncio.Task]:
    """The second is made while a step of the first runs."""
    first = asyncio.create_task(g.agenerate(PROMPTS[0], max_new_tokens=NEW))
    while not inside.is_set():
        await asyncio.sleep(0.001)
    second = asyncio.create_task(g.agenerate(PROMPTS[1], max_new_tokens=NEW))
    await asyncio.sleep(0)
    submitted.set()
    return first, second


def test_a_call_can_be_made_while_a_step_runs():
    """The event loop waits neither for the step nor for its lock."""
    inside, submitted = threading.Event(), threading.Event()

    def hook(view: View) -> None:
        inside.set()
        assert submitted.wait(20), "the event loop is blocked"

    g = watched(hook)

    async def calls() -> list:
        return [await task for task in await two_calls(g, inside, submitted)]

    assert [result.tokens for result in asyncio.run(calls())] == [plain(0), plain(1)]


def cancelling(target: Callable[[Generator], asyncio.Task], step: int) -> tuple[Sequence, list[int]]:
    """Cancel a task while a step of its request runs; the request, and another's tokens."""
    steps, done = 0, threading.Event()
    tasks: list[asyncio.Task] = []
    seen: list[Sequence] = []

    def hook(view: View) -> None:
        nonlocal steps
        steps += 1
        if steps == step:
            seen.extend(g.engine._batch.sequences)
            tasks[0].get_loop().call_soon_threadsafe(tasks[0].cancel)
            assert done.wait(20)

    g = watched(hook)

    async def calls() -> list[int]:
        tasks.append(target(g))
        tasks[0].add_done_callback(lambda task: done.set())
        await asyncio.sleep(0)  # it is the first to submit
        other = asyncio.create_task(g.agenerate(PROMPTS[1], max_new_tokens=NEW))
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        return (await other).tokens

    tokens = asyncio.run(calls())
    assert tiny.pending(g) == 0
    return seen[0], tokens


async def read(stream: AsyncStream) -> None:
    async for _ in stream:
        pass


@pytest.mark.parametrize(
    "target",
    [
        lambda g: asyncio.create_task(g.agenerate(PROMPTS[0], max_new_tokens=NEW)),
        lambda g: asyncio.create_task(read(g.astream(PROMPTS[0], max_new_tokens=NEW))),
    ],
    ids=["agenerate", "astream"],
)
def test_a_task_that_is_cancelled_ends_its_request_at_the_next_step(target: Callable[[Generator], asyncio.Task]):
    sequence, others = cancelling(target, step=3)
    assert (sequence.finish_reason, sequence.counters.forwards) == ("cancelled", 3)
    assert others == plain(1)


def test_a_stream_has_its_result_and_reason():
    g = build()

    async def calls() -> None:
        stream = g.astream(PROMPTS[0], max_new_tokens=NEW)
        assert stream.finish_reason is None
        with pytest.raises(UsageError, match="still running"):
            _ = stream.result
        pieces = [piece async for piece in stream]
        assert [token for piece in pieces for token in piece.tokens] == plain(0) == stream.result.tokens
        assert (stream.finish_reason, stream.result.pieces) == ("length", pieces)
        assert stream.result.stats.tokens == NEW
        with pytest.raises(StopAsyncIteration):
            await stream.__anext__()
        async with g.astream(PROMPTS[0], max_new_tokens=NEW) as stream:
            await stream.__anext__()
        assert stream.finish_reason == stream.result.finish_reason == "cancelled"
        assert stream.result.tokens == plain(0)[: len(stream.result.tokens)]

    asyncio.run(calls())
    assert tiny.pending(g) == 0


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_a_stream_that_is_left_is_not_advanced_again(error: type[Exception] | None):
    g = build()

    async def leave() -> None:
        async for _ in g.astream(PROMPTS[0], max_new_tokens=NEW):
            if error is not None:
                raise error
            break

    async def calls() -> None:
        try:
            await leave()
        except ZeroDivisionError:
            pass
        (left,) = g.engine._batch.sequences
        assert not left.finished and left.counters.forwards == 1
        assert (await g.agenerate(PROMPTS[1], max_new_tokens=NEW)).tokens == plain(1)
        assert (left.finish_reason, left.counters.forwards) == ("cancelled", 1)

    asyncio.run(calls())


def test_requests_that_no_task_awaits_any_more_can_be_ended():
    """The thread that steps has gone after the first piece, so nobody takes another step."""
    before, g = set(threading.enumerate()), build()

    async def calls() -> None:
        stream = g.astream(PROMPTS[0], max_new_tokens=NEW)
        await stream.__anext__()
        for thread in set(threading.enumerate()) - before:
            thread.join(20)
        (left,) = g.engine._batch.sequences
        g.driver.end([left])
        for thread in set(threading.enumerate()) - before:
            thread.join(20)
        assert (left.finish_reason, left.counters.forwards) == ("cancelled", 1)

    asyncio.run(calls())
    assert tiny.pending(g) == 0


def test_threads_and_tasks_share_a_generator():
    g = build()

    async def calls() -> None:
        async def stream() -> list[int]:
            return [token async for piece in g.astream(PROMPTS[2], max_new_tokens=NEW) for token in piece.tokens]

        threaded = asyncio.to_thread(g.generate, PROMPTS[0], max_new_tokens=NEW)
        result, other, tokens = await asyncio.gather(threaded, g.agenerate(PROMPTS[1], max_new_tokens=NEW), stream())
        assert [result.tokens, other.tokens, tokens] == [plain(0), plain(1), plain(2)]

    for _ in range(5):
        asyncio.run(calls())


def test_a_fault_of_a_step_reaches_those_who_were_in_it():
    """And not a request that is submitted while that step runs."""
    inside, submitted = threading.Event(), threading.Event()

    def hook(view: View) -> None:
        if not inside.is_set():
            inside.set()
            assert submitted.wait(20)
            raise ZeroDivisionError("a fault of the drafter")

    g = watched(hook, max_rows=1)

    async def calls() -> None:
        first, second = await two_calls(g, inside, submitted)
        with pytest.raises(ForedraftError, match="a fault of the drafter"):
            await first
        assert (await second).tokens == plain(1)

    asyncio.run(calls())


def test_a_fault_that_no_request_carries_is_raised_and_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch):
    g = build()

    def broken() -> None:
        raise ZeroDivisionError("a fault of the engine")

    with monkeypatch.context() as patch:
        patch.setattr(g.engine, "_step", broken)
        with pytest.raises(ZeroDivisionError, match="a fault of the engine"):
            asyncio.run(asyncio.wait_for(g.agenerate(PROMPTS[0], max_new_tokens=NEW), 20))
    assert g.generate(PROMPTS[1], max_new_tokens=NEW).tokens == plain(1)
    assert tiny.pending(g) == 0


def test_the_thread_goes_with_its_generator():
    g = build()
    before = {thread for thread in threading.enumerate() if thread.name.startswith("foredraft")}
    asyncio.run(g.agenerate(PROMPTS[0], max_new_tokens=2))
    asyncio.run(g.agenerate(PROMPTS[0], max_new_tokens=2))
    mine = {thread for thread in threading.enumerate() if thread.name.startswith("foredraft")} - before
    del g
    gc.collect()
    for thread in mine:  # none if it has ended with its work already
        thread.join(20)
        assert not thread.is_alive()
