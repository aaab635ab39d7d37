"""The rows in flight, as tensors. Rows come and go between steps; the others do not notice."""

from collections.abc import Sequence as Seq

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.drafter import View
from foredraft.core.noise import Noise
from foredraft.core.warp import Warp
from foredraft.engine.sequence import Sequence

_BUCKET = 256


class Batch:
    """Sequences with their row numbers, and the tensors that a step reads: history [B, L], lengths and seeds [B].

    A row number is the sequence's place in the caches, and stays the same for its whole life.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.rows: list[int] = []
        self.sequences: list[Sequence] = []
        self._vocab_size = vocab_size
        self._device = device
        self._history = torch.zeros(0, 0, dtype=torch.long, device=device)
        self._lengths = torch.zeros(0, dtype=torch.long, device=device)
        self._seeds = torch.zeros(0, dtype=torch.long, device=device)
        self._warp: Warp | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def admit(self, rows: Seq[int], sequences: Seq[Sequence]) -> None:
        """Take in rows; their history is all they have committed so far."""
        lengths = [sequence.length for sequence in sequences]
        longest = max(lengths)
        self._reserve(longest)
        texts = [[*sequence.prompt, *sequence.tokens] for sequence in sequences]
        known = torch.tensor([text + [0] * (longest - len(text)) for text in texts], dtype=torch.long)
        fresh = torch.nn.functional.pad(known, (0, self._history.shape[1] - longest))
        history = torch.cat([self._history, fresh.to(self._device)])
        seeds = torch.cat([self._seeds, self._tensor([sequence.stream for sequence in sequences])])
        self._lengths = torch.cat([self._lengths, self._tensor(lengths)])
        self._history, self._seeds = history, seeds
        self.rows.extend(rows)
        self.sequences.extend(sequences)
        self._warp = None

    def retire(self) -> list[int]:
        """Let go of the rows whose sequences have ended, and return their numbers."""
        retired = [row for row, sequence in zip(self.rows, self.sequences, strict=True) if sequence.finished]
        if not retired:
            return []
        stay = [i for i, sequence in enumerate(self.sequences) if not sequence.finished]
        keep = self._tensor(stay)
        self._history, self._lengths, self._seeds = self._history[keep], self._lengths[keep], self._seeds[keep]
        self.rows = [self.rows[i] for i in stay]
        self.sequences = [self.sequences[i] for i in stay]
        self._warp = None
        return retired

    @property
    def extents(self) -> tuple[int, ...]:
        """Lengths as the host knows them."""
        return tuple(sequence.length for sequence in self.sequences)

    def view(self) -> View:
        """What the step and the drafter see."""
        if self._warp is None:
            self._warp = Warp.of(
                [sequence.params for sequence in self.sequences],
                vocab_size=self._vocab_size,
                eos_token_ids=[tuple(sorted(sequence.rules.eos_token_ids)) for sequence in self.sequences],
                prompt_lengths=[len(sequence.prompt) for sequence in self.sequences],
                device=self._device,
            )
        return View(
            rows=tuple(self.rows),
            history=self._history,
            lengths=self._lengths,
            extents=self.extents,
            warp=self._warp,
            noise=Noise(self._seeds, self._lengths),
        )

    def append(self, emitted: Int[Tensor, "B D"], counts: Int[Tensor, "B"]) -> None:
        """Add the new tokens of a step, ``counts[b]`` of them in row b; what stands beyond is rubbish.

        Views handed out before keep their lengths; history changes only beyond these.
        """
        self._reserve(max(self.extents) + emitted.shape[1])
        index = self._lengths[:, None] + torch.arange(emitted.shape[1], device=self._device)
        self._history.scatter_(1, index, emitted.clamp(min=0))
        self._lengths = self._lengths + counts

    def _reserve(self, length: int) -> None:
        if length > self._history.shape[1]:
            width = -(-length // _BUCKET) * _BUCKET
            wider = torch.zeros(self._history.shape[0], width, dtype=torch.long, device=self._device)
            wider[:, : self._history.shape[1]] = self._history
            self._history = wider

    def _tensor(self, values: list[int]) -> Int[Tensor, "B"]:
        return torch.tensor(values, dtype=torch.long, device=self._device)
