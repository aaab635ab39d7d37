"""Interruptions of a run: Ctrl-C and SIGTERM wait for the end of what must not stop midway."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruptions:
    """Inside, a block of ``deferred`` delays Ctrl-C and SIGTERM to its end; then the usual handlers run.

    Signals that Python does not handle keep their effect: without the command line, SIGTERM ends the process at once.
    Does nothing outside the main thread.

    Args:
        always: delay signals to the end of the whole, not only of blocks.
    """

    def __init__(self, always: bool = False) -> None:
        self._always = self._deferring = always
        self._noted: int | None = None
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def __enter__(self) -> "Interruptions":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._before[number] = handler
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._deliver()

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Delay signals to the end of the block."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = self._always
            if not self._always:
                self._deliver()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._deferring:
            self._noted = number
        else:
            self._before[number](number, frame)

    def _deliver(self) -> None:
        number, self._noted = self._noted, None
        if number is not None:
            self._before[number](number, None)
