"""Learned pruning: masks as hard-concrete variables (Louizos et al., arXiv:1712.01312), driven to given sizes by
Lagrange terms (Sheared-LLaMA, arXiv:2310.06694, section 2.1)."""

import copy
import math
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from foredraft.model.hf.head_parts import parts_of
from foredraft.model.hf.pruned_parts import Kept, Masks, TransformerSizes, top_parts, uniform_masks
from foredraft.model.hf.pruning import Masking, sizes_of
from foredraft.model.hf.taps import body
from foredraft.train.drafts.distil import Teacher
from foredraft.train.recipe import Recipe, TrainBatch

_PACE = 100.0  # learning rate factor of the multipliers, which must match a loss of any scale
_BETA = 2 / 3  # beta of the hard-concrete law: smaller values are closer to binary
_LOW, _HIGH = -0.1, 1.1  # a sigmoid is stretched to this range and clipped to 0..1, so 0 and 1 have positive mass
_PHI = 10.0  # initial phi; with the paper's 0, short runs oscillate around the wanted size
_OPEN = 4.0  # initial gate logits: kept with a probability of at least 0.99


class Shares(NamedTuple):
    """Expected fractions of open gates; by layer for groups and MLP dimensions."""

    layers: Float[Tensor, ""]
    hidden: Float[Tensor, ""]
    groups: Float[Tensor, "L"]
    intermediate: Float[Tensor, "L"]


@final
class PruningMasks(nn.Module):
    """Hard-concrete masks; ``places`` are the gates' logits (location parameters)."""

    def __init__(self, sizes: TransformerSizes) -> None:
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

    def kept(self, wanted: TransformerSizes) -> Kept:
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

    def __init__(self, sizes: TransformerSizes, wanted: TransformerSizes) -> None:
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


@final
class Masked(nn.Module):
    """Pruning masks for a model, frozen or trained with them.

    Args:
        model: may be the target's own.
        tuned: train the weights too, in a copy.
    """

    def __init__(self, model: Any, wanted: TransformerSizes, tuned: bool) -> None:
        super().__init__()
        self.gates = PruningMasks(sizes_of(model))
        self.lagrange = Lagrange(sizes_of(model), wanted)
        self.wanted = wanted
        if tuned:
            self.model = copy.deepcopy(model).requires_grad_(True)
        self._whole = (self.model if tuned else model.requires_grad_(False),)  # a tuple, so that it is not a submodule

    @property
    def whole(self) -> Any:
        """The unpruned model."""
        return self._whole[0]

    def states(self, tokens: Tensor, masks: Masks) -> Tensor:
        """Input of the output layer [B, T, H] under these masks."""
        model = self.whole
        model.eval()
        with Masking(model, masks):
            return body(model)(input_ids=tokens, use_cache=False)[0]


@final
class MaskRecipe(Recipe[Masked]):
    """Distillation through masks drawn at each step, with a linear schedule to the target size.

    Args:
        rise: fraction of the steps after which the full reduction is required.
        tune: the weights' learning rate as a fraction of the masks'.
    """

    def __init__(self, net: Masked, teacher: Teacher, rise: float, tune: float) -> None:
        super().__init__()
        self.taps = teacher.taps
        self.net = net
        self.paces = {"lagrange": _PACE, "model": tune}
        self._teacher = teacher
        self._rise = rise
        self._head = parts_of(net.whole).head

    def forward(self, batch: TrainBatch) -> dict[str, Tensor]:
        gates = self.net.gates
        masks = gates.sample(batch.rng()) if self.training else self._final(batch.tokens)
        metrics = self._teacher(batch, self.net.states(batch.tokens, masks), self._head)
        shares = gates.shares()
        price = self.net.lagrange.penalty(shares, min(1.0, batch.progress / self._rise))
        opened = {f"open_{name}": share.detach().mean() for name, share in shares._asdict().items()}
        return {**metrics, "loss": metrics["loss"] + price, "distil": metrics["loss"].detach(), **opened}

    def _final(self, tokens: Tensor) -> Masks:
        """The binary masks of the final cut."""
        masks = self.net.gates.kept(self.net.wanted).masks(sizes_of(self.net.whole))
        return Masks(*(mask.to(tokens.device) for mask in masks))
