"""Training forwards that match drafting-time inputs, one adapter per kind of network."""

from collections.abc import Iterator
from functools import singledispatch
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.errors import DrafterError
from foredraft.drafters.online.trainable import TrainAdapter, TrainBatch
from foredraft.heads.nets.eagle import EagleNet
from foredraft.heads.nets.hydra import Hydra
from foredraft.heads.nets.medusa import Blockwise, Medusa
from foredraft.heads.nets.target_parts import FINAL
from foredraft.heads.nets.ttt_attention import Unrolled, take
from foredraft.model.cpu_linear import plain_copy
from foredraft.model.head_parts import parts_of
from foredraft.model.hf import CausalLM
from foredraft.model.taps import body

_UNROLLED = 3
"""Levels of a draft on which an EAGLE head is trained; after the first it reads its own states."""


@final
class ModelAdapter(TrainAdapter):
    """A whole model. It reads each sample from position 0, whatever its position in the row."""

    def __init__(self, model: CausalLM) -> None:
        shadow = model.plain_copy()
        super().__init__(model.model, shadow, model.vocab_size)
        self._body = body(shadow)
        self._head = parts_of(shadow).head

    def _logits_by_level(self, batch: TrainBatch) -> Iterator[tuple[Tensor, Tensor]]:
        states = self._body(input_ids=batch.tokens.clamp(max=self._width - 1), use_cache=False)[0]
        every = torch.arange(batch.rows.shape[0], device=batch.rows.device)
        yield self._head(states[batch.rows, batch.places]), every


@final
class EagleAdapter(TrainAdapter):
    """An EAGLE head, unrolled over its own states as in training-time test (arXiv:2503.01840, section 3.2).

    Entry j reads feature j and token j + 1; at level k it reads token j + 1 + k and predicts the law after it.
    """

    def __init__(self, net: EagleNet) -> None:
        shadow = plain_copy(net, shared=(net.target,))
        assert isinstance(shadow, EagleNet)
        width = net.target.vocab_size if net.vocabulary is None else net.vocabulary.shape[0]
        super().__init__(net, shadow, width, net.vocabulary)
        self._net = shadow

    def _logits_by_level(self, batch: TrainBatch) -> Iterator[tuple[Tensor, Tensor]]:
        net, (rows, length) = self._net, batch.tokens.shape
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


def _rows_with_laws(batch: TrainBatch) -> Int[Tensor, "B M"]:
    """The entries that drafts start from, padded with entry 0 to the same number for each row."""
    counts = batch.rows.bincount(minlength=batch.tokens.shape[0])
    found = batch.tokens.new_zeros(counts.shape[0], int(counts.max()))
    order = torch.arange(batch.rows.shape[0], device=found.device) - (counts.cumsum(0) - counts)[batch.rows]
    found[batch.rows, order] = (batch.places - 1).clamp(min=0)
    return found


@final
class AheadAdapter(TrainAdapter):
    """Heads on the target's last hidden state: head i at entry j predicts the law after token j + 1 + i."""

    def __init__(self, net: Medusa | Blockwise | Hydra) -> None:
        shadow = plain_copy(net, shared=(net.target,))
        assert isinstance(shadow, (Medusa, Blockwise, Hydra))
        super().__init__(net, shadow, net.target.vocab_size)
        self._net = shadow

    def _logits_by_level(self, batch: TrainBatch) -> Iterator[tuple[Tensor, Tensor]]:
        hidden = batch.hidden[FINAL]
        if isinstance(self._net, Hydra) and self._net.prefix is not None:
            place = torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape[0], -1)
            hidden = self._net.prefix(hidden, place, Unrolled(place).first)
        for head in range(self._net.count):
            entry = batch.places - 1 - head
            laws = (entry >= 0).nonzero()[:, 0]
            entry, row = entry[laws], batch.rows[laws]
            yield self._logits(hidden[row, entry][None], batch, row, entry, head)[0], laws

    def _logits(
        self,
        states: Float[Tensor, "1 m H"],
        batch: TrainBatch,
        row: Int[Tensor, "m"],
        entry: Int[Tensor, "m"],
        head: int,
    ) -> Float[Tensor, "1 m V"]:
        net = self._net
        if isinstance(net, Hydra):
            ahead = entry[:, None] + torch.arange(1, head + 2, device=entry.device)
            return net.logits(states, batch.tokens[row[:, None], ahead][None], head)
        return net.logits(net.states(states, head), head)


@singledispatch
def adapter_for(network: object) -> TrainAdapter:
    """The adapter for a network. Register your own for other kinds of networks.

    Raises:
        DrafterError: there is none.
    """
    raise DrafterError(f"online cannot train a {type(network).__name__}.")


adapter_for.register(CausalLM, ModelAdapter)
adapter_for.register(EagleNet, EagleAdapter)
for _kind in (Medusa, Blockwise, Hydra):
    adapter_for.register(_kind, AheadAdapter)
