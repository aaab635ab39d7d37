"""Admission: requests wait in a queue until a row and memory for the KV cache are free."""

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence as Seq
from itertools import count

from foredraft.core.drafter import KVSize
from foredraft.core.errors import OptionError, PromptError
from foredraft.engine.prefix_cache import PrefixCache
from foredraft.engine.request import Request, Sequence, failure
from foredraft.model.kv.cache import SlotCache, bucket, grains
from foredraft.model.prefill import CATCH_UP

_AHEAD = 64
"""New tokens that a request is expected to need at least, beyond those that it has."""


class Admission:
    """The queue of an engine, by priority and then by arrival, and the memory rule by which requests leave it.

    Where the cache takes memory as rows need it, a request needs its own tokens, and as many new ones as recent outputs
    had; it gets memory as its output grows. Otherwise it needs ``max_new_tokens``, in a row as long as the longest.

    Any thread may ``submit``; the engine calls the rest between steps.

    Args:
        cache: the target's KV cache.
        max_rows: the most requests that run at once.
        max_slots: the most slots for which the cache takes memory; None for no limit.
        draft_nodes: slots that a draft takes after a row's tokens, padding included.
        prefixes: the contents of rows, which are lost when another request takes the row, or its memory.
        grows: rows may get memory as outputs grow.
    """

    def __init__(
        self,
        cache: SlotCache,
        max_rows: int,
        max_slots: int | None,
        draft_nodes: int,
        prefixes: PrefixCache,
        *,
        grows: bool = True,
    ) -> None:
        self.max_rows = max_rows
        self._cache = cache
        self._prefixes = prefixes
        self.max_slots = cache.most = max_slots
        self._draft_nodes = draft_nodes
        self._grows = grows
        self._arriving: deque[Sequence] = deque()  # submitted since the last step; appended without the lock
        self._arrivals = count()
        self._waiting: list[Sequence] = []  # by priority, then by arrival
        self._recent: deque[int] = deque([0], maxlen=max_rows)  # row lengths that the latest requests needed
        self._outputs: deque[int] = deque(maxlen=2 * max_rows)  # tokens of the latest outputs

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
        if self.max_slots is not None and self._most(request) > self.max_slots:
            raise PromptError(
                f"{len(request.prompt)} prompt tokens and up to {request.rules.max_new_tokens} new ones do not fit the "
                f"KV cache, which holds {self.max_slots} tokens: shorten the prompt, lower max_new_tokens, or raise "
                "kv_cache_memory_bytes."
            )

    def check_together(self, requests: Seq[Request]) -> None:
        """Check that these can run together until they end, if nothing else runs.

        Raises:
            OptionError: there are too few rows, or too little memory.
        """
        count, fault = len(requests), None
        if count > self.max_rows:
            fault = f"max_batch_size is {self.max_rows}: raise it, or give fewer prompts at once"
        elif not self._fits({row: self._most(request) for row, request in enumerate(requests)}):
            advice = "give fewer prompts at once, lower max_new_tokens, or raise kv_cache_memory_bytes"
            fault = f"the KV cache holds {self.max_slots} tokens: {advice}"
        if fault is not None:
            raise OptionError(f"{count} rows have to run together, since something sees all of them, and {fault}.")

    def submit(self, sequences: Seq[Sequence]) -> None:
        """Queue requests, without waiting for a step in progress."""
        self._arriving.extend(sequences)

    def receive(self) -> None:
        """Move what was submitted to the queue."""
        while self._arriving:
            first = self._arriving[0]  # an interruption between the lines below must not queue it twice
            if not first.finished and first not in self._waiting:
                first.arrival = next(self._arrivals)
                self._queue(first)
            self._arriving.popleft()

    def _queue(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=_turn)

    def drop(self, sequences: Seq[Sequence] = ()) -> None:
        """Remove the requests that have ended, and these, from the queue."""
        gone = set(sequences)
        self._waiting = [each for each in self._waiting if not each.finished and each not in gone]

    def ended(self, sequences: Iterable[Sequence]) -> None:
        """Learn from the outputs of requests that have ended how many tokens to expect."""
        self._outputs.extend(len(each.tokens) for each in sequences)

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
            self._cache.free()
            chosen = self._fitting(running)
        self._recent.extend(self._most(sequence.request) for sequence in chosen.values())
        return chosen

    def _fitting(self, running: Mapping[int, Sequence]) -> dict[int, Sequence]:
        chosen: dict[int, Sequence] = {}
        free = [row for row in range(self.max_rows) if row not in running]
        needs = {row: self._expected(sequence) for row, sequence in running.items()}
        for sequence in self._waiting[: len(free)]:
            try:
                rows = self._prefixes.preferred(free, sequence)
            except Exception as error:
                sequence.fail(failure(error))
                self.drop()
                continue
            expected = self._expected(sequence)
            row = next((each for each in rows if self._fits({**needs, each: expected})), None)
            if row is None:
                break
            needs[row] = expected
            free.remove(row)
            chosen[row] = sequence
        return chosen

    def _fits(self, needs: Mapping[int, int]) -> bool:
        """Whether there is memory for rows that need so many slots; contents of other rows make room for them."""
        if self.max_slots is None:
            return True
        if not self._cache.lazy:
            return self._cache.total_with(needs) <= self.max_slots
        return sum(needs.values()) <= self.max_slots

    def lacks(self, running: Mapping[int, Sequence]) -> bool:
        """Whether the next step of these rows needs more memory than there is, that of other rows included."""
        if self.max_slots is None or not self._cache.lazy:
            return False
        needs = {row: self._next(sequence) for row, sequence in running.items()}
        if sum(needs.values()) > self.max_slots:
            return True
        self._make_room(needs)
        return False

    def _make_room(self, needs: Mapping[int, int]) -> None:
        """Give back memory until these rows have so many slots: of rows without contents, then of the least recently
        used ones, then what the rows themselves do not need."""
        if self.max_slots is None or not self._cache.lazy or self._cache.total_with(needs) <= self.max_slots:
            return
        rows, kept = range(self._cache.rows), self._prefixes.oldest
        for row in (*(row for row in rows if row not in kept), *kept, *needs):
            if row not in needs:
                self._prefixes.drop([row])
                self._cache.trim([row])
            elif row not in kept or self._prefixes.length(row) <= needs[row]:
                self._cache.trim([row], needs[row])
            if self._cache.total_with(needs) <= self.max_slots:
                return
        self._prefixes.drop([row for row in needs if self._prefixes.length(row) > needs[row]])  # of earlier requests
        for row, slots in needs.items():
            self._cache.trim([row], slots)

    def allocate(self, running: Mapping[int, Sequence], admitted: Mapping[int, Sequence]) -> None:
        """Make room for the prompts of new requests and their first steps, beside those in flight."""
        needs = {row: self._next(sequence) for row, sequence in (*running.items(), *admitted.items())}
        self._make_room(needs)
        rows, slots = list(admitted), [needs[row] if self._cache.lazy else 1 for row in admitted]
        self._cache.reserve(rows, slots, self._kv_size({**running, **admitted}, rows))

    def requeue(self, sequences: Iterable[Sequence]) -> None:
        """Queue requests again, in the places that their arrivals give them."""
        for sequence in sequences:
            if sequence not in self._waiting:
                self._queue(sequence)

    def last(self, running: Mapping[int, Sequence]) -> int:
        """The row of the request that would be the last to be admitted."""
        return max(running, key=lambda row: _turn(running[row]))

    def free_rows(self, running: Collection[int]) -> list[int]:
        """The rows of which the cache holds nothing, in rising order."""
        return [row for row in range(self.max_rows) if row not in running and row not in self._prefixes]

    def _kv_size(self, running: Mapping[int, Sequence], rows: Seq[int]) -> KVSize:
        """What to allocate for the rows in flight, of which ``rows`` are new.

        Rows are doubled when more requests arrive while others run, since contents are then copied.
        """
        longest = (bucket(self._most(sequence.request)) for sequence in running.values())
        slots = max(self._cache.slots, *longest)
        height = max(rows) + 1
        if 0 < self._cache.rows < height:
            fit = self.max_rows if self.max_slots is None or self._cache.lazy else self.max_slots // slots
            height = max(height, min(2 * self._cache.rows, fit, self.max_rows))
        return KVSize(height, slots)

    def rest(self) -> None:
        """Forget the rows of the cache when nothing runs, but for those with contents that prompts may take over.

        The cache stays allocated for the next requests, unless it is allocated whole and its rows are so long that they
        would limit how many of these run together.
        """
        most = self.max_slots
        limiting = most is not None and not self._cache.lazy and self.max_rows * self._cache.slots > most
        if limiting and len(self._prefixes) and self._cache.slots > max(self._recent):
            self._prefixes.clear()
        if len(self._prefixes):
            return
        if limiting:
            self._cache.free()
        else:
            self._cache.clear()

    def _rounded(self, tokens: int) -> int:
        """The slots that a row with so many tokens needs for a step, padding included."""
        slots = tokens + self._draft_nodes + CATCH_UP
        return grains(slots) if self._cache.lazy else bucket(slots)

    def _most(self, request: Request) -> int:
        """The slots that this request may need."""
        return self._rounded(len(request.prompt) + request.rules.max_new_tokens)

    def _next(self, sequence: Sequence) -> int:
        """The slots that a request needs for its next step."""
        return min(self._rounded(sequence.length), self._most(sequence.request))

    def _expected(self, sequence: Sequence) -> int:
        """The slots that a request will need, if its output is as long as recent ones."""
        if not (self._grows and self._cache.lazy):
            return self._most(sequence.request)
        usual = sum(self._outputs) // max(len(self._outputs), 1)
        new = max(usual, len(sequence.tokens) + _AHEAD)
        return min(self._rounded(len(sequence.prompt) + new), self._most(sequence.request))


def _turn(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.arrival
