"""Training samples and batches of online distillation, and the base class of its adapters."""

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
    """A part of one row that the target has read, with its laws at n positions.

    ``places[i]``: law i is that of the token after this position, as a ``TopKDistribution``. ``refused[i]``: a draft
    was rejected there. ``hidden``: the target's states by tap, without those of the last token or two.
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
class TrainBatch:
    """Samples padded on the right. Law i belongs to row ``rows[i]``, position ``places[i]``."""

    tokens: Int[Tensor, "B T"]
    hidden: Mapping[int, Float[Tensor, "B T H"]]
    rows: Int[Tensor, "n"]
    places: Int[Tensor, "n"]
    ids: Int[Tensor, "n k"]
    p: Float[Tensor, "n m"]
    refused: Bool[Tensor, "n"]

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device) -> "TrainBatch":
        """Stack samples on the device of the network."""
        longest = max(sample.tokens.shape[0] for sample in samples)
        tokens = torch.zeros(len(samples), longest, dtype=torch.long)
        hidden = {tap: torch.zeros(*tokens.shape, states.shape[1]) for tap, states in samples[0].hidden.items()}
        for row, sample in enumerate(samples):
            tokens[row, : sample.tokens.shape[0]] = sample.tokens
            for tap, states in sample.hidden.items():
                hidden[tap][row, : states.shape[0]] = states
        counts = torch.tensor([sample.places.shape[0] for sample in samples])
        return cls(
            tokens.to(device),
            {tap: states.to(device) for tap, states in hidden.items()},
            torch.arange(len(samples)).repeat_interleave(counts).to(device),
            torch.cat([sample.places for sample in samples]).to(device),
            torch.cat([sample.ids for sample in samples]).long().to(device),
            torch.cat([sample.p for sample in samples]).float().to(device),
            torch.cat([sample.refused for sample in samples]).to(device),
        )

    def laws_at(self, places: Int[Tensor, "B M"]) -> Int[Tensor, "B M"]:
        """The number of the law at each of these positions; -1 where there is no law or no such position."""
        table = torch.full_like(self.tokens, -1)
        table[self.rows, self.places] = torch.arange(self.rows.shape[0], device=table.device)
        last = self.tokens.shape[1] - 1
        inside = (places >= 0) & (places <= last)
        return torch.where(inside, table.gather(1, places.clamp(0, last)), -1)


class Prediction(NamedTuple):
    """Target and predicted laws ``p`` and ``log_q`` [m, k + 1], and the laws' numbers in the batch [m]."""

    p: Tensor
    log_q: Tensor
    laws: Tensor


class TrainAdapter(ABC):
    """A served network and a trainable copy of it. Subclasses are final.

    Args:
        served: the network that drafts; may have packed weights.
        shadow: its ``plain_copy``.
        vocabulary: target ids of the network's vocabulary, ascending; None for all below ``width``.
        width: size of the network's vocabulary.

    Raises:
        DrafterError: the weights cannot be trained.
    """

    def __init__(self, served: nn.Module, shadow: nn.Module, width: int, vocabulary: Tensor | None = None) -> None:
        if not all(weight.is_floating_point() for weight in shadow.parameters()):
            raise DrafterError("The draft's weights are quantised and cannot be trained: load it in full precision.")
        self.served = served
        self.shadow = shadow.requires_grad_(True)
        self._width = width
        self._vocabulary = vocabulary

    def publish(self) -> None:
        """Copy the trained weights into the served network."""
        copy_weights(self.served, self.shadow)

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """The copy's predictions of the laws of a batch, for each level of a draft that the network supports; level 0
        is a draft's first token."""
        for logits, laws in self._logits_by_level(batch):
            ids, known = self._draft_ids(batch.ids[laws])
            yield Prediction(*coarsen(logits.float(), ids, known, batch.p[laws]), laws)

    @abstractmethod
    def _logits_by_level(self, batch: TrainBatch) -> Iterator[tuple[Tensor, Tensor]]:
        """For each level, logits [m, v] and the numbers of the laws that they predict [m]."""

    def _draft_ids(self, ids: Int[Tensor, "m k"]) -> tuple[Tensor, Tensor]:
        """The draft's ids of target tokens, and which of them it has."""
        if self._vocabulary is None:
            return ids.clamp(max=self._width - 1), ids < self._width
        place = torch.searchsorted(self._vocabulary, ids).clamp(max=self._width - 1)
        return place, self._vocabulary[place] == ids
