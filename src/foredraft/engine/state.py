"""The rows in flight, as tensors. Rows are added and removed between steps."""

from collections.abc import Collection, Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.drafter import KVSize, View
from foredraft.core.rng import Exponentials, Noise, RecentTimes
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.warp import Warp
from foredraft.engine.request import Sequence
from foredraft.engine.tail import StepEnd
from foredraft.model.kv.cache import bucket, persistent_zeros


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows in flight on the host: their numbers and sequences, in the order of the batch.

    ``params``, ``outputs``: see ``View``. ``warp`` is made by the first view.
    """

    numbers: tuple[int, ...] = ()
    sequences: tuple[Sequence, ...] = ()
    params: tuple[SamplingParams, ...] = ()
    outputs: tuple[list[int], ...] = ()
    warp: Warp | None = None

    @classmethod
    def of(cls, numbers: Iterable[int], sequences: Iterable[Sequence]) -> "_Rows":
        """These rows."""
        own = tuple(sequences)
        return cls(tuple(numbers), own, tuple(each.params for each in own), tuple(each.tokens for each in own))


class _Buffers(NamedTuple):
    """Of each row: its tokens, their number, the last one, and the seed of its random numbers."""

    history: Int[Tensor, "R L"]
    lengths: Int[Tensor, "R"]
    tips: Int[Tensor, "R"]
    seeds: Int[Tensor, "R"]

    @classmethod
    def zeros(cls, rows: int, width: int, device: torch.device) -> "_Buffers":
        like = torch.empty(0, dtype=torch.long, device=device)
        return cls(persistent_zeros(like, rows, width), *(persistent_zeros(like, rows) for _ in range(3)))

    def first(self, rows: int, width: int) -> "_Buffers":
        """Of the first rows, with histories of this width."""
        return _Buffers(self.history[:rows, :width], self.lengths[:rows], self.tips[:rows], self.seeds[:rows])


class Batch:
    """Sequences with their row numbers, and the tensors that a step reads.

    History [R, L], lengths and seeds [R] are buffers that steps and changes of the batch update in place: the first B
    rows are those in flight, in the order of the batch. A row number is the sequence's index in the caches and
    never changes; its index in the buffers does, since the last row takes the place of one that ends.

    A change writes to rows out of use first and takes effect by one assignment, so an interruption leaves the batch
    as it was before or after.

    Args:
        draws: see ``View``.
        times: makes the times of races; see ``RecentTimes``.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        *,
        draws: bool = False,
        times: Exponentials | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._draws = draws
        self._recent = RecentTimes(times) if device.type == "cpu" else None  # elsewhere lengths are not read
        self._rows = _Rows()
        self._buffers = self._shown = _Buffers.zeros(0, 0, device)
        self._on_host: list[np.ndarray] = []  # the same memory

    def __len__(self) -> int:
        return len(self._rows.numbers)

    @property
    def rows(self) -> tuple[int, ...]:
        """Row numbers in the order of the batch."""
        return self._rows.numbers

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The sequence of each row."""
        return self._rows.sequences

    def admit(self, added: Mapping[int, Sequence]) -> None:
        """Add sequences by row; their history is everything that they have committed so far."""
        old, begin, end = self._rows, len(self), len(self) + len(added)
        sequences = tuple(added.values())
        committed = [torch.tensor([*sequence.prompt, *sequence.tokens], dtype=torch.long) for sequence in sequences]
        self._reserve(end, max(len(each.prompt) + each.rules.max_new_tokens for each in sequences))
        facts = [[each.length, (each.tokens or each.prompt)[-1], each.stream] for each in sequences]
        history = torch.nn.utils.rnn.pad_sequence(committed, batch_first=True)
        packed = torch.cat([torch.tensor(facts, dtype=torch.long), history], dim=1).to(self._device)
        own = self._buffers
        for column, buffer in enumerate((own.lengths, own.tips, own.seeds)):
            buffer[begin:end] = packed[:, column]
        own.history[begin:end, : history.shape[1]] = packed[:, 3:]
        self._rows = _Rows.of((*old.numbers, *added), (*old.sequences, *sequences))

    def retire(self, rows: Collection[int] = ()) -> None:
        """Remove the rows whose sequences have ended, and these; the last rows take their places."""
        old = self._rows
        pairs = enumerate(zip(old.numbers, old.sequences, strict=True))
        stay = [i for i, (row, sequence) in pairs if not sequence.finished and row not in rows]
        count = len(stay)
        if count == len(old.sequences):
            return
        order = list(range(count))
        movers = [i for i in stay if i >= count]
        for hole, mover in zip(sorted(set(order).difference(stay)), movers, strict=True):
            for buffer in self._buffers:
                buffer[hole] = buffer[mover]
            order[hole] = mover
        self._rows = _Rows.of((old.numbers[i] for i in order), (old.sequences[i] for i in order))

    @property
    def host_lengths(self) -> tuple[int, ...]:
        """Lengths, known on the host."""
        return tuple(sequence.length for sequence in self.sequences)

    def view(self, kv_size: KVSize, unknown: int = 0) -> View:
        """The batch as the step and the drafter see it, until the next change of the batch.

        Args:
            unknown: the most tokens of a row that were appended and that the host does not know yet; 0 if it knows all.
        """
        now, warp = self._rows, self._rows.warp
        if warp is None:
            warp = self._warp()
            self._rows = now = replace(now, warp=warp)
        if self._recent is not None:
            self._recent.begin_step()
        host_lengths = tuple(sequence.length + unknown for sequence in now.sequences)
        shown = self._first(len(host_lengths), bucket(max(host_lengths)))
        return View(
            rows=now.numbers,
            history=shown.history,
            lengths=shown.lengths,
            host_lengths=host_lengths,
            warp=warp,
            noise=Noise(shown.seeds, shown.lengths, self._recent),
            draws=self._draws,
            kv_size=kv_size,
            slack=max(unknown - 1, 0),  # a step appends one token at least
            tips=shown.tips,
            params=now.params,
            outputs=now.outputs,
        )

    def _first(self, rows: int, width: int) -> _Buffers:
        """The beginnings of the buffers, made again when sizes change."""
        if self._shown.history.shape != (rows, width):
            self._shown = self._buffers.first(rows, width)
        return self._shown

    def _warp(self) -> Warp:
        return Warp.of(
            self._rows.params,
            vocab_size=self._vocab_size,
            eos_token_ids=[tuple(sorted(each.rules.eos_token_ids)) for each in self.sequences],
            prompt_lengths=[len(each.prompt) for each in self.sequences],
            device=self._device,
        )

    def append(self, end: StepEnd) -> None:
        """Append the new tokens of a step."""
        if end.rows is not None and self._on_host:
            self._append_known([row.emitted for row in end.rows])
            return
        emitted, counts = end.emitted, end.counts
        count, depth = emitted.shape
        self._reserve(count, max(self.host_lengths) + depth)
        own = self._buffers.first(count, self._buffers.history.shape[1])
        index = own.lengths[:, None] + torch.arange(depth, device=self._device)
        own.history.scatter_(1, index, emitted.clamp(min=0))
        own.tips.copy_(emitted.gather(1, counts[:, None] - 1)[:, 0])
        own.lengths.add_(counts)

    def _append_known(self, emitted: Seq[Seq[int]]) -> None:
        """Tokens that the host knows, on a CPU."""
        host_lengths = self.host_lengths
        self._reserve(len(emitted), max(host_lengths) + max(map(len, emitted)))
        history, lengths, tips, _ = self._on_host
        for index, (length, tokens) in enumerate(zip(host_lengths, emitted, strict=True)):
            history[index, length : length + len(tokens)] = tokens
            lengths[index] = length + len(tokens)
            tips[index] = tokens[-1]

    def _reserve(self, rows: int, length: int) -> None:
        """Make room for rows of this many tokens and a step beyond them; keeps the contents."""
        old_rows, old_length = self._buffers.history.shape
        if rows <= old_rows and length <= old_length:
            return
        rows = old_rows if rows <= old_rows else max(rows, 2 * old_rows)
        larger = _Buffers.zeros(rows, max(bucket(length) + bucket(1), old_length), self._device)
        for buffer, old in zip(larger.first(old_rows, old_length), self._buffers, strict=True):
            buffer.copy_(old)
        self._buffers = self._shown = larger
        if self._device.type == "cpu":
            self._on_host = [each.numpy() for each in larger]
