"""Functions that run in other processes; the first argument is what the process has made."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from foredraft.serve.errors import ApiError


def made() -> dict[str, int]:
    return {"answer": 42}


def lookup(state: dict[str, int], name: str) -> Any:
    return state[name]


def priority(state: Any) -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def refuse(state: Any) -> None:
    raise ApiError(429, "No.", param="x", retry_after=3)


def work(state: Any) -> None:
    while True:
        pass


def write_and_work(state: Any, file: Path) -> None:
    file.write_text(str(os.getpid()))
    work(state)


def allocate(state: Any, size: int) -> int:
    return len(bytearray(size))


def crash(state: Any) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def rest(state: Any, file: Path) -> None:
    file.write_text(str(os.getpid()))
    time.sleep(600)


def repeat(state: Any, data: bytes) -> bytes:
    return data


def count(state: dict[str, int]) -> tuple[int, int]:
    """How many calls of this process came here, this one included; and the process."""
    state["count"] = state.get("count", 0) + 1
    return state["count"], os.getpid()


def work_for(state: Any, seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def wait_for(state: Any, file: Path) -> int:
    while not file.exists():
        time.sleep(0.01)
    return 7
