"""EAGLE-1's recipe: smooth L1 on the next feature plus a small loss on laws; EAGLE-2 uses the same weights."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from foredraft.core.errors import OptionError
from foredraft.core.target_parts import FINAL
from foredraft.heads.nets.eagle import Eagle
from foredraft.heads.nets.ttt_attention import Unrolled, sample_rows, take
from foredraft.train.losses import feature_loss, hit_rate, loss_of, weighted_mean
from foredraft.train.recipe import Recipe, TrainBatch, recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of EAGLE-1 training (arXiv:2401.15077, section 4; defaults of the published code).

    regression, classification: weights of the smooth L1 loss on features and of the loss on laws.
    loss: the loss on laws; see ``losses``.
    noise: width of the uniform noise on features, times 512 / length.
    share: fraction of the positions in the loss on laws, which is most of the cost; an unbiased estimate.
    recompute: recompute logits in the backward pass instead of storing them.
    """

    regression: float = 1.0
    classification: float = 0.1
    loss: str = "ce"
    noise: float = 0.2
    share: float = 0.25
    recompute: bool = False

    def check_length(self, length: int, heads: int) -> None:
        """Refuse samples without a next feature."""
        if length < 2:
            raise OptionError(f"Samples of {length} token are too short: raise --length.")


@final
class EagleRecipe(Recipe[Eagle]):
    def __init__(self, net: Eagle, options: Options) -> None:
        super().__init__()
        self.net = net
        self.taps = net.taps
        self._options = options
        self._loss = loss_of(options.loss)

    def forward(self, batch: TrainBatch) -> dict[str, Tensor]:
        net, options = self.net, self._options
        size, length = batch.tokens.shape
        truth = batch.hidden[FINAL]
        rng = batch.rng()
        noise = torch.rand(truth.shape, generator=rng, device=truth.device) - 0.5
        features = (truth + noise * (options.noise * 512 / length))[:, :-1]
        place = torch.arange(length - 1, device=truth.device).expand(size, -1)
        unrolled = Unrolled(place, net.config.block.sliding_window)
        states = net(batch.tokens[:, 1:], net.features({FINAL: features}), place, unrolled.first)
        labels, weights = truth[:, 1:], batch.weights[:, 1:]
        sample = sample_rows(length - 1, size, options.share, rng)
        sampled = (take(each, sample) for each in (states, labels, weights))
        law, hits = recompute(options.recompute, self._loss_and_hits, *sampled)
        features_loss = feature_loss(states, labels, weights)
        total = options.regression * features_loss + options.classification * law
        return {"loss": total, "hit_0": hits, "feature_loss": features_loss.detach(), "law_loss": law.detach()}

    def _loss_and_hits(self, states: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The loss on laws, and the share of positions whose argmax is the target's."""
        with torch.no_grad():
            p = self.net.target.head(labels).float().softmax(-1)
        logits = self.net.logits(states).float()
        loss = weighted_mean(self._loss(p, logits.log_softmax(-1)), weights)
        return loss, hit_rate(logits, p, weights)
