"""Admission: requests wait in a queue until a row and memory for the KV cache are free."""

from bisect import insort
from collections import deque
from collections.abc import Collection, Mapping, Sequence as Seq

from foredraft.core.drafter import KVSize
from foredraft.core.errors import PromptError
from foredraft.engine.prefix_cache import PrefixCache
from foredraft.engine.request import Request, Sequence, failure
from foredraft.model.kv.cache import SlotCache, bucket
from foredraft.model.prefill import CATCH_UP


class Admission:
    """The queue of an engine, by priority and then by arrival, and the memory rule by which requests leave it.

    Any thread may ``submit``; the engine calls the rest between steps.

    Args:
        cache: the target's KV cache. All of its rows have the length of the longest.
        max_rows: the most requests that run at once.
        max_slots: the most slots (rows times length) of the cache; None for no limit.
        draft_nodes: slots that a draft takes after a row's tokens, padding included.
        prefixes: the contents of rows, which are lost when another request takes the row.
    """

    def __init__(
        self, cache: SlotCache, max_rows: int, max_slots: int | None, draft_nodes: int, prefixes: PrefixCache
    ) -> None:
        self.max_rows = max_rows
        self._cache = cache
        self._prefixes = prefixes
        self.max_slots = max_slots
        self._draft_nodes = draft_nodes
        self._arriving: deque[Sequence] = deque()  # submitted since the last step; appended without the lock
        self._waiting: list[Sequence] = []  # by priority, then by arrival
        self._recent: deque[int] = deque([0], maxlen=max_rows)  # row lengths that the latest requests needed

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
            if not first.finished and first not in self._waiting:
                insort(self._waiting, first, key=lambda each: each.priority)
            self._arriving.popleft()

    def drop(self, sequences: Seq[Sequence] = ()) -> None:
        """Remove the requests that have ended, and these, from the queue."""
        gone = set(sequences)
        self._waiting = [each for each in self._waiting if not each.finished and each not in gone]

    def next(self, running: Mapping[int, Sequence]) -> dict[int, Sequence]:
        """The first waiting requests that free rows and memory allow, by row number.

        They stay in the queue until they are dropped. A request that does not fit yet holds up those behind it, so it
        is never passed over by smaller ones; it waits for those in flight at most.

        Args:
            running: the sequences in flight by row number.
        """
        chosen = self._fitting(running)
        if not chosen and not running and self._waiting:  # contents of ended requests are in the way
            self._prefixes.clear()
            self._cache.clear()
            chosen = self._fitting(running)
        self._recent.extend(self._slots(sequence.request) for sequence in chosen.values())
        return chosen

    def _fitting(self, running: Mapping[int, Sequence]) -> dict[int, Sequence]:
        chosen: dict[int, Sequence] = {}
        free = [row for row in range(self.max_rows) if row not in running]
        slots = max([self._cache.slots, *(self._slots(sequence.request) for sequence in running.values())])
        kept = self._cache.rows if running or len(self._prefixes) else 0
        height = max([kept, *(row + 1 for row in running)])
        for sequence in self._waiting[: len(free)]:
            slots = max(slots, self._slots(sequence.request))
            try:
                rows = self._prefixes.preferred(free, sequence)
            except Exception as error:
                sequence.fail(failure(error))
                self.drop()
                continue
            row = next((each for each in rows if self._allows(max(height, each + 1), slots)), None)
            if row is None:
                break
            height = max(height, row + 1)
            free.remove(row)
            chosen[row] = sequence
        return chosen

    def free_rows(self, running: Collection[int]) -> list[int]:
        """The rows of which the cache holds nothing, in rising order."""
        return [row for row in range(self.max_rows) if row not in running and row not in self._prefixes]

    def _allows(self, rows: int, slots: int) -> bool:
        return self.max_slots is None or rows * slots <= self.max_slots

    def kv_size(self, running: Mapping[int, Sequence], rows: Seq[int]) -> KVSize:
        """What the cache needs for the rows in flight, of which ``rows`` are new.

        Rows are doubled when more requests arrive while others run, since contents are then copied.
        """
        slots = max(self._cache.slots, *(self._slots(sequence.request) for sequence in running.values()))
        height = max(rows) + 1
        if 0 < self._cache.rows < height:
            fit = self.max_rows if self.max_slots is None else self.max_slots // slots
            height = max(height, min(2 * self._cache.rows, fit, self.max_rows))
        return KVSize(height, slots)

    def rest(self) -> None:
        """Forget the rows of the cache when nothing runs, but for those with contents that prompts may take over.

        The cache stays allocated for the next requests, unless its rows are so long that they would limit how many of
        these run together.
        """
        limiting = not self._allows(self.max_rows, self._cache.slots)
        if limiting and len(self._prefixes) and self._cache.slots > max(self._recent):
            self._prefixes.clear()
        if len(self._prefixes):
            return
        if limiting:
            self._cache.free()
        else:
            self._cache.clear()

    def _slots(self, request: Request) -> int:
        """The row length that this request may need, padding included."""
        return bucket(len(request.prompt) + request.rules.max_new_tokens + self._draft_nodes + CATCH_UP)
