"""The target's parts that heads use, and the draft vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
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


def vocabulary_of(d2t: Int[Tensor, "v"]) -> Int[Tensor, "v"]:
    """Target ids of the draft's ids. ``d2t`` holds offsets: target id = draft id + d2t[draft id]."""
    return torch.arange(d2t.shape[0], device=d2t.device) + d2t


def offsets_of(ids: Int[Tensor, "v"]) -> Int[Tensor, "v"]:
    """``d2t`` of target ids; the inverse of ``vocabulary_of``."""
    return ids - torch.arange(ids.shape[0], device=ids.device)


def member_mask(ids: Int[Tensor, "v"], vocab_size: int) -> Bool[Tensor, "V"]:
    """``t2d``: which target ids are in the draft vocabulary."""
    return torch.zeros(vocab_size, dtype=torch.bool, device=ids.device).scatter(0, ids, True)
