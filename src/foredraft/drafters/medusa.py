"""Medusa (Cai et al., arXiv:2401.10774): heads on the target's last hidden state, each for one position further ahead.

Medusa's typical acceptance is a verification rule of its own: ``verifier="typical,epsilon=0.09"``, marked as lossy.
"""

from typing import final

from jaxtyping import Float, Int
from torch import Tensor

from foredraft.drafters.common.level_heads import LevelHeadsDrafter, Options
from foredraft.drafters.context import BuildContext
from foredraft.drafters.states.last_hidden import LastHidden
from foredraft.heads.nets.medusa import Medusa
from foredraft.model.ops import TORCH, Ops

__all__ = ["MedusaDrafter", "Options"]


@final
class MedusaDrafter(LevelHeadsDrafter[Medusa]):
    """Head i predicts the tokens of level i + 1, independently of the levels above."""

    def __init__(self, options: Options, net: Medusa, ops: Ops = TORCH) -> None:
        super().__init__(options, net, LastHidden(), ops)

    def logits(self, hidden: Float[Tensor, "B 1 H"], paths: Int[Tensor, "B F K"], head: int) -> Float[Tensor, "B 1 v"]:
        return self._net.logits(hidden, head)


def build(options: Options, context: BuildContext) -> MedusaDrafter:
    """medusa:HEAD"""
    return MedusaDrafter(options, context.head(), context.ops)
