"""Training samples with the target's laws, recorded while serving in bounded memory, and batches of them.

Laws are the target's at temperature 1, whatever a request's parameters, since one draft serves all. Each is stored by
its likeliest tokens; its context is a position in a sample, not a copy. Long outputs are split into samples, each of
which begins with the end of the one before.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foredraft.core.draft import Draft, Verdict
from foredraft.core.drafter import StepOut, View
from foredraft.core.topk_distribution import TopKDistribution, topk_distribution

_STATES = torch.bfloat16  # the dtype of stored features in train/data/features


@dataclass(frozen=True, slots=True)
class LawSample:
    """A part of one row that the target has read, with its laws at n positions.

    ``places[i]``: law i is that of the token after this position, as a ``TopKDistribution``. ``hidden``: the target's
    states by tap, without those of the last token or two.
    """

    tokens: Int[Tensor, "T"]
    hidden: Mapping[int, Float[Tensor, "S H"]]
    places: Int[Tensor, "n"]
    ids: Int[Tensor, "n k"]
    p: Float[Tensor, "n m"]

    @property
    def nbytes(self) -> int:
        tensors = (self.tokens, self.places, self.ids, self.p, *self.hidden.values())
        return sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Samples padded on the right. Law i belongs to row ``rows[i]``, position ``places[i]``."""

    tokens: Int[Tensor, "B T"]
    hidden: Mapping[int, Float[Tensor, "B T H"]]
    rows: Int[Tensor, "n"]
    places: Int[Tensor, "n"]
    ids: Int[Tensor, "n k"]
    p: Float[Tensor, "n m"]

    @classmethod
    def of(cls, samples: Sequence[LawSample], device: torch.device) -> "SampleBatch":
        """Stack samples on the device of the network."""
        tokens = pad_sequence([sample.tokens for sample in samples], batch_first=True)

        def padded(tap: int) -> Tensor:
            states = [sample.hidden[tap].float() for sample in samples]
            return torch.stack([F.pad(each, (0, 0, 0, tokens.shape[1] - each.shape[0])) for each in states])

        return cls(
            tokens.to(device),
            {tap: padded(tap).to(device) for tap in samples[0].hidden},
            torch.cat([torch.full_like(sample.places, row) for row, sample in enumerate(samples)]).to(device),
            torch.cat([sample.places for sample in samples]).to(device),
            torch.cat([sample.ids for sample in samples]).long().to(device),
            torch.cat([sample.p for sample in samples]).float().to(device),
        )

    def laws_at(self, places: Int[Tensor, "B M"]) -> Int[Tensor, "B M"]:
        """The number of the law at each of these positions; -1 where there is no law or no such position."""
        table = torch.full_like(self.tokens, -1)
        table[self.rows, self.places] = torch.arange(self.rows.shape[0], device=table.device)
        last = self.tokens.shape[1] - 1
        inside = (places >= 0) & (places <= last)
        return torch.where(inside, table.gather(1, places.clamp(0, last)), -1)


class StepRecord(NamedTuple):
    """Results of a step, on the target's device. D is the length of the longest path.

    ``counts`` is the number of laws, and of new tokens, of each row. ``rejected``: whether the draft guessed the last
    of these tokens wrong; if not, it had no guess.
    """

    rows: tuple[int, ...]
    roots: Int[Tensor, "B"]
    emitted: Int[Tensor, "B D"]
    counts: Int[Tensor, "B"]
    rejected: Bool[Tensor, "B"]
    law: TopKDistribution
    hidden: dict[int, Float[Tensor, "B D H"]]

    @classmethod
    def of(cls, view: View, draft: Draft, verdict: Verdict, out: StepOut, count: int) -> "StepRecord":
        """Record a step without reading back from the device. ``count``: tokens stored of each law."""
        accepted = verdict.accepted()
        last = verdict.path.gather(1, accepted[:, None])
        return cls(
            view.rows,
            view.roots,
            verdict.emitted(draft.tree),
            accepted + 1,
            (draft.tree.parents == last).any(1),
            topk_distribution(verdict.on_path(out.logits), count),
            {tap: verdict.on_path(states).to(_STATES) for tap, states in out.hidden.items()},
        )

    def read_back(self) -> "StepRecord":
        return StepRecord(
            self.rows,
            self.roots.cpu(),
            self.emitted.cpu(),
            self.counts.cpu(),
            self.rejected.cpu(),
            TopKDistribution(self.law.ids.cpu(), self.law.p.cpu()),
            {tap: states.cpu() for tap, states in self.hidden.items()},
        )


@dataclass(slots=True)
class RowRecord:
    """The recorded part of a row in flight: its tokens, the target's states, its laws by position.

    ``rooted``: there has been a step, so the tokens include the first root. ``sound``: all laws so far were finite.
    ``rejected``: keep the laws alone at which the target rejected what was drafted.
    """

    tokens: list[int]
    hidden: dict[int, list[Tensor]]
    places: list[int] = field(default_factory=list)
    ids: list[Tensor] = field(default_factory=list)
    p: list[Tensor] = field(default_factory=list)
    rooted: bool = False
    sound: bool = True
    rejected: bool = False

    @classmethod
    def started(
        cls, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]], most: int, rejected: bool
    ) -> "RowRecord":
        """Start a row with its prompt except for the last token; at most its last ``most`` tokens are kept."""
        states = {tap: [h[0, -most:].to("cpu", _STATES, copy=True)] for tap, h in hidden.items()}
        return cls(prompt[-most:].tolist(), states, rejected=rejected)

    def add(self, step: StepRecord, b: int) -> None:
        """Add the results of a step. The sample ends at the first law that is not finite: its states are not finite
        either, and without them later positions would be wrong."""
        count = int(step.counts[b])
        p = step.law.p[b, :count]
        self.sound = self.sound and bool(p.isfinite().all())
        if not self.sound:
            return
        if not self.rooted:
            self.tokens.append(int(step.roots[b]))
            self.rooted = True
        root = len(self.tokens) - 1
        self.tokens += step.emitted[b, :count].tolist()
        for tap, states in step.hidden.items():
            self.hidden[tap].append(states[b, :count].clone())  # a view would keep the states of all rows alive
        first = (count - int(step.rejected[b])) if self.rejected else 0
        self.places += range(root + first, root + count)
        self.ids.append(step.law.ids[b, first:count].clone())
        self.p.append(p[first:].clone())

    def sample(self) -> LawSample | None:
        """The record as a training sample; None if it has no laws."""
        if not self.places:
            return None
        return LawSample(
            torch.tensor(self.tokens),
            {tap: torch.cat(states) for tap, states in self.hidden.items()},
            torch.tensor(self.places),
            torch.cat(self.ids),
            torch.cat(self.p),
        )

    def rest(self, most: int) -> "RowRecord":
        """The start of the row's next sample: at most the last ``most`` tokens, without laws."""
        states = {tap: [torch.cat(pieces)[-(most - 1) :]] for tap, pieces in self.hidden.items()}
        return RowRecord(self.tokens[-most:], states, rooted=True, rejected=self.rejected)


class ReplayBuffer:
    """Completed samples, the oldest first. Above the limit of bytes, the oldest are dropped."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._samples: deque[LawSample] = deque()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, sample: LawSample) -> None:
        """Add a sample; one that exceeds the limit by itself is dropped."""
        self._samples.append(sample)
        self.nbytes += sample.nbytes
        while self.nbytes > self._limit:
            self.nbytes -= self._samples.popleft().nbytes

    def take(self) -> list[LawSample]:
        taken = list(self._samples)
        self._samples.clear()
        self.nbytes = 0
        return taken
