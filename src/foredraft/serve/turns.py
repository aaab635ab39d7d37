"""An order among calls that wait."""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Lets one call run at a time. Of those that wait, the smallest goes next and the oldest after it, by turns.

    So a small call waits for few large ones, and one that has k older ones before it for at most 2k + 1 turns.
    """

    def __init__(self) -> None:
        self._free = True
        self._by_size: list[tuple[int, int, asyncio.Future[None]]] = []
        self._by_age: deque[asyncio.Future[None]] = deque()
        self._oldest_next = False
        self._numbers = itertools.count()

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """Wait for a turn, which the context holds."""
        if self._free:
            self._free = False
        else:
            future = asyncio.get_running_loop().create_future()
            heapq.heappush(self._by_size, (size, next(self._numbers), future))
            self._by_age.append(future)
            try:
                await future
            except asyncio.CancelledError:
                if not future.cancelled():  # the turn had come
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._by_age and self._by_age[0].done():
            self._by_age.popleft()
        while self._by_size and self._by_size[0][2].done():
            heapq.heappop(self._by_size)
        if not self._by_age:
            self._free = True
            return
        (self._by_age[0] if self._oldest_next else self._by_size[0][2]).set_result(None)
        self._oldest_next = not self._oldest_next
