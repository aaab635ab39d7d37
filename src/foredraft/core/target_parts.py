"""The parts of a target that heads use."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

FINAL = -1
"""Layer number of the state after the target's final norm, which its output layer reads."""


@dataclass(frozen=True, slots=True)
class TargetParts:
    """The target's embedding ([...] ids to [..., H]) and output layer ([..., H] to [..., V]). They are not trained.

    They are functions, not modules, so that a head does not move or save them.
    """

    embed: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]
    vocab_size: int
    hidden_size: int
