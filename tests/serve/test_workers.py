"""Calls with limits in processes of their own."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import worker_functions

from foredraft.serve.errors import ApiError
from foredraft.serve.workers import Failed, Limits, TookTooLong, Worker


def run(test: Callable[[Worker], Awaitable[None]]) -> None:
    async def main() -> None:
        worker = Worker(worker_functions.made, ["foredraft.serve.conversions"], niceness=3)
        try:
            await test(worker)
        finally:
            worker.close()

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
    async def check(worker: Worker) -> None:
        assert await worker.run(worker_functions.lookup, "answer") == 42
        with pytest.raises(KeyError, match="question"):
            await worker.run(worker_functions.lookup, "question")
        with pytest.raises(ApiError, match=r"No\.") as caught:
            await worker.run(worker_functions.refuse)
        error = caught.value
        assert (error.status, error.param, error.retry_after) == (429, "x", 3)
        large = 3 * 2**20
        assert await worker.run(worker_functions.allocate, large) == large
        assert len(await worker.run(worker_functions.repeat, b"a" * large)) == large, "more than a pipe holds"

    run(check)


def test_calls_share_a_process_and_run_in_their_order():
    async def check(worker: Worker) -> None:
        asked = [worker.run(worker_functions.count) for _ in range(5)]
        found = await asyncio.gather(*asked)
        assert [number for number, _ in found] == [1, 2, 3, 4, 5]
        assert len({process for _, process in found}) == 1

    run(check)


def test_a_limit_or_a_crash_ends_one_call_only():
    async def check(worker: Worker) -> None:
        late = asyncio.ensure_future(worker.run(worker_functions.work, limits=Limits(seconds=0.2)))
        crash = asyncio.ensure_future(worker.run(worker_functions.crash))
        after = asyncio.ensure_future(worker.run(worker_functions.lookup, "answer", limits=Limits(10, 2**28)))
        with pytest.raises(TookTooLong):
            await late
        with pytest.raises(Failed):
            await crash
        assert await after == 42
        if sys.platform == "linux":
            size = 2**28
            with pytest.raises(Failed):
                await worker.run(worker_functions.allocate, size, limits=Limits(memory_bytes=2**24))
            assert await worker.run(worker_functions.allocate, size) == size, "limits are those of a call"

    run(check)


def test_the_time_of_a_call_is_its_own():
    async def check(worker: Worker) -> None:
        for _ in range(3):
            assert await worker.run(worker_functions.work_for, 0.15, limits=Limits(seconds=0.3)) is None
        assert await worker.run(worker_functions.work_for, 0.5) is None

    run(check)


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of Linux")
def test_calls_give_way_to_the_steps():
    async def check(worker: Worker) -> None:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert await worker.run(worker_functions.priority) == min(19, own + 3)

    run(check)


@pytest.mark.skipif(sys.platform != "linux", reason="reads states of processes from Linux")
def test_a_stopped_process_rests_until_it_goes_on_or_its_call_ends(tmp_path: Path):
    async def check(worker: Worker) -> None:
        worker.signal(signal.SIGSTOP)  # there is none yet
        asked = asyncio.ensure_future(worker.run(worker_functions.write_and_work, tmp_path / "one", limits=Limits(1)))
        process = await resting(tmp_path / "one")
        worker.signal(signal.SIGSTOP)
        await become(process, "T")
        worker.signal(signal.SIGCONT)
        with pytest.raises(TookTooLong):
            await asked
        asked = asyncio.ensure_future(worker.run(worker_functions.write_and_work, tmp_path / "two"))
        process = await resting(tmp_path / "two")
        worker.signal(signal.SIGSTOP)
        await become(process, "T")
        asked.cancel()
        await gone(process)

    run(check)


@pytest.mark.parametrize("closes", [False, True])
def test_no_process_is_left_of_a_cancelled_call_or_after_close(closes: bool, tmp_path: Path):
    async def check(worker: Worker) -> None:
        call = asyncio.ensure_future(worker.run(worker_functions.rest, tmp_path / "process"))
        process = await resting(tmp_path / "process")
        worker.close() if closes else call.cancel()
        await gone(process)
        call.cancel()

    run(check)


def test_cancelling_a_call_that_waits_leaves_the_one_that_runs(tmp_path: Path):
    async def check(worker: Worker) -> None:
        first = asyncio.ensure_future(worker.run(worker_functions.wait_for, tmp_path / "go"))
        second = asyncio.ensure_future(worker.run(worker_functions.count))
        await asyncio.sleep(0.05)
        second.cancel()
        (tmp_path / "go").touch()
        assert await first == 7
        assert (await worker.run(worker_functions.count))[0] == 1, "the second call has not run"

    run(check)


def test_another_process_takes_the_place_of_one_that_was_killed():
    async def check(worker: Worker) -> None:
        _, first = await worker.run(worker_functions.count)
        os.kill(first, signal.SIGKILL)
        await gone(first)
        number, second = await worker.run(worker_functions.count)
        assert number == 1 and second != first

    run(check)


def test_a_process_ends_with_its_server(tmp_path: Path):
    """Also if the server is killed, and has no time to end it."""
    script = (
        "import asyncio, os, signal, sys, worker_functions\n"
        "from foredraft.serve.workers import Worker\n"
        "worker = Worker(worker_functions.made)\n"
        "print(asyncio.run(worker.run(worker_functions.count))[1], flush=True)\n"
        "if sys.argv[1] == 'killed': os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for way in ("killed", "ends"):
        command = [sys.executable, "-c", script, way]
        paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
        ended = subprocess.run(command, env={**os.environ, **paths}, capture_output=True, text=True, timeout=120)
        assert ended.returncode == (-signal.SIGKILL if way == "killed" else 0), ended.stderr
        asyncio.run(gone(int(ended.stdout)))
