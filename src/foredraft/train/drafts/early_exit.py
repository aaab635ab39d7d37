"""LayerSkip's training (Elhoushi et al., arXiv:2404.16710, section 4.1), for ``foredraft train early_exit``.

Layers are skipped at random, deeper ones more often, and the model's own final norm and output layer learn to predict
after every layer. It trains a copy of the target: early exits are lossless for the copy, not for the target.
"""

import math
import random
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from foredraft.core.errors import OptionError
from foredraft.core.options import check_bounds
from foredraft.core.sampling.params import check_known
from foredraft.core.target_parts import FINAL
from foredraft.drafters.early_exit import EarlyExit, Options as ExitOptions
from foredraft.model.base import TargetModel
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.partial.skipping import Exits
from foredraft.train.data.batches import TrainBatches
from foredraft.train.drafts import distil
from foredraft.train.drafts.distil import Student, Teacher
from foredraft.train.heads.validate import validation_length, validation_losses
from foredraft.train.options import LoopOptions
from foredraft.train.recipe import Recipe, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(distil.Options):
    """Options of LayerSkip's training, and the loss of every exit (see ``distil.Options``).

    The default loss, forward_kl, holds all exits to the law of the original target (self-distillation); text is the
    paper's cross-entropy on the data.

    dropout: how often the last layer is skipped in a step, the paper's p_max; earlier ones are skipped less often.
    scale: the weight of early exits, the paper's e_scale: 0 trains the last one alone.
    curriculum: exits of a step beside the last one: rotational, one in ``every`` layers, moved on by a layer in each
        step; gradual, from the last to the first in the first half of the training, one more at a time.
    every: the rotational curriculum's R.
    exit: layers that draft in validations; 0: a quarter of the model's.
    """

    dropout: float = 0.1
    scale: float = 1.0
    curriculum: str = "rotational"
    every: int = 8
    exit: int = 0

    def __post_init__(self) -> None:
        distil.Options.__post_init__(self)  # super() knows only the class before it got slots
        check_known("curriculum", {self.curriculum: None}, ["rotational", "gradual"])
        check_bounds(
            self, least={"dropout": 0, "scale": 0, "every": 1, "exit": 0}, most={"scale": 1}, below={"dropout": 1}
        )

    def exit_of(self, layers: int) -> int:
        """The exit of validations in a model of so many layers.

        Raises:
            OptionError: it has fewer.
        """
        if self.exit > layers:
            raise OptionError(f"The target has {layers} layers, so exit must be {layers} or less, not {self.exit}.")
        return self.exit or max(1, layers // 4)

    def rates(self, layers: int) -> list[float]:
        """How often each layer l is skipped: p_max (2^(l / (L - 1)) - 1), as in the paper for trained models."""
        return [self.dropout * (2 ** (layer / max(1, layers - 1)) - 1) for layer in range(layers)]

    def weight_of(self, exit: int, layers: int) -> float:
        """Relative weight of the loss after so many layers: the paper's e(l), where l counts from 0."""
        if exit == layers:
            return max(1, layers - 1) + self.scale * math.comb(layers - 1, 2)
        return self.scale * math.comb(exit, 2)

    def exits(self, layers: int, step: int, progress: float) -> list[int]:
        """The exits of a step whose loss has a weight; the last layer's always."""
        if self.curriculum == "rotational":
            enabled = range(1 + step % self.every, layers, self.every)
        else:
            enabled = range(max(1, layers - int(2 * progress * layers)), layers)
        return [*(exit for exit in enabled if self.weight_of(exit, layers)), layers]


@final
class EarlyExitRecipe(Recipe[Student]):
    """LayerSkip: the weighted losses of a step's exits. In evaluation no layer is skipped, and there are two exits,
    that of validations and the last; ``text_loss`` and ``target_text_loss`` are then the cross-entropy on the data of
    the whole model and of the original target.

    Args:
        model: to train; a copy of the target.
    """

    lr = 3e-4  # a whole model forgets at a head's rate

    def __init__(self, model: CausalLM, target: TargetModel, options: Options) -> None:
        super().__init__()
        self.taps = (FINAL,)
        self.net = Student(model.model)
        self.lm = model
        self.exit = options.exit_of(model.layers)
        self._options = options
        self._exits = Exits(model)
        self._target_head = target.parts().head
        self._teacher = Teacher(target, options)
        self._text = Teacher(target, distil.Options(loss="text", rows=options.rows))

    def forward(self, batch: TrainBatch) -> dict[str, Tensor]:
        layers, options = self.lm.layers, self._options
        exits, dropped = sorted({self.exit, layers}), []
        if self.training:
            exits, draws = options.exits(layers, batch.step, batch.progress), random.Random(batch.seed)
            dropped = [layer for layer, rate in enumerate(options.rates(layers)) if draws.random() < rate]
        self.net.model.eval()  # its own dropout would make resumed runs differ
        states = self._exits.states(batch.tokens, exits, dropped)
        losses, agreements = self._teacher.each(batch, states, self.net.head)
        weights = torch.tensor([options.weight_of(exit, layers) for exit in exits], device=losses.device)
        metrics = {
            "loss": (weights * losses).sum() / weights.sum(),
            "full_loss": losses[-1].detach(),
            "full_agreement": agreements[-1],
            "early_agreement": agreements[:-1].mean() if len(exits) > 1 else agreements[-1],
        }
        if not self.training:
            metrics["text_loss"] = self._text(batch, states[-1], self.net.head)["loss"]
            metrics["target_text_loss"] = self._text(batch, batch.hidden[FINAL], self._target_head)["loss"]
        return metrics


def validate(
    chain: ExitOptions, recipe: EarlyExitRecipe, batches: TrainBatches, target: TargetModel, loop: LoopOptions
) -> dict[str, float]:
    """Metrics on held-out samples, the perplexities of model and target there, and the acceptance length of the chains
    of an early exit."""
    metrics = validation_losses(recipe, batches, loop)
    for name in ("perplexity", "target_perplexity"):
        metrics[name] = round(math.exp(metrics.pop(name.replace("perplexity", "text_loss"))), 4)
    cache = recipe.lm.new_cache()
    drafter = EarlyExit(chain, recipe.lm, cache, recipe.lm.vocab_size)
    return metrics | {"acceptance_length": validation_length(recipe.lm, drafter, batches, cache)}
