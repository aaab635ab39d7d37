"""One piece of work at a time beside the loop, or at once."""

import threading
import warnings
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class BackgroundTask(Generic[T]):
    """What is begun runs in a thread of its own; whoever begins it takes the result later.

    An error ends it for good, with a warning: nobody who waits for a text is to lose it by that.

    Args:
        threads: that torch may use there; 0 runs everything at once in the caller's thread.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._thread: threading.Thread | None = None
        self._result: list[T] = []
        self._error: Exception | None = None
        self._broken = False

    @property
    def idle(self) -> bool:
        """Whether another piece may begin."""
        return self._thread is None and not self._broken

    def begin(self, piece: Callable[[], T]) -> None:
        """Run a piece of work."""
        if not self._threads:
            self._run(piece)
            return
        usual = torch.get_num_threads()

        def run() -> None:
            _only_here(self._threads, usual)
            self._run(piece)

        self._thread = threading.Thread(target=run, name="foredraft-online")
        self._thread.start()

    def wait(self) -> None:
        """Until the piece in hand is done."""
        if self._thread is not None:
            self._thread.join()

    def take(self) -> T | None:
        """The result of a piece that is done, once; None while there is none."""
        if self._thread is not None:
            if self._thread.is_alive():
                return None
            self._thread = None
        if self._error is not None:
            error, self._error, self._broken = self._error, None, True
            warnings.warn(f"The drafter has stopped learning: {error}", RuntimeWarning, stacklevel=2)
        return self._result.pop() if self._result else None

    def _run(self, piece: Callable[[], T]) -> None:
        try:
            self._result.append(piece())
        except Exception as error:
            self._error = error


def _only_here(threads: int, usual: int) -> None:
    """Let torch use so many threads for the calling one. It takes the last number that was set anywhere for every
    thread that has not asked before: so this one asks first, and a short-lived one sets what is usual again."""
    torch.get_num_threads()
    torch.set_num_threads(threads)
    last = threading.Thread(target=torch.set_num_threads, args=(usual,))
    last.start()
    last.join()
