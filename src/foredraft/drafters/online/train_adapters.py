"""Training forwards that match drafting-time inputs, one adapter a kind of network."""

from collections.abc import Iterator
from functools import singledispatch
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.errors import DrafterError
from foredraft.drafters.online.trainable import Lesson, Trainee
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
"""So many tokens of a chain an EAGLE head learns to draft, its own states standing in for the target's."""


@final
class ModelTrainee(Trainee):
    """A whole model. It reads the passages from position 0 on, wherever they stood."""

    def __init__(self, model: CausalLM) -> None:
        shadow = model.plain_copy()
        super().__init__(model.model, shadow, model.vocab_size)
        self._body = body(shadow)
        self._head = parts_of(shadow).head

    def _judge(self, lesson: Lesson) -> Iterator[tuple[Tensor, Tensor]]:
        states = self._body(input_ids=lesson.tokens.clamp(max=self._width - 1), use_cache=False)[0]
        every = torch.arange(lesson.rows.shape[0], device=lesson.rows.device)
        yield self._head(states[lesson.rows, lesson.places]), every


@final
class EagleTrainee(Trainee):
    """An EAGLE head, unrolled over its own states as in training-time test (arXiv:2503.01840, section 3.2).

    Row j reads feature j and token j + 1; at level k it reads token j + 1 + k, and says the law after that.
    """

    def __init__(self, net: EagleNet) -> None:
        shadow = plain_copy(net, shared=(net.target,))
        assert isinstance(shadow, EagleNet)
        width = net.target.vocab_size if net.vocabulary is None else net.vocabulary.shape[0]
        super().__init__(net, shadow, width, net.vocabulary)
        self._net = shadow

    def _judge(self, lesson: Lesson) -> Iterator[tuple[Tensor, Tensor]]:
        net, (batch, length) = self._net, lesson.tokens.shape
        place = torch.arange(length - 1, device=lesson.tokens.device).expand(batch, -1)
        unrolled = Unrolled(sample := _rows_with_laws(lesson), net.window)
        states = net.features({tap: hidden[:, :-1] for tap, hidden in lesson.hidden.items()})
        for level in range(_UNROLLED):
            if level == 1:
                states, place = take(states, sample), sample
            carried = net.carry(states) if level else states
            tokens = lesson.tokens.gather(1, (place + level + 1).clamp(max=length - 1))
            states = net(tokens, carried, place + level, unrolled.later if level else unrolled.first)
            laws = lesson.laws_at(place + level + 1)
            yield net.logits(states[laws >= 0][None])[0], laws[laws >= 0]


def _rows_with_laws(lesson: Lesson) -> Int[Tensor, "B M"]:
    """The rows that drafts began from, as many for each text as the one with the most has: row 0 stands in where
    there are fewer."""
    counts = lesson.rows.bincount(minlength=lesson.tokens.shape[0])
    found = lesson.tokens.new_zeros(counts.shape[0], int(counts.max()))
    order = torch.arange(lesson.rows.shape[0], device=found.device) - (counts.cumsum(0) - counts)[lesson.rows]
    found[lesson.rows, order] = (lesson.places - 1).clamp(min=0)
    return found


@final
class AheadTrainee(Trainee):
    """Heads on the target's last state: head i at row j says the law after token j + 1 + i."""

    def __init__(self, net: Medusa | Blockwise | Hydra) -> None:
        shadow = plain_copy(net, shared=(net.target,))
        assert isinstance(shadow, (Medusa, Blockwise, Hydra))
        super().__init__(net, shadow, net.target.vocab_size)
        self._net = shadow

    def _judge(self, lesson: Lesson) -> Iterator[tuple[Tensor, Tensor]]:
        hidden = lesson.hidden[FINAL]
        if isinstance(self._net, Hydra) and self._net.prefix is not None:
            place = torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape[0], -1)
            hidden = self._net.prefix(hidden, place, Unrolled(place).first)
        for head in range(self._net.count):
            row = lesson.places - 1 - head
            laws = (row >= 0).nonzero()[:, 0]
            row, text = row[laws], lesson.rows[laws]
            yield self._logits(hidden[text, row][None], lesson, text, row, head)[0], laws

    def _logits(
        self, states: Float[Tensor, "1 m H"], lesson: Lesson, text: Int[Tensor, "m"], row: Int[Tensor, "m"], head: int
    ) -> Float[Tensor, "1 m V"]:
        net = self._net
        if isinstance(net, Hydra):
            ahead = row[:, None] + torch.arange(1, head + 2, device=row.device)
            return net.logits(states, lesson.tokens[text[:, None], ahead][None], head)
        return net.logits(net.states(states, head), head)


@singledispatch
def trainee_of(network: object) -> Trainee:
    """The adapter for a network. Register your own for a network that foredraft does not know.

    Raises:
        DrafterError: there is none.
    """
    raise DrafterError(f"online cannot train a {type(network).__name__}.")


trainee_of.register(CausalLM, ModelTrainee)
trainee_of.register(EagleNet, EagleTrainee)
for _kind in (Medusa, Blockwise, Hydra):
    trainee_of.register(_kind, AheadTrainee)
