"""Medusa-2's recipe (arXiv:2401.10774, section 2.2.2): train the heads first, then heads and target jointly.

This changes the target: the heads' drafts are lossless for the tuned target, not for the original.
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

from foredraft.core.options import check_bounds
from foredraft.core.sampling.params import check_known
from foredraft.core.target_parts import FINAL
from foredraft.heads.nets.medusa import Medusa
from foredraft.model.base import TargetModel
from foredraft.model.hf.taps import body
from foredraft.train.heads import medusa_hydra as heads
from foredraft.train.losses import kl, weighted_mean
from foredraft.train.recipe import Recipe, TrainBatch, recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(heads.Options):
    """Options of joint training: the target's own loss plus ``weight`` times the heads' loss.

    alone: fraction of the steps that train only the heads, as in Medusa-1; 0 to start from trained heads.
    ramp: fraction of the steps, after these, in which ``weight`` rises along a sine.
    weight: the paper's lambda_0; its code uses 0.2, and 0.01 with own=kl.
    pace: the target's learning rate as a fraction of the heads'. The paper's 1/4 is for LoRA; here all weights train.
    own: the target's own loss: ce, on the data's tokens; kl, to the original target's law, for data of foredraft
        answers (self-distillation, section 2.3.2), which needs a second copy of the target.
    decay: head i has weight decay^i, with i from 0 (the published code counts from 1).
    teacher, loss, share, recompute: see ``heads.Options``; recompute includes the target's own logits.
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
        check_bounds(self, least={"alone": 0, "ramp": 0}, below={"alone": 1}, most={"ramp": 1})
        check_bounds(self, above={"weight": 0, "pace": 0})

    def weight_at(self, progress: float) -> float:
        """Weight of the heads' loss when this fraction of the training is done."""
        risen = min(1.0, (progress - self.alone) / self.ramp) if self.ramp else 1.0
        return self.weight * math.sin(risen * math.pi / 2)


@final
class Joint(nn.Module):
    """Heads and their target as one net."""

    def __init__(self, head: Medusa, target: TargetModel) -> None:
        super().__init__()
        self.head = head
        self.model: nn.Module = target.module.requires_grad_(True)
        self._target = target

    def states(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T H"]:
        """Input of the target's output layer, with gradients."""
        self.model.eval()  # dropout would make resumed runs differ
        return body(self._target.module)(input_ids=tokens, use_cache=False)[0]

    def frozen(self) -> Callable[[Tensor], Tensor]:
        """A function from tokens [B, T] to laws [B, T, V] of a frozen copy of the target."""
        return functools.partial(_law, copy.deepcopy(self.model).requires_grad_(False))


@torch.no_grad()
def _law(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, use_cache=False).logits.float().softmax(-1)


@final
class Medusa2Recipe(Recipe[Joint]):
    """Medusa-2. Needs no stored hidden states: the target changes, so each step computes them."""

    def __init__(self, net: Joint, options: Options) -> None:
        super().__init__()
        self.net = net
        self.taps = ()
        self.paces = {"model": options.pace}
        self._options = options
        self._original = net.frozen() if options.own == "kl" else None
        self._heads = heads.AheadRecipe(net.head, options)

    def forward(self, batch: TrainBatch) -> dict[str, Tensor]:
        joint = batch.progress >= self._options.alone
        self.net.model.requires_grad_(joint)
        states = self.net.states(batch.tokens)
        metrics = self._heads(replace(batch, hidden={FINAL: states}))
        if not joint:
            return metrics
        own = recompute(self._options.recompute, self._own, batch, states)
        total = own + self._options.weight_at(batch.progress) * metrics["loss"]
        return {**metrics, "loss": total, "own_loss": own.detach(), "heads_loss": metrics["loss"].detach()}

    def _own(self, batch: TrainBatch, states: Float[Tensor, "B T H"]) -> Tensor:
        """Language modelling loss: each position's law against the next token, or the original target's law."""
        log_p = self.net.head.target.head(states[:, :-1]).float().log_softmax(-1)
        if self._original is not None:
            loss = kl(self._original(batch.tokens)[:, :-1], log_p)
        else:
            loss = -log_p.gather(-1, batch.tokens[:, 1:, None])[..., 0]
        return weighted_mean(loss, batch.weights[:, :-1])
