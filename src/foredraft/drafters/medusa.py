"""Medusa (Cai et al., arXiv:2401.10774): heads on the target's last state, each for one token further ahead.

Medusa's own typical acceptance is another matter than its drafts: ``verifier="typical"`` runs it, marked as lossy.
"""

from typing import final

from jaxtyping import Float, Int
from torch import Tensor

from foredraft.drafters.filled import FilledTree, Options
from foredraft.drafters.last_state import LastState
from foredraft.drafters.supplies import Supplies
from foredraft.drafters.trainees import AheadTrainee
from foredraft.nets.medusa import Medusa

__all__ = ["MedusaDrafter", "Options"]


@final
class MedusaDrafter(FilledTree):
    """Head i says what stands on level i + 1, whatever stands above it."""

    def __init__(self, options: Options, net: Medusa) -> None:
        template = options.template(net.config.accuracies, net.count)
        super().__init__(template, LastState())
        self._net = net

    def trainee(self) -> AheadTrainee:
        return AheadTrainee(self._net)

    def _logits(self, hidden: Float[Tensor, "B 1 H"], paths: Int[Tensor, "B F K"], head: int) -> Float[Tensor, "B 1 v"]:
        return self._net.logits(self._net.states(hidden, head), head)


def build(options: Options, supplies: Supplies) -> MedusaDrafter:
    """medusa:HEAD"""
    return MedusaDrafter(options, supplies.head(options))
