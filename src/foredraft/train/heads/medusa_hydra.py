"""Recipes for heads that read the target's last state: Medusa, blockwise decoding and Hydra."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, final

import torch
from torch import Tensor

from foredraft.core.errors import OptionError
from foredraft.heads.nets.hydra import Hydra
from foredraft.heads.nets.medusa import Blockwise, Medusa
from foredraft.heads.nets.target_parts import FINAL
from foredraft.heads.nets.ttt_attention import Unrolled, sample_rows, take
from foredraft.train.losses import loss_of, weighted_mean
from foredraft.train.recipe import Lesson, Recipe, recompute

Ahead = TypeVar("Ahead", bound=Medusa | Blockwise | Hydra)
Logits = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How heads are trained.

    teacher: learn the target's law (soft labels) instead of the next tokens of the text.
    loss: of laws; see ``losses``. It is plain cross-entropy where the labels are the text's tokens.
    decay: head i weighs decay^i. Medusa-1 weighs all alike (1.0), Medusa-2's fork 0.8.
    share: of the rows, so many are learned from at each step; an unbiased estimate that saves time.
    recompute: compute logits again in the backward pass instead of keeping them.
    """

    teacher: bool = True
    loss: str = "ce"
    decay: float = 1.0
    share: float = 0.25
    recompute: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise OptionError("share must be above 0 and at most 1.")


class _Ahead(Recipe[Ahead]):
    """What all of these have in common: head i at row j is to say token j + 2 + i."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.taps = (FINAL,)
        self._options = options
        self._loss = loss_of(options.loss)

    def _learn(self, lesson: Lesson, count: int, logits_of: Logits) -> dict[str, Tensor]:
        """Judge ``logits_of(rows [B, M], head)`` for each head."""
        batch, length = lesson.tokens.shape
        if length < count + 2:
            raise OptionError(f"Texts of {length} tokens are too short for {count} heads.")
        rows = sample_rows(length - 1 - count, batch, self._options.share, lesson.chance())
        total = torch.zeros((), device=lesson.tokens.device)
        said: dict[str, Tensor] = {}
        reach = torch.ones_like(total)
        for head in range(count):
            loss, hits = recompute(self._options.recompute, self._judge, lesson, rows, head, logits_of)
            total = total + self._options.decay**head * loss
            said[f"hit_{head}"] = hits
            reach = reach * hits
            said["length"] = said.get("length", torch.ones_like(hits)) + reach
        return {"loss": total, **said}

    def _judge(self, lesson: Lesson, rows: Tensor, head: int, logits_of: Logits) -> tuple[Tensor, Tensor]:
        labels = rows + 1 + head  # the target's law after token j + 1 + i is that of token j + 2 + i
        weights = take(lesson.weights, labels)
        log_q = logits_of(rows, head).float().log_softmax(-1)
        with torch.no_grad():
            p = self._teach(take(lesson.hidden[FINAL], labels))
        if self._options.teacher:
            loss = self._loss(p, log_q)
        else:
            following = take(lesson.tokens[:, 1:], labels)
            loss = -log_q.gather(-1, following[..., None])[..., 0]
        hits = weighted_mean((log_q.argmax(-1) == p.argmax(-1)).float(), weights)
        return weighted_mean(loss, weights), hits.detach()

    def _teach(self, states: Tensor) -> Tensor:
        return self.net.target.head(states).float().softmax(-1)


@final
class MedusaRecipe(_Ahead[Medusa | Blockwise]):
    """Medusa-1, and the heads of blockwise decoding: the target stays as it is."""

    def __init__(self, net: Medusa | Blockwise, options: Options) -> None:
        super().__init__(options)
        self.net = net

    def forward(self, lesson: Lesson) -> dict[str, Tensor]:
        net = self.net
        hidden = lesson.hidden[FINAL]
        return self._learn(lesson, net.count, lambda rows, head: net.logits(net.states(take(hidden, rows), head), head))


@final
class HydraRecipe(_Ahead[Hydra]):
    """Hydra and Hydra++: head i also reads the i + 1 tokens before the one that it says, as they stand in the text."""

    def __init__(self, net: Hydra, options: Options) -> None:
        super().__init__(options)
        self.net = net

    def forward(self, lesson: Lesson) -> dict[str, Tensor]:
        net, hidden = self.net, lesson.hidden[FINAL]
        if net.prefix is not None:
            place = torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape[0], -1)
            hidden = net.prefix(hidden, place, Unrolled(place).first)

        def logits(rows: Tensor, head: int) -> Tensor:
            ahead = torch.arange(1, head + 2, device=rows.device)
            tokens = lesson.tokens.gather(1, (rows[..., None] + ahead).flatten(1)).view(*rows.shape, -1)
            return net.logits(take(hidden, rows), tokens, head)

        return self._learn(lesson, net.count, logits)
