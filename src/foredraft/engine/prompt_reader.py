"""Prefill of admitted requests: prompts are read in chunks between steps, so a long one does not stall the others."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foredraft.core.drafter import Drafter
from foredraft.core.transfer import to_device
from foredraft.engine.prefix_cache import BLOCK, Features, PrefixCache, block_keys
from foredraft.engine.request import Sequence, fail_all
from foredraft.model.base import TargetModel
from foredraft.model.kv.cache import SlotCache
from foredraft.model.prefill import CHUNK, group_by_length, prefill

_ALONE = 2
"""Factor on the size of chunks while no row runs."""
_OLDEST_SHARE = 4
"""The prompt that was admitted first gets a step's tokens divided by this."""


@dataclass(slots=True, eq=False)
class _Reading:
    """A prompt that is being read, without its last token, the first root.

    That of a request that has to be read again is all that it has committed.

    ``requests``: those with this prompt, by row. It is read into the first of these rows. ``done``: tokens that the
    cache holds, ``cached`` of them from an earlier request. ``parts``: what the drafter reads of them, from
    ``Drafter.fuse``; it has seen the first ``shown`` of these. ``seconds``: spent on it. ``keys``: of its blocks.
    """

    requests: dict[int, Sequence]
    ids: np.ndarray
    tokens: Int[Tensor, "T"]
    parts: list[Features]
    keys: list[int]
    shown: int = 0
    num_read: int = 0
    cached: int = 0
    seconds: float = 0.0

    @property
    def row(self) -> int:
        return next(iter(self.requests))

    @property
    def left(self) -> int:
        return len(self.tokens) - self.num_read

    @property
    def tenant(self) -> str:
        return next(iter(self.requests.values())).tenant

    @property
    def open(self) -> dict[int, Sequence]:
        """The requests that have not been cancelled."""
        return {row: sequence for row, sequence in self.requests.items() if not sequence.finished}


def _key(sequence: Sequence) -> tuple[str, tuple[int, ...]]:
    """Requests with the same key share a reading."""
    return sequence.tenant, sequence.committed


def _joined(parts: Seq[Features]) -> dict[int, Tensor]:
    """Consecutive parts of what a drafter reads of a prompt."""
    return {key: torch.cat([part[key] for part in parts], 1) for key in parts[0]}


def prefill_failure(error: Exception) -> str:
    """Why a request ends whose prompt could not be read."""
    return f"Prefill of this request failed: {error}"


class Ready(NamedTuple):
    """Requests by row whose prompts have been read, and the error that failed others, if any."""

    requests: dict[int, Sequence]
    error: Exception | None


