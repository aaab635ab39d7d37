"""EAGLE-1's recipe: the next feature by smooth L1, plus a little of what it says; EAGLE-2 runs the same weights."""

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.heads.nets.eagle import Eagle
from foredraft.heads.nets.target_parts import FINAL
from foredraft.heads.nets.ttt_attention import Unrolled, sample_rows, take
from foredraft.train.losses import loss_of, weighted_mean
from foredraft.train.recipe import Lesson, Recipe, recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How EAGLE-1 is trained (arXiv:2401.15077, section 4; numbers of the published code).

    regression, classification: weights of the smooth L1 loss on features and of the loss on laws.
    loss: of the laws; see ``losses``.
    noise: uniform noise on the features, of this width times 512 / length.
    share: of the rows, so many are judged by what they say; all are by their feature. Unbiased, and most of the cost.
    recompute: compute logits again in the backward pass instead of keeping them.
    """

    regression: float = 1.0
    classification: float = 0.1
    loss: str = "ce"
    noise: float = 0.2
    share: float = 0.25
    recompute: bool = False


@final
class EagleRecipe(Recipe[Eagle]):
    def __init__(self, net: Eagle, options: Options) -> None:
        super().__init__()
        self.net = net
        self.taps = net.taps
        self._options = options
        self._loss = loss_of(options.loss)

    def forward(self, lesson: Lesson) -> dict[str, Tensor]:
        net, options = self.net, self._options
        batch, length = lesson.tokens.shape
        truth = lesson.hidden[FINAL]
        chance = lesson.chance()
        noise = torch.rand(truth.shape, generator=chance, device=truth.device) - 0.5
        features = (truth + noise * (options.noise * 512 / length))[:, :-1]
        place = torch.arange(length - 1, device=truth.device).expand(batch, -1)
        unrolled = Unrolled(place, net.config.block.sliding_window)
        states = net(lesson.tokens[:, 1:], net.features({FINAL: features}), place, unrolled.first)
        wanted, weights = truth[:, 1:], lesson.weights[:, 1:]
        regression = F.smooth_l1_loss(states.float(), wanted.float(), reduction="none").mean(-1)
        sample = sample_rows(length - 1, batch, options.share, chance)
        judged = (take(each, sample) for each in (states, wanted, weights))
        law, hits = recompute(options.recompute, self._judge, *judged)
        features_loss = weighted_mean(regression, weights)
        total = options.regression * features_loss + options.classification * law
        return {"loss": total, "hit_0": hits, "feature_loss": features_loss.detach(), "law_loss": law.detach()}

    def _judge(self, states: Tensor, wanted: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The loss on laws, and the share of rows whose first choice is the target's."""
        with torch.no_grad():
            p = self.net.target.head(wanted).float().softmax(-1)
        logits = self.net.logits(states).float()
        loss = weighted_mean(self._loss(p, logits.log_softmax(-1)), weights)
        return loss, weighted_mean((logits.argmax(-1) == p.argmax(-1)).float(), weights).detach()
