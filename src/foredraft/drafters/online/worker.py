"""Runs one background task at a time, in a thread or immediately."""

import threading
import warnings
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class BackgroundTask(Generic[T]):
    """Runs a function in its own thread; the caller takes the result later.

    After an error no more tasks are run, and a warning is issued: requests in flight must not fail because of it.

    Args:
        threads: torch threads for the task; 0 runs it immediately in the caller's thread.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._thread: threading.Thread | None = None
        self._result: list[T] = []
        self._error: Exception | None = None
        self._broken = False

    @property
    def idle(self) -> bool:
        """True if another task may begin."""
        return self._thread is None and not self._broken

    def begin(self, task: Callable[[], T]) -> None:
        """Run a task."""
        if not self._threads:
            self._run(task)
            return
        default = torch.get_num_threads()

        def run() -> None:
            _set_threads_here(self._threads, default)
            self._run(task)

        self._thread = threading.Thread(target=run, name="foredraft-online")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the running task."""
        if self._thread is not None:
            self._thread.join()

    def take(self) -> T | None:
        """The result of a completed task, once; None if there is none."""
        if self._thread is not None:
            if self._thread.is_alive():
                return None
            self._thread = None
        if self._error is not None:
            error, self._error, self._broken = self._error, None, True
            warnings.warn(f"The drafter has stopped learning: {error}", RuntimeWarning, stacklevel=2)
        return self._result.pop() if self._result else None

    def _run(self, task: Callable[[], T]) -> None:
        try:
            self._result.append(task())
        except Exception as error:
            self._error = error


def _set_threads_here(threads: int, default: int) -> None:
    """Set torch's thread count for the calling thread only. A thread takes the last count set anywhere at its first
    query: so this thread queries first, and a short-lived thread restores the default."""
    torch.get_num_threads()
    torch.set_num_threads(threads)
    last = threading.Thread(target=torch.set_num_threads, args=(default,))
    last.start()
    last.join()
