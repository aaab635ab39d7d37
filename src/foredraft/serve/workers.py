"""Calls in processes that can be ended: each has limits of time and memory.

The processes are those of Python's own fork server, which has imported what the calls need. So a call that is ended, or
one that crashes, costs the next one of its worker little, and the others nothing. As everywhere in multiprocessing, a
new process imports the program's main module again, which therefore starts only under ``if __name__ == "__main__"``.
"""

import asyncio
import atexit
import gc
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a call: CPU time, and on Linux memory beyond that of a new process; None: no limit."""

    seconds: float | None = None
    memory_bytes: int | None = None


class TookTooLong(Exception):
    """A call took more than its CPU time."""


class Failed(Exception):
    """A call needed more than its memory, or crashed."""


class Worker:
    """A process that runs functions one after the other, as they came. It starts with the first one.

    Args:
        make: picklable; each new process calls it once, and each function gets its result as first argument.
        imports: modules that calls need. All processes share those of the first worker.
        niceness: 10 gets a tenth of the time of a core that something else wants.
    """

    def __init__(self, make: Callable[[], Any], imports: Sequence[str] = (), niceness: int = 0) -> None:
        self._make = make
        self._imports = imports
        self._niceness = niceness
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="foredraft-worker")
        self._lock = threading.Lock()  # guards the next two fields, never for long
        self._child: tuple[BaseProcess, Connection] | None = None
        self._current: object = None  # the call that runs
        self._payload = b""  # ``make``, pickled
        atexit.register(self.close)  # at the end Python waits for processes, and this one for calls

    async def run(self, function: Callable[..., Any], *args: Any, limits: Limits = Limits()) -> Any:
        """What a function returns; it, its arguments and its result can be pickled. Cancelling ends the process.

        Raises:
            TookTooLong, Failed: the call exceeded its limits.
            Exception: what the function raised.
        """
        call, ended = object(), threading.Event()
        running = self._thread.submit(self._answer, call, ended, (function, args, limits))
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            ended.set()
            with self._lock:
                if self._current is call and self._child is not None:
                    self._child[0].kill()
            raise

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it runs."""
        with self._lock, suppress(ProcessLookupError):
            if self._child is not None and (process := self._child[0].pid):
                os.kill(process, number)

    @property
    def busy(self) -> bool:
        """Whether a call runs or its process starts; Python waits for that at its end, also after ``close``."""
        return self._current is not None

    def close(self) -> None:
        """End the process and all calls."""
        atexit.unregister(self.close)
        self._thread.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            if self._child is not None:
                self._child[0].kill()

    def _answer(self, call: object, ended: threading.Event, message: Any) -> Any:
        """Run a call, in the thread."""
        with self._lock:
            self._current = call
        try:
            process, connection = self._started()
            if ended.is_set():
                raise Failed("The call was cancelled.")
            return self._exchange(process, connection, message)
        finally:
            with self._lock:
                self._current = None

    def _exchange(self, process: BaseProcess, connection: Connection, message: Any) -> Any:
        """Send a call and take its result."""
        try:
            connection.send(message)
            raised, value = connection.recv()
        except (EOFError, OSError):
            self._ended(process, connection)
            if process.exitcode == -signal.SIGPROF:
                raise TookTooLong from None
            raise Failed(f"The process of a call ended with status {process.exitcode}.") from None
        if raised:
            raise value
        return value

    def _started(self) -> tuple[BaseProcess, Connection]:
        """The process, or a new one if it has ended."""
        child = self._child
        if child is not None:
            if child[0].is_alive():
                return child
            self._ended(*child)
        self._payload = self._payload or pickle.dumps(self._make)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(self._imports))
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._payload, self._niceness), daemon=True)
        process.start()
        theirs.close()
        with self._lock:
            self._child = child = process, ours
        return child

    def _ended(self, process: BaseProcess, connection: Connection) -> None:
        """Forget a process that has ended, or is about to."""
        process.join()
        connection.close()
        with self._lock:
            self._child = None


def _serve(connection: Connection, payload: bytes, niceness: int) -> None:
    """The process: answer calls until the other end is closed."""
    for each in (signal.SIGINT, signal.SIGTERM):  # meant for the server
        signal.signal(each, signal.SIG_IGN)
    os.nice(niceness)
    torch.set_num_threads(1)
    context = pickle.loads(payload)()
    gc.freeze()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # native code writes there why it aborts
    own_bytes = _data_bytes()
    while True:
        try:
            function, args, limits = connection.recv()
        except EOFError:
            return
        with _limited(limits, own_bytes):
            try:
                answer = False, function(context, *args)
            except MemoryError:
                raise
            except Exception as error:
                answer = True, error
        connection.send(answer)


@contextmanager
def _limited(limits: Limits, own_bytes: int) -> Iterator[None]:
    """Limit this process, which has that much memory of its own."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    signal.setitimer(signal.ITIMER_PROF, limits.seconds or 0.0)  # SIGPROF ends the process
    if limits.memory_bytes is not None and sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (own_bytes + limits.memory_bytes, hard))
    yield
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _data_bytes() -> int:
    """The memory of this process that counts for ``RLIMIT_DATA``."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
