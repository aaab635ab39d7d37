"""Functions that run in other processes; the first argument is what the fork server has made."""

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
