"""Drafters whose nets can learn while they draft, and what they learn from."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from foredraft.core.errors import DrafterError
from foredraft.core.topk_distribution import coarsen
from foredraft.model.cpu_linear import copy_weights


@dataclass(frozen=True, slots=True)
class Sample:
    """A stretch of one text that the target has read, and the laws that it had at n places of it.

    ``places[i]``: law i is that of the token after this one, as a ``TopKDistribution``. ``refused[i]``: a draft was
    rejected there. ``hidden``: the target's states by tap, those of the last token or two not being there.
    """

    tokens: Int[Tensor, "T"]
    hidden: Mapping[int, Float[Tensor, "S H"]]
    places: Int[Tensor, "n"]
    ids: Int[Tensor, "n k"]
    p: Float[Tensor, "n m"]
    refused: Bool[Tensor, "n"]

    @property
    def nbytes(self) -> int:
        tensors = (self.tokens, self.places, self.ids, self.p, self.refused, *self.hidden.values())
        return sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True, slots=True)
class Lesson:
    """Passages side by side, padded on the right. Law i is of row ``rows[i]``, at the place ``places[i]`` of it."""

    tokens: Int[Tensor, "B T"]
    hidden: Mapping[int, Float[Tensor, "B T H"]]
    rows: Int[Tensor, "n"]
    places: Int[Tensor, "n"]
    ids: Int[Tensor, "n k"]
    p: Float[Tensor, "n m"]
    refused: Bool[Tensor, "n"]

    @classmethod
    def of(cls, passages: Sequence[Sample], device: torch.device) -> "Lesson":
        """Some passages together, on the device of the net."""
        longest = max(passage.tokens.shape[0] for passage in passages)
        tokens = torch.zeros(len(passages), longest, dtype=torch.long)
        hidden = {tap: torch.zeros(*tokens.shape, states.shape[1]) for tap, states in passages[0].hidden.items()}
        for row, passage in enumerate(passages):
            tokens[row, : passage.tokens.shape[0]] = passage.tokens
            for tap, states in passage.hidden.items():
                hidden[tap][row, : states.shape[0]] = states
        counts = torch.tensor([passage.places.shape[0] for passage in passages])
        return cls(
            tokens.to(device),
            {tap: states.to(device) for tap, states in hidden.items()},
            torch.arange(len(passages)).repeat_interleave(counts).to(device),
            torch.cat([passage.places for passage in passages]).to(device),
            torch.cat([passage.ids for passage in passages]).long().to(device),
            torch.cat([passage.p for passage in passages]).float().to(device),
            torch.cat([passage.refused for passage in passages]).to(device),
        )

    def laws_at(self, places: Int[Tensor, "B M"]) -> Int[Tensor, "B M"]:
        """The number of the law at each of some places of each row; -1 where there is none, or no such place."""
        table = torch.full_like(self.tokens, -1)
        table[self.rows, self.places] = torch.arange(self.rows.shape[0], device=table.device)
        last = self.tokens.shape[1] - 1
        inside = (places >= 0) & (places <= last)
        return torch.where(inside, table.gather(1, places.clamp(0, last)), -1)


class Said(NamedTuple):
    """What a net says of some laws of a lesson: ``p`` and ``log_q`` [m, k + 1], and the laws' numbers [m]."""

    p: Tensor
    log_q: Tensor
    laws: Tensor


class Trainee(ABC):
    """A net in service, and a copy of it that can be trained. Subclasses are final.

    Args:
        served: what drafts; perhaps with packed weights.
        shadow: its ``plain_copy``.
        vocabulary: target ids that the net can say, rising; None for all below ``width``.
        width: the number of tokens that it can say.

    Raises:
        DrafterError: weights that cannot be trained.
    """

    def __init__(self, served: nn.Module, shadow: nn.Module, width: int, vocabulary: Tensor | None = None) -> None:
        if not all(weight.is_floating_point() for weight in shadow.parameters()):
            raise DrafterError("The draft's weights are quantised, so they cannot learn; load it in full precision.")
        self.served = served
        self.shadow = shadow.requires_grad_(True)
        self._width = width
        self._vocabulary = vocabulary

    def publish(self) -> None:
        """Draft with the copy's weights from now on."""
        copy_weights(self.served, self.shadow)

    def say(self, lesson: Lesson) -> Iterator[Said]:
        """What the copy says of the laws of a lesson, for each level of a draft: first as a draft's first token, then
        further ahead, where the net is made for it."""
        for logits, laws in self._judge(lesson):
            ids, known = self._own(lesson.ids[laws])
            yield Said(*coarsen(logits.float(), ids, known, lesson.p[laws]), laws)

    @abstractmethod
    def _judge(self, lesson: Lesson) -> Iterator[tuple[Tensor, Tensor]]:
        """For each level logits [m, v], and the numbers of the laws that they are about [m]."""

    def _own(self, ids: Int[Tensor, "m k"]) -> tuple[Tensor, Tensor]:
        """The draft's numbers of some tokens, and which of them it has."""
        if self._vocabulary is None:
            return ids.clamp(max=self._width - 1), ids < self._width
        place = torch.searchsorted(self._vocabulary, ids).clamp(max=self._width - 1)
        return place, self._vocabulary[place] == ids
