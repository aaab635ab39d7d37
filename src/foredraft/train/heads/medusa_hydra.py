"""The recipe of heads that read the target's last hidden state: Medusa, blockwise decoding and Hydra."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from foredraft.core.errors import OptionError
from foredraft.core.options import check_bounds
from foredraft.core.target_parts import FINAL
from foredraft.heads.nets.hydra import Hydra
from foredraft.heads.nets.medusa import Blockwise, Medusa
from foredraft.heads.nets.ttt_attention import sample_rows, take
from foredraft.train.losses import chain_metrics, hit_rate, loss_of, weighted_mean
from foredraft.train.recipe import Recipe, TrainBatch, recompute

Ahead = Medusa | Blockwise | Hydra
Logits = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of head training.

    teacher: train on the target's law (soft labels) instead of the data's tokens.
    loss: loss on laws, see ``losses``; cross-entropy if the labels are tokens.
    decay: head i has weight decay^i; 1.0 in Medusa-1, 0.8 in Medusa-2's fork.
    share: fraction of the positions used in each step; an unbiased estimate that saves time.
    recompute: recompute logits in the backward pass instead of storing them.
    """

    teacher: bool = True
    loss: str = "ce"
    decay: float = 1.0
    share: float = 0.25
    recompute: bool = False

    def __post_init__(self) -> None:
        check_bounds(self, above={"share": 0}, most={"share": 1})

    def check_length(self, length: int, heads: int) -> None:
        """Refuse samples without a position that has a label for every head."""
        if length < heads + 2:
            raise OptionError(f"Samples of {length} tokens are too short for {heads} heads: raise --length.")


@final
class AheadRecipe(Recipe[Ahead]):
    """Head i at position j predicts token j + 2 + i; the target is frozen."""

    def __init__(self, net: Ahead, options: Options) -> None:
        super().__init__()
        self.net = net
        self.taps = (FINAL,)
        self._options = options
        self._loss = loss_of(options.loss)

    def forward(self, batch: TrainBatch) -> dict[str, Tensor]:
        count = self.net.config.num_heads
        size, length = batch.tokens.shape
        self._options.check_length(length, count)
        logits = logits_ahead(self.net, batch)
        rows = sample_rows(length - 1 - count, size, self._options.share, batch.rng())
        total = torch.zeros((), device=batch.tokens.device)
        rates: list[Tensor] = []
        for head in range(count):
            loss, hits = recompute(self._options.recompute, self._loss_and_hits, batch, rows, head, logits)
            total = total + self._options.decay**head * loss
            rates.append(hits)
        return {"loss": total, **chain_metrics(rates)}

    def _loss_and_hits(self, batch: TrainBatch, rows: Tensor, head: int, logits: Logits) -> tuple[Tensor, Tensor]:
        labels = rows + 1 + head  # the target's law at position j + 1 + i is that of token j + 2 + i
        weights = take(batch.weights, labels)
        log_q = logits(rows, head).float().log_softmax(-1)
        with torch.no_grad():
            p = self.net.target.head(take(batch.hidden[FINAL], labels)).float().softmax(-1)
        if self._options.teacher:
            loss = self._loss(p, log_q)
        else:
            following = take(batch.tokens[:, 1:], labels)
            loss = -log_q.gather(-1, following[..., None])[..., 0]
        return weighted_mean(loss, weights), hit_rate(log_q, p, weights)


def logits_ahead(net: Ahead, batch: TrainBatch) -> Logits:
    """A function of positions [B, M] and a head, which returns the head's logits [B, M, V] there.

    Head i of Hydra also reads the i + 1 data tokens before the one that it predicts, as if all were accepted.
    """
    if not isinstance(net, Hydra):
        return lambda rows, head: net.logits(take(batch.hidden[FINAL], rows), head)
    hidden = net.prefixed(batch.hidden[FINAL])

    def logits(rows: Tensor, head: int) -> Tensor:
        ahead = torch.arange(1, head + 2, device=rows.device)
        tokens = batch.tokens.gather(1, (rows[..., None] + ahead).flatten(1)).view(*rows.shape, -1)
        return net.logits(take(hidden, rows), tokens, head)

    return logits
