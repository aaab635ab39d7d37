"""Medusa-2's recipe (arXiv:2401.10774, section 2.2.2): the heads alone at first, then heads and target together.

The target is changed by it: what these heads draft is lossless for the changed target, not for the one before.
"""

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from foredraft.core.errors import OptionError
from foredraft.core.sampling.params import check_known
from foredraft.heads.nets.medusa import Medusa
from foredraft.heads.nets.target_parts import FINAL
from foredraft.model.hf import CausalLM
from foredraft.model.taps import body
from foredraft.train.heads import medusa_hydra as heads
from foredraft.train.losses import kl, weighted_mean
from foredraft.train.recipe import Lesson, Recipe, recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(heads.Options):
    """How heads and target learn together: the target's own loss, and ``weight`` times the heads'.

    alone: share of the steps in which the heads learn alone, as in Medusa-1; 0 to go on from heads that have.
    ramp: share of the steps, after these, in which ``weight`` rises along a sine.
    weight: the paper's lambda_0; its code takes 0.2, and 0.01 beside own=kl.
    pace: the target's learning rate as a share of the heads'. The paper's quarter is for LoRA; here all weights learn.
    own: the target's own loss: ce, on the tokens of the text; kl, to what it said before, for texts in its own words
        (self-distillation, section 2.3.2), at the cost of a second copy of the target.
    decay: head i weighs decay^i, from 0 on (the published code counts from 1).
    teacher, loss, share, recompute: see ``heads.Options``; the last holds for the target's own logits too.
    """

    alone: float = 0.3
    ramp: float = 0.2
    weight: float = 0.2
    pace: float = 0.02
    own: str = "ce"
    decay: float = 0.8

    def __post_init__(self) -> None:
        heads.Options.__post_init__(self)  # super() knows only the class before it got slots
        check_known("own loss", {self.own: None}, ["ce", "kl"])
        if not (0 <= self.alone < 1 and 0 <= self.ramp <= 1):
            raise OptionError("alone must be from 0 to less than 1, and ramp from 0 to 1.")
        if not (self.weight > 0 and self.pace > 0):
            raise OptionError("weight and pace must be above 0.")

    def weight_at(self, done: float) -> float:
        """What the heads count when this share of the training is done."""
        risen = min(1.0, (done - self.alone) / self.ramp) if self.ramp else 1.0
        return self.weight * math.sin(risen * math.pi / 2)


@final
class Joint(nn.Module):
    """Heads and the target that they belong to, as one net that learns and is kept as a whole."""

    def __init__(self, head: Medusa, target: CausalLM) -> None:
        super().__init__()
        self.head = head
        self.model: nn.Module = target.model.requires_grad_(True)
        self._target = target

    def states(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T H"]:
        """What the target's output layer reads, with gradients."""
        self.model.eval()  # dropout would draw numbers that a resumed run does not draw again
        return body(self._target.model)(input_ids=tokens, use_cache=False)[0]

    def frozen(self) -> Callable[[Tensor], Tensor]:
        """The law [B, T, V] of texts [B, T] as the target has it now, whatever becomes of it."""
        return functools.partial(_law, copy.deepcopy(self.model).requires_grad_(False))


@torch.no_grad()
def _law(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, use_cache=False).logits.float().softmax(-1)


@final
class Medusa2Recipe(Recipe[Joint]):
    """Medusa-2. A lesson is only its texts: the target reads them anew at each step, since it is not what it was."""

    def __init__(self, net: Joint, options: Options) -> None:
        super().__init__()
        self.net = net
        self.taps = ()
        self.paces = {"model": options.pace}
        self._options = options
        self._before = net.frozen() if options.own == "kl" else None
        self._heads = heads.MedusaRecipe(net.head, options)

    def forward(self, lesson: Lesson) -> dict[str, Tensor]:
        together = lesson.done >= self._options.alone
        self.net.model.requires_grad_(together)
        states = self.net.states(lesson.tokens)
        said = self._heads(replace(lesson, hidden={FINAL: states}))
        if not together:
            return said
        own = recompute(self._options.recompute, self._own, lesson, states)
        total = own + self._options.weight_at(lesson.done) * said["loss"]
        return {**said, "loss": total, "own_loss": own.detach(), "heads_loss": said["loss"].detach()}

    def _own(self, lesson: Lesson, states: Float[Tensor, "B T H"]) -> Tensor:
        """The loss of a language model: of each row's law against the token after it, or the law before."""
        log_p = self.net.head.target.head(states[:, :-1]).float().log_softmax(-1)
        if self._before is not None:
            loss = kl(self._before(lesson.tokens)[:, :-1], log_p)
        else:
            loss = -log_p.gather(-1, lesson.tokens[:, 1:, None])[..., 0]
        return weighted_mean(loss, lesson.weights[:, :-1])