@dataclass(slots=True)
class PromptReader:
    """Reads the prompts of admitted requests, at most ``budget`` tokens in a step of other rows (None: whole prompts).

    While no row runs, every prompt gets a larger chunk in each step.
    """

    target: TargetModel
    cache: SlotCache
    drafter: Drafter
    prefixes: PrefixCache
    budget: int | None = None
    _readings: list[_Reading] = field(default_factory=list)  # in order of admission
    _waited: bool = False  # in the last step, long prompts waited for short ones

    @property
    def requests(self) -> dict[int, Sequence]:
        """The requests whose prompts are being read, by row."""
        return {row: sequence for reading in self._readings for row, sequence in reading.requests.items()}

    def add(self, admitted: Mapping[int, Sequence]) -> None:
        """Read the prompts of these requests from the next ``read`` on; a prompt that several share is read once.

        The cache has room for their rows.
        """
        prompts = {_key(each): reading for reading in self._readings for each in reading.open.values()}
        added = []
        for row, sequence in admitted.items():
            reading = prompts.get(_key(sequence))
            if reading is None:
                prompt = sequence.committed[:-1]
                ids, tokens = np.array(prompt, dtype=np.int64), to_device(prompt, self.target.device)
                keys = block_keys(sequence.tenant, ids) if self.prefixes.enabled else []
                reading = prompts[_key(sequence)] = _Reading({}, ids, tokens, [self._nothing()], keys)
                added.append(reading)
            reading.requests[row] = sequence
        self._readings = [*self._readings, *added]

    def restart(self) -> list[int]:
        """Read all prompts from their beginning; returns their rows, which the drafter must be released from."""
        for reading in self._readings:
            reading.parts, reading.shown = [self._nothing()], 0
            reading.num_read = reading.cached = 0
        return list(self.requests)

    def _nothing(self) -> Features:
        """What the drafter reads of no tokens."""
        return self.drafter.fuse(self.drafter.needs.states(self.target.empty_hidden()))

    def read(self, *, busy: bool, drafts: bool, begin: Callable[[int], object], whole: bool = False) -> Ready:
        """Read some of the prompts; those whose last chunk was read start with the drafter.

        The requests stay here until they are dropped. An error fails those whose prompts were read together.

        Args:
            busy: rows wait for their next step meanwhile.
            drafts: have the drafter read long prompts, too, a chunk at a time; else it reads them at its first draft.
            begin: called with each row just before the drafter reads or admits it.
            whole: read all of them to their ends, so that they become ready together.
        """
        if self._readings:
            with torch.inference_mode():
                return self._read(busy=busy, drafts=drafts, begin=begin, whole=whole)
        self._waited = False
        return Ready({}, None)

    def _read(self, *, busy: bool, drafts: bool, begin: Callable[[int], object], whole: bool) -> Ready:
        """``read``, if there is anything to read."""
        started = time.perf_counter()
        error = None
        for reading in self._readings:
            error = self._attempt([reading], partial(self._reuse, reading, begin)) or error
        shares = self._shares(busy, whole)
        error = self._forward({reading: count for reading, count in shares.items() if count}) or error
        for reading in shares if drafts else ():
            if self._reads_ahead(reading):
                error = self._attempt([reading], partial(self._read_ahead, reading, begin)) or error
        complete = [reading for reading in self._readings if not reading.left and reading.open]
        for reading in complete:
            error = self._attempt([reading], partial(self._start, reading, begin)) or error
        seconds = time.perf_counter() - started
        for reading in shares:
            reading.seconds += seconds
        ready = {row: sequence for reading in complete for row, sequence in reading.open.items()}
        for reading in complete:
            for sequence in reading.open.values():
                sequence.counters.prefill_seconds += reading.seconds
                if not sequence.tokens:
                    sequence.counters.cached_tokens = reading.cached
        return Ready(ready, error)

    def dependent(self, row: int) -> list[int]:
        """This row, and those that wait for the prompt that is read into it."""
        return next((list(reading.requests) for reading in self._readings if row == reading.row), [row])

    def withdraw(self, rows: Collection[int]) -> None:
        """Let go of these rows, with all ``dependent`` ones; the others' prompts are read on."""
        self._readings = [reading for reading in self._readings if reading.row not in rows]
        for reading in self._readings:
            reading.requests = {row: each for row, each in reading.requests.items() if row not in rows}

    def drop(self, rows: Collection[int] = ()) -> None:
        """Forget the prompts that have been read into these rows, and those that no request waits for any more."""
        kept, abandoned = [], []
        for reading in self._readings:
            if reading.open and reading.requests.keys().isdisjoint(rows):
                kept.append(reading)
            else:
                abandoned += [row for row in reading.requests if row not in rows]
        if abandoned:  # they may hold NaN, which would leak to the rows' next requests
            self.cache.zero(abandoned)
            self.prefixes.drop(abandoned)
        if len(kept) < len(self._readings):
            self._readings = kept

    def clear(self) -> None:
        """Forget all prompts."""
        self._readings = []

    def _shares(self, busy: bool, whole: bool) -> dict[_Reading, int]:
        """How many tokens of each prompt to read in this step.

        The prompts with the fewest tokens left come first, so that short ones do not wait for long ones; a part is kept
        for the oldest, so that a long one does not wait indefinitely. While no row runs, short prompts are read at once
        and run in this step; so the others wait, but not twice in succession.
        """
        waited, self._waited = self._waited, False
        if self.budget is None or whole:
            return {reading: reading.left for reading in self._readings}
        readings = self._leading(_ALONE * self.budget)
        most = 0 if busy else _ALONE * self.budget
        shares = {reading: reading.left for reading in readings if reading.left <= most}
        if not busy and not shares:
            return dict.fromkeys(readings, most)
        if any(shares.values()) and not waited:
            self._waited = True
            return shares
        rest = self.budget
        readings = [reading for reading in readings if reading not in shares]
        for oldest in readings[:1]:
            shares[oldest] = min(oldest.left, max(rest // _OLDEST_SHARE, 1))
            rest -= shares[oldest]
        for reading in sorted(readings, key=lambda each: each.left):
            more = min(reading.left - shares.get(reading, 0), rest)
            if more:
                shares[reading] = shares.get(reading, 0) + more
                rest -= more
        return shares

    def _reuse(self, reading: _Reading, begin: Callable[[int], object]) -> None:
        """Take over the beginning of a prompt, if a row holds more of it than was read so far."""
        found = self.prefixes.find(reading.tenant, reading.ids, reading.keys)
        if found is None or found.length <= reading.num_read:
            return
        if found.row != reading.row:
            self.prefixes.drop([reading.row])
            self.cache.fork([found.row], [reading.row], found.length)
        begin(reading.row)
        self.drafter.fork(reading.row, found.row, found.length)
        reading.parts, reading.shown = [found.features], 0
        reading.num_read = reading.cached = found.length
        self.prefixes.use(found)

    def _leading(self, least: int) -> list[_Reading]:
        """The prompts but for those that wait for another one, which is read no later and begins with ``least`` tokens
        that are needed here, too. Prompts are compared by whole blocks."""
        if not self.prefixes.enabled or len(self._readings) < 2:
            return self._readings
        read: set[int] = set()
        follow = set()
        for reading in sorted(self._readings, key=lambda each: each.left):
            last = -(-(reading.num_read + least) // BLOCK) - 1
            if last < len(reading.keys) and reading.keys[last] in read:
                follow.add(reading)
            read.update(reading.keys)
        return [reading for reading in self._readings if reading not in follow]

    def _forward(self, shares: Mapping[_Reading, int]) -> Exception | None:
        """Read these numbers of tokens of the prompts, those of like length together."""
        error = None
        alike: dict[int, dict[_Reading, int]] = {}  # by length: all rows of a forward attend to as many slots
        for reading, count in shares.items():
            alike.setdefault(((reading.num_read + count) // CHUNK).bit_length(), {})[reading] = count
        for part in (part for each in alike.values() for part in self._forwards(each)):
            error = self._attempt(part, partial(self._read_together, part)) or error
        return error

    def _forwards(self, shares: Mapping[_Reading, int]) -> Iterator[dict[_Reading, int]]:
        """The forwards that read these numbers of tokens of the prompts."""
        readings, counts = list(shares), list(shares.values())
        for group in group_by_length(counts):
            width = max(counts[i] for i in group)
            fitting = [i for i in group if readings[i].num_read + width <= self._allocated(readings[i])]  # with padding
            for together in (fitting, *([i] for i in group if i not in fitting)):
                if together:
                    yield {readings[i]: counts[i] for i in together}

    def _allocated(self, reading: _Reading) -> int:
        return self.cache.held(reading.row) if self.cache.lazy else self.cache.slots

    def _read_together(self, shares: Mapping[_Reading, int]) -> None:
        parts = [reading.tokens[reading.num_read : reading.num_read + count] for reading, count in shares.items()]

        def receive(begin: int, states: Mapping[int, Tensor]) -> None:
            states = self.drafter.needs.states(states)
            for index, (reading, count) in enumerate(shares.items()):
                if begin < count:
                    part = slice(index, index + 1), slice(count - begin)
                    reading.parts.append(self.drafter.fuse({tap: each[part] for tap, each in states.items()}))

        rows, starts = [reading.row for reading in shares], [reading.num_read for reading in shares]
        self.prefixes.drop(rows)
        prefill(self.target, self.cache, rows, pad_sequence(parts, batch_first=True), starts, receive)
        for reading, count in shares.items():
            reading.num_read += count

    def _reads_ahead(self, reading: _Reading) -> bool:
        """Whether the drafter reads a prompt while the target does: in several chunks, if it drafts for it."""
        several = self.budget is not None and len(reading.tokens) > self.budget
        new = len(reading.parts) > reading.shown
        return several and new and any(each.drafts for each in reading.open.values())

    def _read_ahead(self, reading: _Reading, begin: Callable[[int], object]) -> None:
        """Have the drafter read some of what was read of a prompt."""
        hidden = _joined(reading.parts[reading.shown :])
        begin(reading.row)
        self.drafter.read_ahead(reading.row, reading.tokens[: reading.num_read], hidden, self.cache.kv_size)
        reading.shown = len(reading.parts)

    def _start(self, reading: _Reading, begin: Callable[[int], object]) -> None:
        """Copy a prompt that has been read to all rows that share it, and start them with the drafter."""
        copies = [row for row in reading.open if row != reading.row]
        if copies:
            self.prefixes.drop(copies)
            self.cache.fork([reading.row] * len(copies), copies, len(reading.tokens))
        hidden = _joined(reading.parts)
        for row, sequence in reading.open.items():
            begin(row)
            if row != reading.row:
                self.drafter.fork(row, reading.row, len(reading.tokens))
            self.drafter.admit(row, reading.tokens, hidden)
            self.prefixes.hold(row, sequence, hidden, reading.cached)

    def _attempt(self, readings: Iterable[_Reading], work: Callable[[], None]) -> Exception | None:
        """Do this; return its error, which fails the requests with these prompts."""
        try:
            work()
        except Exception as error:
            self.target.reset_hooks()
            fail_all((each for reading in readings for each in reading.open.values()), prefill_failure(error))
            return error
        return None
