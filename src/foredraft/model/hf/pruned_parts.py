"""Parts of a transformer that pruning keeps: layers, key-value groups, MLP dimensions and hidden dimensions."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TransformerSizes:
    """Sizes of a transformer. ``heads``: query heads. ``groups``: key-value heads, shared by query heads."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    groups: int


class Masks(NamedTuple):
    """Factors: 1 for kept parts, 0 for removed ones; learned masks may have values between."""

    layers: Float[Tensor, "L"]
    hidden: Float[Tensor, "H"]
    groups: Float[Tensor, "L G"]
    intermediate: Float[Tensor, "L I"]


class Kept(NamedTuple):
    """Kept parts as ascending indices. ``groups`` and ``intermediate``: per kept layer, all of equal length."""

    layers: tuple[int, ...]
    hidden: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    intermediate: tuple[tuple[int, ...], ...]

    def masks(self, sizes: TransformerSizes) -> Masks:
        """The masks of the whole model. All parts of removed layers are 0."""
        masks = uniform_masks(sizes, 0.0)
        masks.layers[list(self.layers)] = 1.0
        masks.hidden[list(self.hidden)] = 1.0
        for layer, groups, inner in zip(self.layers, self.groups, self.intermediate, strict=True):
            masks.groups[layer, list(groups)] = 1.0
            masks.intermediate[layer, list(inner)] = 1.0
        return masks


def uniform_masks(sizes: TransformerSizes, value: float = 1.0) -> Masks:
    """Masks with the same value everywhere."""
    layers = sizes.layers
    shapes = ((layers,), (sizes.hidden,), (layers, sizes.groups), (layers, sizes.intermediate))
    return Masks(*(torch.full(shape, value) for shape in shapes))


def top_parts(scores: Masks, wanted: TransformerSizes) -> Kept:
    """The parts with the highest scores, of exactly the wanted sizes."""
    layers = _top(scores.layers, wanted.layers)
    return Kept(
        layers,
        _top(scores.hidden, wanted.hidden),
        tuple(_top(scores.groups[layer], wanted.groups) for layer in layers),
        tuple(_top(scores.intermediate[layer], wanted.intermediate) for layer in layers),
    )


def _top(scores: Float[Tensor, "N"], count: int) -> tuple[int, ...]:
    order = scores.detach().float().cpu().argsort(descending=True, stable=True)
    return tuple(sorted(order[:count].tolist()))
