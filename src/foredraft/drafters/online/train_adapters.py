"""Training forwards that match drafting-time inputs, one adapter per kind of network."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import singledispatch
from typing import Generic, NamedTuple, TypeVar, final

import torch
from jaxtyping import Int
from torch import Tensor, nn

from foredraft.core.errors import DrafterError
from foredraft.core.target_parts import FINAL
from foredraft.core.topk_distribution import coarsen
from foredraft.drafters.online.samples import SampleBatch
from foredraft.heads.nets.eagle import EagleNet
from foredraft.heads.nets.hydra import Hydra
from foredraft.heads.nets.medusa import Medusa
from foredraft.heads.nets.ttt_attention import Unrolled, take
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.hf.head_parts import parts_of
from foredraft.model.hf.taps import body
from foredraft.model.linear.packed import copy_weights, plain_copy
from foredraft.model.native.model import NativeLM

N = TypeVar("N", bound=nn.Module)

_UNROLLED = 3
"""Levels of a draft on which an EAGLE head is trained; after the first it reads its own states."""


class LawPrediction(NamedTuple):
    """Target and predicted laws ``p`` and ``log_q`` [m, k + 1], and the laws' numbers in the batch [m]."""

    p: Tensor
    log_q: Tensor
    laws: Tensor


class TrainAdapter(ABC, Generic[N]):
    """A served network and a trainable copy of it. Subclasses are final.

    Args:
        served: the network that drafts; may have packed weights.
        shadow: its ``plain_copy``.
        vocabulary: target ids of the network's vocabulary, ascending; None for all below ``width``.
        width: size of the network's vocabulary.

    Raises:
        DrafterError: the weights cannot be trained.
    """

    def __init__(self, served: nn.Module, shadow: N, width: int, vocabulary: Tensor | None = None) -> None:
        if not all(weight.is_floating_point() for weight in shadow.parameters()):
            raise DrafterError("The draft's weights are quantised and cannot be trained: load it in full precision.")
        self.served = served
        self.shadow: N = shadow.requires_grad_(True)
        self._width = width
        self._vocabulary = vocabulary

    def publish(self) -> None:
        """Copy the trained weights into the served network."""
        copy_weights(self.served, self.shadow)

    def predict(self, batch: SampleBatch) -> Iterator[LawPrediction]:
        """The copy's predictions of the laws of a batch, for each level of a draft that the network supports; level 0
        is a draft's first token."""
        for logits, laws in self._logits_by_level(batch):
            ids, known = self._draft_ids(batch.ids[laws])
            yield LawPrediction(*coarsen(logits.float(), ids, known, batch.p[laws]), laws)

    @abstractmethod
    def _logits_by_level(self, batch: SampleBatch) -> Iterator[tuple[Tensor, Tensor]]:
        """For each level, logits [m, v] and the numbers of the laws that they predict [m]."""

    def _draft_ids(self, ids: Int[Tensor, "m k"]) -> tuple[Tensor, Tensor]:
        """The draft's ids of target tokens, and which of them it has."""
        if self._vocabulary is None:
            return ids.clamp(max=self._width - 1), ids < self._width
        place = torch.searchsorted(self._vocabulary, ids).clamp(max=self._width - 1)
        return place, self._vocabulary[place] == ids


@final
class ModelAdapter(TrainAdapter[nn.Module]):
    """A whole model. It reads each sample from position 0, whatever its position in the row."""

    def __init__(self, model: CausalLM) -> None:
        shadow = model.plain_copy()
        super().__init__(model.model, shadow, model.vocab_size)
        self._body = body(shadow)
        self._head = parts_of(shadow).head

    def _logits_by_level(self, batch: SampleBatch) -> Iterator[tuple[Tensor, Tensor]]:
        states = self._body(input_ids=batch.tokens.clamp(max=self._width - 1), use_cache=False)[0]
        every = torch.arange(batch.rows.shape[0], device=batch.rows.device)
        yield self._head(states[batch.rows, batch.places]), every


@final
class EagleAdapter(TrainAdapter[EagleNet]):
    """An EAGLE head, unrolled over its own states as in training-time test (arXiv:2503.01840, section 3.2).

    Entry j reads feature j and token j + 1; at level k it reads token j + 1 + k and predicts the law after it.
    """

    def __init__(self, net: EagleNet) -> None:
        width = net.target.vocab_size if net.vocabulary is None else net.vocabulary.shape[0]
        super().__init__(net, plain_copy(net, shared=(net.target,)), width, net.vocabulary)

    def _logits_by_level(self, batch: SampleBatch) -> Iterator[tuple[Tensor, Tensor]]:
        net, (rows, length) = self.shadow, batch.tokens.shape
        place = torch.arange(length - 1, device=batch.tokens.device).expand(rows, -1)
        unrolled = Unrolled(sample := _rows_with_laws(batch), net.window)
        states = net.features({tap: hidden[:, :-1] for tap, hidden in batch.hidden.items()})
        for level in range(_UNROLLED):
            if level == 1:
                states, place = take(states, sample), sample
            carried = net.carry(states) if level else states
            tokens = batch.tokens.gather(1, (place + level + 1).clamp(max=length - 1))
            states = net(tokens, carried, place + level, unrolled.later if level else unrolled.first)
            laws = batch.laws_at(place + level + 1)
            yield net.logits(states[laws >= 0][None])[0], laws[laws >= 0]


def _rows_with_laws(batch: SampleBatch) -> Int[Tensor, "B M"]:
    """The entries that drafts start from, padded with entry 0 to the same number for each row."""
    counts = batch.rows.bincount(minlength=batch.tokens.shape[0])
    found = batch.tokens.new_zeros(counts.shape[0], int(counts.max()))
    order = torch.arange(batch.rows.shape[0], device=found.device) - (counts.cumsum(0) - counts)[batch.rows]
    found[batch.rows, order] = (batch.places - 1).clamp(min=0)
    return found


@final
class AheadAdapter(TrainAdapter[Medusa | Hydra]):
    """Heads on the target's last hidden state: head i at entry j predicts the law after token j + 1 + i."""

    def __init__(self, net: Medusa | Hydra) -> None:
        super().__init__(net, plain_copy(net, shared=(net.target,)), net.target.vocab_size)

    def _logits_by_level(self, batch: SampleBatch) -> Iterator[tuple[Tensor, Tensor]]:
        net, hidden = self.shadow, batch.hidden[FINAL]
        if isinstance(net, Hydra):
            hidden = net.prefixed(hidden)
        for head in range(net.config.num_heads):
            entry = batch.places - 1 - head
            laws = (entry >= 0).nonzero()[:, 0]
            entry, row = entry[laws], batch.rows[laws]
            states = hidden[row, entry][None]
            if isinstance(net, Hydra):
                ahead = entry[:, None] + torch.arange(1, head + 2, device=entry.device)
                logits = net.logits(states, batch.tokens[row[:, None], ahead][None], head)
            else:
                logits = net.logits(states, head)
            yield logits[0], laws


@singledispatch
def adapter_for(network: object) -> TrainAdapter:
    """The adapter for a network. Register your own for other kinds of networks.

    Raises:
        DrafterError: there is none.
    """
    if isinstance(network, NativeLM):
        raise DrafterError(
            "online trains draft models in floats: load target and draft without weights, or use a head."
        )
    raise DrafterError(f"online cannot train a {type(network).__name__}.")


adapter_for.register(CausalLM, ModelAdapter)
adapter_for.register(EagleNet, EagleAdapter)
adapter_for.register(Medusa, AheadAdapter)
adapter_for.register(Hydra, AheadAdapter)
