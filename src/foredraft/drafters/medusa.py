"""Medusa (Cai et al., arXiv:2401.10774): heads on the target's last state, each for one token further ahead.

Medusa's own typical acceptance is another matter than its drafts: ``verifier="typical"`` runs it, marked as lossy.
"""

from typing import final

from jaxtyping import Float, Int
from torch import Tensor

from foredraft.drafters.common.build_context import BuildContext
from foredraft.drafters.common.last_hidden import LastHidden
from foredraft.drafters.common.static_tree import FilledTree, Options
from foredraft.heads.nets.medusa import Medusa

__all__ = ["MedusaDrafter", "Options"]


@final
class MedusaDrafter(FilledTree):
    """Head i says what stands on level i + 1, whatever stands above it."""

    def __init__(self, options: Options, net: Medusa) -> None:
        template = options.template(net.config.accuracies, net.count)
        super().__init__(template, LastHidden())
        self._net = net

    @property
    def network(self) -> Medusa:
        return self._net

    def _logits(self, hidden: Float[Tensor, "B 1 H"], paths: Int[Tensor, "B F K"], head: int) -> Float[Tensor, "B 1 v"]:
        return self._net.logits(self._net.states(hidden, head), head)


def build(options: Options, context: BuildContext) -> MedusaDrafter:
    """medusa:HEAD"""
    return MedusaDrafter(options, context.head(options.law))
