"""Pruning masks over a transformer's layers, key-value groups, MLP dimensions and hidden dimensions.

The masks are learned as hard-concrete variables (Louizos et al., arXiv:1712.01312), driven to given sizes by Lagrange
terms (Sheared-LLaMA, arXiv:2310.06694, section 2.1).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

_BETA = 2 / 3  # beta of the hard-concrete law: smaller values are closer to binary
_LOW, _HIGH = -0.1, 1.1  # a sigmoid is stretched to this range and clipped to 0..1, so 0 and 1 have positive mass
_PHI = 10.0  # initial phi; with the paper's 0, short runs oscillate around the wanted size
_OPEN = 4.0  # initial gate logits: kept with a probability of at least 0.99


@dataclass(frozen=True, slots=True)
class Sizes:
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


class Shares(NamedTuple):
    """Expected fractions of open gates; by layer for groups and MLP dimensions."""

    layers: Float[Tensor, ""]
    hidden: Float[Tensor, ""]
    groups: Float[Tensor, "L"]
    intermediate: Float[Tensor, "L"]


class Kept(NamedTuple):
    """Kept parts as ascending indices. ``groups`` and ``intermediate``: per kept layer, all of equal length."""

    layers: tuple[int, ...]
    hidden: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    intermediate: tuple[tuple[int, ...], ...]

    def masks(self, sizes: Sizes) -> Masks:
        """The masks of the whole model. All parts of removed layers are 0."""
        masks = uniform_masks(sizes, 0.0)
        masks.layers[list(self.layers)] = 1.0
        masks.hidden[list(self.hidden)] = 1.0
        for layer, groups, inner in zip(self.layers, self.groups, self.intermediate, strict=True):
            masks.groups[layer, list(groups)] = 1.0
            masks.intermediate[layer, list(inner)] = 1.0
        return masks


def uniform_masks(sizes: Sizes, value: float = 1.0) -> Masks:
    """Masks with the same value everywhere."""
    layers = sizes.layers
    shapes = ((layers,), (sizes.hidden,), (layers, sizes.groups), (layers, sizes.intermediate))
    return Masks(*(torch.full(shape, value) for shape in shapes))


def top_parts(scores: Masks, wanted: Sizes) -> Kept:
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


@final
class PruningMasks(nn.Module):
    """Hard-concrete masks; ``places`` are the gates' logits (location parameters)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        opened = uniform_masks(sizes, _OPEN)._asdict()
        self.places = nn.ParameterDict({name: nn.Parameter(place) for name, place in opened.items()})

    def sample(self, generator: torch.Generator) -> Masks:
        """Sample masks, differentiable with respect to ``places``."""
        found = {}
        for name, place in self.places.items():
            u = torch.rand(place.shape, generator=generator, device=place.device).clamp(1e-6, 1 - 1e-6)
            found[name] = _stretched((u.logit() + place) / _BETA)
        return Masks(**found)

    def kept(self, wanted: Sizes) -> Kept:
        """The most probable parts, of these sizes."""
        return top_parts(Masks(**dict(self.places.items())), wanted)

    def shares(self) -> Shares:
        """The expected fraction of non-zero gates."""
        shift = _BETA * math.log(-_LOW / _HIGH)
        return Shares(**{name: torch.sigmoid(place - shift).mean(-1) for name, place in self.places.items()})


@final
class Lagrange(nn.Module):
    """Lagrange multipliers that drive the masks' expected sizes to the wanted ones.

    Groups and MLP dimensions are constrained per layer, so they have multipliers for every layer. This includes removed
    layers, whose parts do not matter.
    """

    def __init__(self, sizes: Sizes, wanted: Sizes) -> None:
        super().__init__()
        rows = {name: mask.shape[:-1] for name, mask in uniform_masks(sizes)._asdict().items()}
        self.linear = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in rows.items()})
        self.square = nn.ParameterDict({name: nn.Parameter(torch.full(shape, _PHI)) for name, shape in rows.items()})
        self._shares = {name: getattr(wanted, name) / getattr(sizes, name) for name in rows}

    def penalty(self, shares: Shares, progress: float) -> Float[Tensor, ""]:
        """Sum of lambda d + phi d^2, where d is the open fraction minus the scheduled one.

        The gates minimise the penalty and the multipliers maximise it, so their gradients are negated.

        Args:
            progress: of the schedule from the full model (0) to the wanted sizes (1).
        """
        total = torch.zeros((), device=shares.hidden.device)
        for name, now in shares._asdict().items():
            excess = now - (1 - progress * (1 - self._shares[name]))
            linear, square = _negate_gradient(self.linear[name]), _negate_gradient(self.square[name])
            total = total + (linear * excess + square * excess.square()).sum()
        return total


def _stretched(logits: Tensor) -> Tensor:
    return (torch.sigmoid(logits) * (_HIGH - _LOW) + _LOW).clamp(0.0, 1.0)


def _negate_gradient(value: Tensor) -> Tensor:
    """The same value with a negated gradient, so that gradient descent maximises."""
    return 2 * value.detach() - value
