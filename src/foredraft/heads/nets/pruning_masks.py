"""Which parts of a transformer are kept: masks over its layers, key-value groups, inner and hidden dimensions.

Gates learn the masks as hard-concrete variables (Louizos et al., arXiv:1712.01312) that Lagrange terms drive to a given
size (Sheared-LLaMA, arXiv:2310.06694, section 2.1).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

_SHARP = 2 / 3  # beta of the hard-concrete law: the smaller, the nearer to 0 and 1
_LOW, _HIGH = -0.1, 1.1  # a sigmoid is stretched to these and cut to 0..1, so that both ends have mass
_STIFF = 10.0  # where phi begins: with 0, as in the paper, short runs swing about the wanted size
_OPEN = 4.0  # where gates begin: kept with a probability of 0.99 or more


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a transformer is made of. ``heads`` are query heads, ``groups`` the key-value heads that they share."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    groups: int


class Masks(NamedTuple):
    """Factors, 1 for what is kept and 0 for what is not; learned ones may lie between."""

    layers: Float[Tensor, "L"]
    hidden: Float[Tensor, "H"]
    groups: Float[Tensor, "L G"]
    intermediate: Float[Tensor, "L I"]


class Shares(NamedTuple):
    """How much is open, from 0 to 1; of groups and inner dimensions, by layer."""

    layers: Float[Tensor, ""]
    hidden: Float[Tensor, ""]
    groups: Float[Tensor, "L"]
    intermediate: Float[Tensor, "L"]


class Kept(NamedTuple):
    """What is kept, as rising indices. ``groups`` and ``intermediate`` are by kept layer, all of equal length."""

    layers: tuple[int, ...]
    hidden: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    intermediate: tuple[tuple[int, ...], ...]

    def masks(self, sizes: Sizes) -> Masks:
        """As factors for the whole model. Of layers that go, nothing is kept."""
        masks = whole(sizes, 0.0)
        masks.layers[list(self.layers)] = 1.0
        masks.hidden[list(self.hidden)] = 1.0
        for layer, groups, inner in zip(self.layers, self.groups, self.intermediate, strict=True):
            masks.groups[layer, list(groups)] = 1.0
            masks.intermediate[layer, list(inner)] = 1.0
        return masks


def whole(sizes: Sizes, value: float = 1.0) -> Masks:
    """Every factor with this value."""
    layers = sizes.layers
    shapes = ((layers,), (sizes.hidden,), (layers, sizes.groups), (layers, sizes.intermediate))
    return Masks(*(torch.full(shape, value) for shape in shapes))


def best(scores: Masks, wanted: Sizes) -> Kept:
    """The parts with the highest scores, exactly as many as are wanted; in each layer as many as in every other."""
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
    """Hard-concrete masks; a gate's place is the logit of its law before it is stretched."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        opened = whole(sizes, _OPEN)._asdict()
        self.places = nn.ParameterDict({name: nn.Parameter(place) for name, place in opened.items()})

    def drawn(self, chance: torch.Generator) -> Masks:
        """Masks drawn from their laws; gradients reach the places of the gates through them."""
        found = {}
        for name, place in self.places.items():
            u = torch.rand(place.shape, generator=chance, device=place.device).clamp(1e-6, 1 - 1e-6)
            found[name] = _stretched((u.logit() + place) / _SHARP)
        return Masks(**found)

    def kept(self, wanted: Sizes) -> Kept:
        """The likeliest parts, of these sizes."""
        return best(Masks(**dict(self.places.items())), wanted)

    def shares(self) -> Shares:
        """The expected share of gates that are not shut."""
        shift = _SHARP * math.log(-_LOW / _HIGH)
        return Shares(**{name: torch.sigmoid(place - shift).mean(-1) for name, place in self.places.items()})


@final
class Lagrange(nn.Module):
    """Multipliers that hold the expected sizes of gates to what is wanted.

    Groups and inner dimensions are held to their number layer by layer, so each has multipliers for every layer. A
    layer that goes is held as well, at no cost: nothing of it counts.
    """

    def __init__(self, sizes: Sizes, wanted: Sizes) -> None:
        super().__init__()
        rows = {name: mask.shape[:-1] for name, mask in whole(sizes)._asdict().items()}
        self.linear = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in rows.items()})
        self.square = nn.ParameterDict({name: nn.Parameter(torch.full(shape, _STIFF)) for name, shape in rows.items()})
        self._shares = {name: getattr(wanted, name) / getattr(sizes, name) for name in rows}

    def price(self, shares: Shares, due: float) -> Float[Tensor, ""]:
        """Sum of lambda d + phi d^2, with d what is open beyond what should be by now, as a share of the whole.

        The gates go down this price and the multipliers up: their gradients come with the sign turned.

        Args:
            due: how much of the way from the whole model to the wanted sizes, from 0 to 1.
        """
        total = torch.zeros((), device=shares.hidden.device)
        for name, now in shares._asdict().items():
            beyond = now - (1 - due * (1 - self._shares[name]))
            total = total + (_turned(self.linear[name]) * beyond + _turned(self.square[name]) * beyond.square()).sum()
        return total


def _stretched(logits: Tensor) -> Tensor:
    return (torch.sigmoid(logits) * (_HIGH - _LOW) + _LOW).clamp(0.0, 1.0)


def _turned(value: Tensor) -> Tensor:
    """The same value with the opposite gradient: a descent in it is an ascent."""
    return 2 * value.detach() - value
