"""The speed of a run, and the time that the rest of it takes."""

import time
from collections import deque

_WINDOW = 300.0  # seconds that the speed is a mean over
_SECONDS, _UPDATES = 10.0, 3  # least time and number of updates to estimate from


class SpeedMeter:
    """Speed over the last five minutes; unknown until there are ten seconds and three updates to tell it from.

    What is done at the first update is the start: the time before it, in which models warm up, does not count.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque()
        self._latest = (0.0, 0.0)
        self._updates = -1

    def update(self, amount: float) -> None:
        """Note how much is done now."""
        self._latest = now, _ = time.perf_counter(), amount
        self._updates += 1
        if not self._marks or now - self._marks[-1][0] >= 1.0:
            self._marks.append(self._latest)
        while len(self._marks) > 2 and now - self._marks[1][0] > _WINDOW:
            self._marks.popleft()

    @property
    def rate(self) -> float | None:
        """Units per second; None if unknown."""
        if self._updates < _UPDATES:
            return None
        (begin, before), (end, after) = self._marks[0], self._latest
        return (after - before) / (end - begin) if end - begin >= _SECONDS and after > before else None

    def left(self, rest: float) -> float | None:
        """Seconds that the ``rest`` takes; None if unknown."""
        if rest <= 0:
            return 0.0
        rate = self.rate
        return None if rate is None else round(rest / rate, 1)
