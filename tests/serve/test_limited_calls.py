"""Calls with limits in processes of their own."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import limited_functions
import pytest

from foredraft.serve.errors import ApiError
from foredraft.serve.limited_calls import Failed, LimitedCalls, Limits, TookTooLong


def run(test: Callable[[LimitedCalls], Awaitable[None]]) -> None:
    async def main() -> None:
        calls = LimitedCalls(limited_functions.made)
        try:
            await test(calls)
        finally:
            calls.close()

    asyncio.run(main())


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


async def resting(file: Path) -> int:
    """The process of ``rest``, when it runs."""
    while not (file.exists() and file.read_text()):
        await asyncio.sleep(0.01)
    return int(file.read_text())


def state(process: int) -> str:
    """R: it runs; T: it is stopped."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


async def become(process: int, wanted: str) -> None:
    deadline = time.monotonic() + 20
    while state(process) != wanted:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def gone(process: int) -> None:
    deadline = time.monotonic() + 20
    while alive(process):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_results_and_errors_come_back():
    async def check(calls: LimitedCalls) -> None:
        assert await calls.run(limited_functions.lookup, "answer") == 42
        with pytest.raises(KeyError, match="question"):
            await calls.run(limited_functions.lookup, "question")
        with pytest.raises(ApiError, match=r"No\.") as caught:
            await calls.run(limited_functions.refuse)
        error = caught.value
        assert (error.status, error.param, error.retry_after) == (429, "x", 3)
        large = 3 * 2**20
        assert await calls.run(limited_functions.allocate, large) == large

    run(check)


def test_limits_and_crashes_end_one_call_only():
    async def check(calls: LimitedCalls) -> None:
        beside = asyncio.ensure_future(calls.run(limited_functions.work, limits=Limits(seconds=0.5)))
        with pytest.raises(Failed):
            await calls.run(limited_functions.crash)
        if sys.platform == "linux":
            with pytest.raises(Failed):
                await calls.run(limited_functions.allocate, 2**30, limits=Limits(memory_bytes=2**24))
        assert not beside.done()
        with pytest.raises(TookTooLong):
            await beside
        assert await calls.run(limited_functions.lookup, "answer", limits=Limits(10, 2**28)) == 42

    run(check)


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of Linux")
def test_calls_give_way_to_the_steps():
    async def check(calls: LimitedCalls) -> None:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert await calls.run(limited_functions.priority) == 10
        assert await calls.run(limited_functions.priority, limits=Limits(pausable=True)) == own

    run(check)


@pytest.mark.skipif(sys.platform != "linux", reason="reads states of processes from Linux")
def test_paused_calls_rest_until_they_are_resumed(tmp_path: Path):
    async def check(calls: LimitedCalls) -> None:
        limits = [Limits(1, pausable=True), Limits(1), Limits(1, pausable=True)]
        files = [tmp_path / str(number) for number in range(len(limits))]
        asked = [
            asyncio.ensure_future(calls.run(limited_functions.write_and_work, file, limits=limit))
            for file, limit in zip(files, limits, strict=True)
        ]
        first, other, last = [await resting(file) for file in files]
        calls.pause()
        await become(first, "T")
        await become(last, "T")
        assert state(other) != "T"
        calls.resume()
        await become(first, "R")
        calls.pause()
        asked[2].cancel()  # a paused call ends, too
        await gone(last)
        calls.resume()
        for each in asked[:2]:
            with pytest.raises(TookTooLong):
                await each

    run(check)


@pytest.mark.parametrize("closes", [False, True])
def test_no_process_is_left_of_a_cancelled_call_or_after_close(closes: bool, tmp_path: Path):
    async def check(calls: LimitedCalls) -> None:
        call = asyncio.ensure_future(calls.run(limited_functions.rest, tmp_path / "process"))
        process = await resting(tmp_path / "process")
        calls.close() if closes else call.cancel()
        await gone(process)
        call.cancel()

    run(check)


def test_another_fork_server_takes_the_place_of_one_that_was_killed(tmp_path: Path):
    async def check(calls: LimitedCalls) -> None:
        waiting = [calls.run(limited_functions.rest, tmp_path / f"process {i}") for i in range(2)]
        tasks = [asyncio.ensure_future(each) for each in waiting]
        first = [await resting(tmp_path / f"process {i}") for i in range(2)]
        with open(f"/proc/{first[0]}/stat") as file:
            server = int(file.read().rpartition(")")[2].split()[1])
        for i in range(2):
            (tmp_path / f"process {i}").unlink()
        os.kill(server, signal.SIGKILL)
        for child in first:
            os.kill(child, signal.SIGKILL)
        second = [await resting(tmp_path / f"process {i}") for i in range(2)]
        assert not set(first) & set(second)
        assert await calls.run(limited_functions.lookup, "answer") == 42
        for task in tasks:
            task.cancel()

    run(check)
