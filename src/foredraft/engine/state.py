"""The rows in flight, as tensors. Rows are added and removed between steps."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.drafter import View
from foredraft.core.rng import Noise
from foredraft.core.sampling.warp import Warp
from foredraft.engine.request import Sequence

_BUCKET = 256


@dataclass(frozen=True, slots=True)
class _Rows:
    """The mutable state of a batch: row numbers, their sequences, history [B, L], lengths and seeds [B]."""

    numbers: tuple[int, ...]
    sequences: tuple[Sequence, ...]
    history: Int[Tensor, "B L"]
    lengths: Int[Tensor, "B"]
    seeds: Int[Tensor, "B"]
    warp: Warp | None = None  # made by the first view


class Batch:
    """Sequences with their row numbers, and the tensors that a step reads: history [B, L], lengths and seeds [B].

    A row number is the sequence's index in the caches and never changes. Each change is built first and takes effect
    by one assignment, so an interruption leaves the batch as it was before or after.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        none = torch.zeros(0, dtype=torch.long, device=device)
        self._rows = _Rows((), (), torch.zeros(0, 0, dtype=torch.long, device=device), none, none)

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

    def admit(self, rows: Seq[int], sequences: Seq[Sequence]) -> None:
        """Add rows; their history is everything that they have committed so far."""
        old = self._rows
        lengths = [sequence.length for sequence in sequences]
        before = _widened(old.history, max(lengths))
        width = before.shape[1]
        committed = [[*sequence.prompt, *sequence.tokens] for sequence in sequences]
        fresh = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in committed], dtype=torch.long)
        self._rows = _Rows(
            numbers=(*old.numbers, *rows),
            sequences=(*old.sequences, *sequences),
            history=torch.cat([before, fresh.to(self._device)]),
            lengths=torch.cat([old.lengths, self._tensor(lengths)]),
            seeds=torch.cat([old.seeds, self._tensor([sequence.stream for sequence in sequences])]),
        )

    def retire(self) -> None:
        """Remove the rows whose sequences have ended."""
        old = self._rows
        stay = [i for i, sequence in enumerate(old.sequences) if not sequence.finished]
        if len(stay) == len(old.sequences):
            return
        keep = self._tensor(stay)
        self._rows = _Rows(
            numbers=tuple(old.numbers[i] for i in stay),
            sequences=tuple(old.sequences[i] for i in stay),
            history=old.history[keep],
            lengths=old.lengths[keep],
            seeds=old.seeds[keep],
        )

    @property
    def extents(self) -> tuple[int, ...]:
        """Lengths, known on the host."""
        return tuple(sequence.length for sequence in self.sequences)

    def view(self) -> View:
        """The batch as the step and the drafter see it."""
        now, warp = self._rows, self._rows.warp
        if warp is None:
            warp = Warp.of(
                [sequence.params for sequence in now.sequences],
                vocab_size=self._vocab_size,
                eos_token_ids=[tuple(sorted(sequence.rules.eos_token_ids)) for sequence in now.sequences],
                prompt_lengths=[len(sequence.prompt) for sequence in now.sequences],
                device=self._device,
            )
            self._rows = replace(now, warp=warp)
        return View(
            rows=now.numbers,
            history=now.history,
            lengths=now.lengths,
            extents=self.extents,
            warp=warp,
            noise=Noise(now.seeds, now.lengths),
            seeded=any(not each.params.greedy and each.params.seed is not None for each in now.sequences),
        )

    def append(self, emitted: Int[Tensor, "B D"], counts: Int[Tensor, "B"]) -> None:
        """Append the new tokens of a step, ``counts[b]`` of them in row b; later columns are undefined.

        Earlier views keep their lengths; history changes only beyond these.
        """
        now = self._rows
        history = _widened(now.history, max(self.extents) + emitted.shape[1])
        index = now.lengths[:, None] + torch.arange(emitted.shape[1], device=self._device)
        history.scatter_(1, index, emitted.clamp(min=0))
        self._rows = replace(now, history=history, lengths=now.lengths + counts)

    def _tensor(self, values: list[int]) -> Int[Tensor, "B"]:
        return torch.tensor(values, dtype=torch.long, device=self._device)


def _widened(history: Int[Tensor, "B L"], length: int) -> Int[Tensor, "B M"]:
    """The same tensor if it has room for ``length`` tokens, else a wider copy."""
    missing = length - history.shape[1]
    return history if missing <= 0 else torch.nn.functional.pad(history, (0, -(-missing // _BUCKET) * _BUCKET))
