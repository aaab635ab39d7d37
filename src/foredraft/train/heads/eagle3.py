"""EAGLE-3's recipe: training-time test, soft labels over the draft vocabulary, weight 0.8^k for step k."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.errors import OptionError
from foredraft.core.options import check_bounds
from foredraft.core.target_parts import FINAL
from foredraft.heads.nets.eagle import Eagle3
from foredraft.heads.nets.ttt_attention import Unrolled, sample_rows, take
from foredraft.train.losses import chain_metrics, feature_loss, hit_rate, loss_of, weighted_mean
from foredraft.train.recipe import Recipe, TrainBatch, recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of EAGLE-3 training.

    steps: unrolled steps, including the first.
    loss: see ``losses``.
    decay: step k has weight decay^k.
    regression: weight of EAGLE-1's smooth L1 loss between states and the target's features, which EAGLE-3 leaves out
        (section 1); for its ablation.
    share: fraction of the positions used in later steps. They are independent there, so the estimate is unbiased and
        saves most of the cost.
    any_label: also train where the target's argmax is not in the draft vocabulary (SafeAILab's code does not).
    recompute: recompute logits in the backward pass instead of storing them.
    """

    steps: int = 5
    loss: str = "ce"
    decay: float = 0.8
    regression: float = 0.0
    share: float = 0.25
    any_label: bool = False
    recompute: bool = False

    def __post_init__(self) -> None:
        check_bounds(self, least={"steps": 1, "regression": 0}, above={"share": 0}, most={"share": 1})

    def check_length(self, length: int, heads: int) -> None:
        """Refuse samples without a position that has a label in the last step."""
        if length <= self.steps:
            raise OptionError(f"Samples of {length} tokens are too short for {self.steps} steps: raise --length.")


@final
class Eagle3Recipe(Recipe[Eagle3]):
    def __init__(self, net: Eagle3, options: Options) -> None:
        super().__init__()
        self.net = net
        self.taps = (*net.taps, FINAL)
        self._options = options
        self._loss = loss_of(options.loss)

    def forward(self, batch: TrainBatch) -> dict[str, Tensor]:
        net, options = self.net, self._options
        size, length = batch.tokens.shape
        options.check_length(length, 1)
        rows = length - options.steps  # later positions lack labels in the last step
        p, weights = self._labels(batch)
        sample = sample_rows(rows, size, options.share, batch.rng())
        unrolled = Unrolled(sample, net.config.block.sliding_window)
        place = torch.arange(rows, device=batch.tokens.device).expand(size, -1)
        states = net.features(batch.hidden)[:, :rows]
        total = torch.zeros((), device=states.device)
        rates: list[Tensor] = []
        for step in range(options.steps):
            if step == 1:
                states, place = take(states, sample), sample
            attend = unrolled.later if step else unrolled.first
            carried = net.carry(states) if step else states
            states = net(batch.tokens.gather(1, place + step + 1), carried, place + step, attend)
            loss, hits = recompute(options.recompute, self._loss_and_hits, states, p, weights, place + step + 1)
            if options.regression:
                truth, counts = (take(each, place + step + 1) for each in (batch.hidden[FINAL], batch.weights))
                loss = loss + options.regression * feature_loss(states, truth, counts)
            total = total + options.decay**step * loss
            rates.append(hits)
        return {"loss": total, **chain_metrics(rates)}

    @torch.no_grad()
    def _labels(self, batch: TrainBatch) -> tuple[Float[Tensor, "B T v"], Float[Tensor, "B T"]]:
        """The target's law over the draft vocabulary, renormalised, and the loss weight, at each position."""
        logits = self.net.target.head(batch.hidden[FINAL]).float()
        vocabulary, weights = self.net.vocabulary, batch.weights
        if vocabulary is not None:
            if not self._options.any_label:
                known = torch.isin(logits.argmax(-1), vocabulary)
                weights = weights * known
            logits = logits[..., vocabulary]
        return logits.softmax(-1), weights

    def _loss_and_hits(
        self,
        states: Float[Tensor, "B M H"],
        p: Float[Tensor, "B T v"],
        weights: Float[Tensor, "B T"],
        labels: Int[Tensor, "B M"],
    ) -> tuple[Tensor, Tensor]:
        """The loss against the laws at positions ``labels``, and the share of equal argmaxes."""
        p, weights = take(p, labels), take(weights, labels)
        logits = self.net.logits(states).float()
        loss = weighted_mean(self._loss(p, logits.log_softmax(-1)), weights)
        return loss, hit_rate(logits, p, weights)
