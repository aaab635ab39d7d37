"""Admission: requests wait in a queue until a row and memory for the KV cache are free."""

from collections import deque
from collections.abc import Collection, Mapping, Sequence as Seq

from foredraft.core.drafter import Room
from foredraft.core.errors import PromptError
from foredraft.engine.request import Request, Sequence
from foredraft.model.cache import SlotCache, bucket
from foredraft.model.prefill import CATCH_UP


class Admission:
    """The queue of an engine, and the memory rule by which requests leave it.

    Any thread may ``submit``; the engine calls the rest between steps.

    Args:
        cache: the target's KV cache. All of its rows have the length of the longest.
        max_rows: the most requests that run at once.
        max_slots: the most slots (rows times length) of the cache; None for no limit.
        draft_nodes: slots that a draft takes after a row's tokens, padding included.
    """

    def __init__(self, cache: SlotCache, max_rows: int, max_slots: int | None, draft_nodes: int) -> None:
        self.max_rows = max_rows
        self._cache = cache
        self.max_slots = max_slots
        self._draft_nodes = draft_nodes
        self._arriving: deque[Sequence] = deque()  # submitted since the last step; appended without the lock
        self._waiting: deque[Sequence] = deque()

    def __len__(self) -> int:
        """The number of requests that wait."""
        return sum(not each.finished for each in (*self._waiting, *self._arriving))

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """The requests that wait, in the order in which they will be admitted."""
        return tuple(self._waiting)

    def check(self, request: Request) -> None:
        """Check that a request fits into the cache alone.

        Raises:
            PromptError: it does not.
        """
        if self.max_slots is not None and self._slots(request) > self.max_slots:
            raise PromptError(
                f"{len(request.prompt)} prompt tokens and up to {request.rules.max_new_tokens} new ones do not fit the "
                f"KV cache, which holds {self.max_slots} tokens: shorten the prompt, lower max_new_tokens, or raise "
                "kv_cache_memory_bytes."
            )

    def submit(self, sequences: Seq[Sequence]) -> None:
        """Queue requests, without waiting for a step in progress."""
        self._arriving.extend(sequences)

    def receive(self) -> None:
        """Move what was submitted to the queue."""
        while self._arriving:
            first = self._arriving[0]  # an interruption between the two lines below must not queue it twice
            if not first.finished and (not self._waiting or self._waiting[-1] is not first):
                self._waiting.append(first)
            self._arriving.popleft()

    def drop(self, sequences: Seq[Sequence] = ()) -> None:
        """Remove the requests that have ended, and these, from the queue."""
        gone = set(sequences)
        self._waiting = deque(each for each in self._waiting if not each.finished and each not in gone)

    def next(self, running: Mapping[int, Sequence]) -> dict[int, Sequence]:
        """The first waiting requests that free rows and memory allow, by row number.

        They stay in the queue until they are dropped. A request that does not fit yet holds up those behind it, so none
        is passed over for ever.

        Args:
            running: the sequences in flight by row number.
        """
        chosen: dict[int, Sequence] = {}
        slots = max([self._cache.slots, *(self._slots(sequence.request) for sequence in running.values())])
        height = max([self._cache.rows if running else 0, *(row + 1 for row in running)])
        for row, sequence in zip(self.free_rows(running), self._waiting, strict=False):
            slots, height = max(slots, self._slots(sequence.request)), max(height, row + 1)
            if self.max_slots is not None and height * slots > self.max_slots:
                break
            chosen[row] = sequence
        return chosen

    def free_rows(self, running: Collection[int]) -> list[int]:
        """The rows of which the cache holds nothing, in rising order."""
        return [row for row in range(self.max_rows) if row not in running]

    def room(self, running: Mapping[int, Sequence], rows: Seq[int]) -> Room:
        """What the cache needs for the rows in flight, of which ``rows`` are new.

        Rows are doubled when more requests arrive while others run, since contents are then copied.
        """
        slots = max(self._cache.slots, *(self._slots(sequence.request) for sequence in running.values()))
        height = max(rows) + 1
        if 0 < self._cache.rows < height:
            fit = self.max_rows if self.max_slots is None else self.max_slots // slots
            height = max(height, min(2 * self._cache.rows, fit, self.max_rows))
        return Room(height, slots)

    def rest(self) -> None:
        """Forget the rows of the cache when nothing runs.

        It stays allocated for the next requests, unless its rows are so long that they would limit how many of these
        run together.
        """
        if self.max_slots is not None and self.max_rows * self._cache.slots > self.max_slots:
            self._cache.free()
        else:
            self._cache.clear()

    def _slots(self, request: Request) -> int:
        """The row length that this request may need, padding included."""
        return bucket(len(request.prompt) + request.rules.max_new_tokens + self._draft_nodes + CATCH_UP)
