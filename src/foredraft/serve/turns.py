"""An order among calls that wait."""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Lets ``count`` calls run at once. Of those that wait the smallest goes first, whatever came before it."""

    def __init__(self, count: int = 1) -> None:
        self._free = count
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """Wait for a turn, which the context holds."""
        if self._free > 0:
            self._free -= 1
        else:
            future = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (size, next(self._numbers), future))
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
        while self._waiting:
            future = heapq.heappop(self._waiting)[2]
            if not future.done():
                future.set_result(None)
                return
        self._free += 1
