"""What a learning drafter writes down while it serves: texts with the target's laws, in bounded memory.

Laws are the target's own, at temperature 1, whatever a request asks for: one draft serves all. Each is kept by its
likeliest tokens, and its context is a place in a text, not a copy of it. Long texts are cut into
passages, each of which begins with the end of the one before.
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

_STATES = torch.bfloat16  # as those that heads are trained on are kept (train/features)


class Seen(NamedTuple):
    """What a step has shown of its rows, where the target computed it. D is the length of the longest path.

    ``extents`` are the rows' lengths before the step; ``counts`` say how many laws each has, and how many new tokens.
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
    def of(cls, view: View, draft: Draft, verdict: Verdict, out: StepOut, count: int) -> "Seen":
        """Nothing is read back from the device. ``count``: so many tokens of each law are kept by name."""
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

    def read_back(self) -> "Seen":
        """The same on the host."""
        return self._replace(
            roots=self.roots.cpu(),
            emitted=self.emitted.cpu(),
            counts=self.counts.cpu(),
            refused=self.refused.cpu(),
            law=TopKDistribution(self.law.ids.cpu(), self.law.p.cpu()),
            hidden={tap: states.cpu() for tap, states in self.hidden.items()},
        )


@dataclass(slots=True)
class Notes:
    """A text in flight, or the end of it: its tokens, the target's states, its laws by place.

    ``rooted``: there has been a step, so that the first root is among the tokens. ``sound``: all laws so far were
    numbers.
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
    def begun(cls, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]], most: int) -> "Notes":
        """A text whose prompt but for its last token is this; at most so much of it is kept."""
        states = {tap: [h[0, -most:].to("cpu", _STATES, copy=True)] for tap, h in hidden.items()}
        return cls(prompt[-most:].tolist(), states)

    def add(self, seen: Seen, b: int) -> None:
        """What a step has shown of this text, which ends for us with the first law that is none: the states there are
        no numbers either, and what follows would stand in the wrong place without them."""
        count = int(seen.counts[b])
        p = seen.law.p[b, :count]
        self.sound = self.sound and bool(p.isfinite().all())
        if not self.sound:
            return
        if not self.rooted:
            self.tokens.append(int(seen.roots[b]))
            self.rooted = True
        root = len(self.tokens) - 1
        self.tokens += seen.emitted[b, :count].tolist()
        for tap, states in seen.hidden.items():
            self.hidden[tap].append(states[b, :count].clone())  # else all rows would stay as long as this one
        self.places += range(root, root + count)
        self.ids.append(seen.law.ids[b, :count].clone())
        self.p.append(p.clone())
        self.refused += [False] * (count - 1) + [bool(seen.refused[b])]

    def passage(self) -> Sample | None:
        """What there is to learn from; None if there is nothing."""
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

    def rest(self, most: int) -> "Notes":
        """The end of the text, where it goes on in another passage: at most so many tokens, without laws."""
        states = {tap: [torch.cat(pieces)[-(most - 1) :]] for tap, pieces in self.hidden.items()}
        return Notes(self.tokens[-most:], states, rooted=True)


class ReplayBuffer:
    """Passages that are over, the oldest first. When there are too many laws, or bytes, the oldest go."""

    def __init__(self, laws: int, nbytes: int) -> None:
        self._most = laws, nbytes
        self._passages: deque[Sample] = deque()
        self.laws = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._passages)

    def add(self, passage: Sample) -> None:
        """Another passage; one that alone is too large is not kept."""
        self._passages.append(passage)
        self.laws += passage.places.shape[0]
        self.nbytes += passage.nbytes
        while self.laws > self._most[0] or self.nbytes > self._most[1]:
            gone = self._passages.popleft()
            self.laws -= gone.places.shape[0]
            self.nbytes -= gone.nbytes

    def take(self) -> list[Sample]:
        """All of them; none are left."""
        taken = list(self._passages)
        self._passages.clear()
        self.laws = self.nbytes = 0
        return taken
