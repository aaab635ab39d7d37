"""The one seam for all variety: what a drafter is asked, told and allowed to see."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law, Verdict
from foredraft.core.rng import Noise
from foredraft.core.sampling.warp import Warp


@dataclass(frozen=True, slots=True)
class StepOut:
    """What a forward of the target hands out.

    ``logits`` of the nodes that were asked for, and the hidden states of the layers that were asked for, by the
    number of decoder layers that a token has passed: 0 is the embedding, 1 the output of the first layer.
    """

    logits: Float[Tensor, "B N V"]
    hidden: Mapping[int, Float[Tensor, "B T H"]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter asks of the target: hidden layers to be handed out, and its largest tree (root excluded).

    ``max_depth``: the longest path that it drafts; 0 stands for ``max_nodes``, as for a chain. ``scored``: it knows
    the probability of each path that it picks, and heeds ``Plan.nodes``, and ``Plan.level_worth`` if its levels cost
    a forward each. ``law``: that of its drafts for sampled rows, where its options cannot know it; None: theirs.
    ``learns``: drafts depend on other requests, so requests never share random numbers. ``target_cache``: it drafts in
    the target's cache, which holds committed tokens only.
    """

    hidden_layers: tuple[int, ...] = ()
    max_nodes: int = 0
    max_depth: int = 0
    scored: bool = False
    law: Law | None = None
    learns: bool = False
    target_cache: bool = False

    @property
    def longest(self) -> int:
        """The longest path."""
        return self.max_depth or self.max_nodes


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to draft in this step; decided before anything is drawn, hence non-anticipating.

    ``lengths``: the longest path that may be drafted for each row, in tokens; 0 leaves the row alone.
    ``confidence``: a path ends after its first token whose probability under the draft is below this. The unsure
    token itself is kept: throwing it away would be a choice by the drawn value, hence lossy.
    ``nodes``, ``level_worth``: for drafters that pick tokens and score their paths. At most so many drafted nodes a
    row, the likeliest (0: as many as it can); another level whose parents have less probability together, in all rows,
    is not worth drafting. Picked tokens may be left out for any reason.
    """

    lengths: tuple[int, ...]
    confidence: float = 0.0
    nodes: int = 0
    level_worth: float = 0.0

    @property
    def length(self) -> int:
        """The longest of all rows: the depth of the tree."""
        return max(self.lengths, default=0)

    def at_most(self, nodes: int) -> int:
        """How many of so many nodes may be drafted."""
        return min(nodes, self.nodes) if self.nodes else nodes


@dataclass(frozen=True, slots=True)
class View:
    """What a drafter may see of the rows in flight. Tensors lie on the target's device.

    ``rows`` are the numbers under which the rows were admitted; B follows their order. ``history`` holds the
    committed tokens of each row, prompt included, the root last at ``lengths[b] - 1``; beyond it is rubbish.
    ``extents`` are the same lengths as the host knows them.
    """

    rows: tuple[int, ...]
    history: Int[Tensor, "B L"]
    lengths: Int[Tensor, "B"]
    extents: tuple[int, ...]
    warp: Warp
    noise: Noise

    @property
    def roots(self) -> Int[Tensor, "B"]:
        """The last committed token of each row."""
        return self.history.gather(1, self.lengths[:, None] - 1).squeeze(1)

    def followed_by(self, tokens: Int[Tensor, "B K"], counts: Sequence[int]) -> "View":
        """The same rows, after the first ``counts[b]`` of these tokens in row b: a text that is only drafted."""
        missing = max(self.extents) + tokens.shape[1] - self.history.shape[1]
        history = torch.nn.functional.pad(self.history, (0, max(missing, 0)))
        index = self.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        lengths = self.lengths + torch.tensor(list(counts), device=tokens.device)
        return replace(
            self,
            history=history.scatter(1, index, tokens.clamp(min=0)),
            lengths=lengths,
            extents=tuple(extent + count for extent, count in zip(self.extents, counts, strict=True)),
            noise=Noise(self.noise.seeds, lengths),
        )


class Drafter(ABC):
    """Proposes trees of tokens; one file a method. Subclasses are final; those without state define ``propose`` alone.

    Whatever it gets wrong (weights, vocabulary, cache) costs speed and never correctness, as long as each draft
    carries the law that it was really drawn from. Drafts that cannot be verified are refused with a ``DrafterError``.
    """

    needs: Needs = Needs()

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:  # noqa: B027
        """A row begins: ``prompt`` is what the target has read, all but the last token, which is the first root.

        ``hidden`` are the target's states for it, of the layers that ``needs`` names. T is 0 for a prompt of one.
        """

    @abstractmethod
    def propose(self, view: View, plan: Plan) -> Draft:
        """Draft for every row of ``view``; node 0 of each tree is ``view.roots``."""

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:  # noqa: B027
        """The target has judged: ``view`` and ``draft`` are those of the step, ``out`` the target's forward.

        It is called after every step, also after one in which nothing was drafted and ``draft`` is the root alone.
        """

    def release(self, row: int) -> None:  # noqa: B027
        """A row has ended: forget it. Its number will be given to another.

        After an interruption (Ctrl-C) it may be called for a row whose ``admit`` or ``release`` was stopped half-way,
        or had not begun: forgetting what is not there is no error.
        """


class Rewindable(Drafter):
    """A drafter that may draft for a text which is itself only drafted, so that some of it may be taken back.

    It learns from the next view what stands there instead; ``commit`` tells of that text too, before it is taken back.
    """

    @abstractmethod
    def rewind(self, row: int, length: int) -> None:
        """Of this row's text only the first ``length`` tokens stand; others may follow them the next time."""


class Trainable(Drafter):
    """A drafter whose network can learn from the target while it drafts; see ``drafters.online``."""

    @property
    @abstractmethod
    def network(self) -> object:
        """What drafts: a ``torch.nn.Module``, or a model of the loop."""


class Background(Drafter):
    """A drafter that also works beside the loop, in a thread of its own."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for background work; called between benchmark runs."""
