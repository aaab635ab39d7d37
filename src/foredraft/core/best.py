"""The best of many scores, with one order for equal ones: the lower id first, as argmax has it.

torch's topk returns equal scores in any order, and any of them where only some fit. So a guess would differ from what
the target takes: in half precision and in quantised models many logits are equal.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Best(NamedTuple):
    """The best scores, highest first, and their places."""

    values: Float[Tensor, "*rows k"]
    indices: Int[Tensor, "*rows k"]


def best_of(scores: Float[Tensor, "*rows V"], count: int) -> Best:
    """The ``count`` highest scores of each row; of equal ones those with the lowest index, in this order.

    NaN counts as the highest. Takes little more time than topk, on a CPU unless scores at the border are equal.
    """
    if not _readable(scores):
        return _by_keys(scores, count)
    more = min(count + 1, scores.shape[-1])
    found = scores.topk(more, dim=-1)
    if more > count > 0 and bool((found.values[..., count - 1] == found.values[..., count]).any()):
        return _by_keys(scores, count)
    places = found.indices[..., :count].sort(dim=-1).values
    ordered = scores.gather(-1, places).sort(dim=-1, descending=True, stable=True)
    return Best(ordered.values, places.gather(-1, ordered.indices))


def _readable(scores: Tensor) -> bool:
    """Whether reading a value is free, and allowed: not while a step is compiled."""
    return scores.device.type == "cpu" and not torch.compiler.is_compiling()


def _by_keys(scores: Float[Tensor, "*rows V"], count: int) -> Best:
    """By whole numbers in the order of the scores, which have the place of each, so that none are equal."""
    if scores.dtype == torch.float64:
        ordered = scores.sort(dim=-1, descending=True, stable=True)
        return Best(ordered.values[..., :count], ordered.indices[..., :count])
    bits = (scores.float() + 0.0).view(torch.int32).long()  # -0.0 becomes 0.0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # of negative numbers the larger is nearer to 0
    behind = torch.arange(scores.shape[-1] - 1, -1, -1, device=scores.device)
    places = (order * (1 << 32) + behind).topk(count, dim=-1).indices
    return Best(scores.gather(-1, places), places)
