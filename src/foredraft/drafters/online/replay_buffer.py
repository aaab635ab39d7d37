"""Records training samples with the target's laws while serving, in bounded memory.

Laws are the target's at temperature 1, whatever a request's parameters, since one draft serves all. Each is stored by
its likeliest tokens; its context is a position in a sample, not a copy. Long outputs are split into samples, each of
which begins with the end of the one before.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.drafter import StepOut, View
from foredraft.core.topk_distribution import TopKDistribution, topk_distribution
from foredraft.drafters.online.trainable import Sample

_STATES = torch.bfloat16  # the dtype of stored features in train/data/features


class StepRecord(NamedTuple):
    """Results of a step, on the target's device. D is the length of the longest path.

    ``extents`` are the rows' lengths before the step; ``counts`` the number of laws, and of new tokens, of each.
    """

    rows: tuple[int, ...]
    extents: tuple[int, ...]
    roots: Int[Tensor, "B"]
    emitted: Int[Tensor, "B D"]
    counts: Int[Tensor, "B"]
    refused: Bool[Tensor, "B"]
    law: TopKDistribution
    hidden: dict[int, Float[Tensor, "B D H"]]

    @classmethod
    def of(cls, view: View, draft: Draft, verdict: Verdict, out: StepOut, count: int) -> "StepRecord":
        """Record a step without reading back from the device. ``count``: tokens stored of each law."""
        tree, path = draft.tree, verdict.path.clamp(min=0)[..., None]
        last = verdict.path.gather(1, verdict.accepted()[:, None])
        logits = out.logits.gather(1, path.expand(-1, -1, out.logits.shape[-1]))
        hidden = {tap: h.gather(1, path.expand(-1, -1, h.shape[-1])).to(_STATES) for tap, h in out.hidden.items()}
        return cls(
            view.rows,
            view.extents,
            view.roots,
            verdict.emitted(tree),
            verdict.accepted() + 1,
            ((tree.parents == last) & tree.valid).any(1),
            topk_distribution(logits, count),
            hidden,
        )

    def read_back(self) -> "StepRecord":
        """Copy the record to the host."""
        return self._replace(
            roots=self.roots.cpu(),
            emitted=self.emitted.cpu(),
            counts=self.counts.cpu(),
            refused=self.refused.cpu(),
            law=TopKDistribution(self.law.ids.cpu(), self.law.p.cpu()),
            hidden={tap: states.cpu() for tap, states in self.hidden.items()},
        )


@dataclass(slots=True)
class RowRecord:
    """The recorded part of a row in flight: its tokens, the target's states, its laws by position.

    ``rooted``: there has been a step, so the tokens include the first root. ``sound``: all laws so far were finite.
    """

    tokens: list[int]
    hidden: dict[int, list[Tensor]]
    places: list[int] = field(default_factory=list)
    ids: list[Tensor] = field(default_factory=list)
    p: list[Tensor] = field(default_factory=list)
    refused: list[bool] = field(default_factory=list)
    rooted: bool = False
    sound: bool = True

    @classmethod
    def started(cls, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]], most: int) -> "RowRecord":
        """Start a row with its prompt except for the last token; at most its last ``most`` tokens are kept."""
        states = {tap: [h[0, -most:].to("cpu", _STATES, copy=True)] for tap, h in hidden.items()}
        return cls(prompt[-most:].tolist(), states)

    def add(self, step: StepRecord, b: int) -> None:
        """Add the results of a step. Recording ends at the first law that is not finite: its states are not finite
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
        self.places += range(root, root + count)
        self.ids.append(step.law.ids[b, :count].clone())
        self.p.append(p.clone())
        self.refused += [False] * (count - 1) + [bool(step.refused[b])]

    def sample(self) -> Sample | None:
        """The record as a training sample; None if it has no laws."""
        if not self.places:
            return None
        return Sample(
            torch.tensor(self.tokens),
            {tap: torch.cat(states) for tap, states in self.hidden.items()},
            torch.tensor(self.places),
            torch.cat(self.ids),
            torch.cat(self.p),
            torch.tensor(self.refused),
        )

    def rest(self, most: int) -> "RowRecord":
        """The start of the row's next sample: at most the last ``most`` tokens, without laws."""
        states = {tap: [torch.cat(pieces)[-(most - 1) :]] for tap, pieces in self.hidden.items()}
        return RowRecord(self.tokens[-most:], states, rooted=True)


class ReplayBuffer:
    """Completed samples, the oldest first. Above the limit of laws or bytes, the oldest are dropped."""

    def __init__(self, laws: int, nbytes: int) -> None:
        self._limits = laws, nbytes
        self._samples: deque[Sample] = deque()
        self.laws = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, sample: Sample) -> None:
        """Add a sample; one that exceeds a limit by itself is dropped."""
        self._samples.append(sample)
        self.laws += sample.places.shape[0]
        self.nbytes += sample.nbytes
        while self.laws > self._limits[0] or self.nbytes > self._limits[1]:
            dropped = self._samples.popleft()
            self.laws -= dropped.places.shape[0]
            self.nbytes -= dropped.nbytes

    def take(self) -> list[Sample]:
        """Return all samples and empty the buffer."""
        taken = list(self._samples)
        self._samples.clear()
        self.laws = self.nbytes = 0
        return taken
