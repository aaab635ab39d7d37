"""EAGLE-3's recipe: training-time test, soft targets over the draft vocabulary, a weight of 0.8^k for step k."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.errors import OptionError
from foredraft.heads.nets.eagle import Eagle3
from foredraft.heads.nets.target_parts import FINAL
from foredraft.heads.nets.ttt_attention import Unrolled, sample_rows, take
from foredraft.train.losses import loss_of, weighted_mean
from foredraft.train.recipe import Lesson, Recipe, recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How EAGLE-3 is trained.

    steps: unrolled steps, the first included.
    loss: see ``losses``.
    decay: step k weighs decay^k.
    share: of the rows, so many go on to the later steps. They are independent there, so this is an unbiased estimate
        and saves most of their cost.
    any_label: also learn where the target's first choice is not in the draft vocabulary (SafeAILab's code does not).
    recompute: compute logits again in the backward pass instead of keeping them.
    """

    steps: int = 5
    loss: str = "ce"
    decay: float = 0.8
    share: float = 0.25
    any_label: bool = False
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 < self.share <= 1:
            raise OptionError("steps must be 1 or more, and share above 0 and at most 1.")


@final
class Eagle3Recipe(Recipe[Eagle3]):
    def __init__(self, net: Eagle3, options: Options) -> None:
        super().__init__()
        self.net = net
        self.taps = (*net.taps, FINAL)
        self._options = options
        self._loss = loss_of(options.loss)

    def forward(self, lesson: Lesson) -> dict[str, Tensor]:
        net, options = self.net, self._options
        batch, length = lesson.tokens.shape
        rows = length - options.steps  # beyond, the last step's labels fall off the end
        if rows < 1:
            raise OptionError(f"Texts of {length} tokens are too short for {options.steps} steps.")
        p, weights = self._labels(lesson)
        sample = sample_rows(rows, batch, options.share, lesson.chance())
        unrolled = Unrolled(sample, net.config.block.sliding_window)
        place = torch.arange(rows, device=lesson.tokens.device).expand(batch, -1)
        states = net.features(lesson.hidden)[:, :rows]
        total = torch.zeros((), device=states.device)
        said: dict[str, Tensor] = {}
        reach = torch.ones(())
        for step in range(options.steps):
            if step == 1:
                states, place = take(states, sample), sample
            attend = unrolled.later if step else unrolled.first
            carried = net.carry(states) if step else states
            states = net(lesson.tokens.gather(1, place + step + 1), carried, place + step, attend)
            loss, hits = recompute(options.recompute, self._judge, states, p, weights, place + step + 1)
            total = total + options.decay**step * loss
            said[f"hit_{step}"] = hits
            reach = reach.to(hits.device) * hits
            said["length"] = said.get("length", torch.ones_like(hits)) + reach
        return {"loss": total, **said}

    @torch.no_grad()
    def _labels(self, lesson: Lesson) -> tuple[Float[Tensor, "B T v"], Float[Tensor, "B T"]]:
        """The target's law at each row, over the draft vocabulary and renormalised there, and what each row counts."""
        logits = self.net.target.head(lesson.hidden[FINAL]).float()
        vocabulary, weights = self.net.vocabulary, lesson.weights
        if vocabulary is not None:
            if not self._options.any_label:
                known = torch.isin(logits.argmax(-1), vocabulary)
                weights = weights * known
            logits = logits[..., vocabulary]
        return logits.softmax(-1), weights

    def _judge(
        self,
        states: Float[Tensor, "B M H"],
        p: Float[Tensor, "B T v"],
        weights: Float[Tensor, "B T"],
        labels: Int[Tensor, "B M"],
    ) -> tuple[Tensor, Tensor]:
        """The loss against the laws of the rows ``labels``, and how often both have the same first choice."""
        p, weights = take(p, labels), take(weights, labels)
        logits = self.net.logits(states).float()
        loss = weighted_mean(self._loss(p, logits.log_softmax(-1)), weights)
        return loss, weighted_mean((logits.argmax(-1) == p.argmax(-1)).float(), weights).detach()
