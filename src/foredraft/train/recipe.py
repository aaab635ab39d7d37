"""What a recipe is: a net, what it wants to be told of a text, and a loss."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Net = TypeVar("Net", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Lesson:
    """Some texts as the target has read them.

    ``weights[b, j]`` is what the token *after* row j counts in the loss: 1 or, where it is none of the model's words
    (a user's turn), 0. ``hidden`` are the target's states by tap. ``seed`` is for whatever a recipe leaves to chance.
    ``done`` is the share of the training that lies behind.
    """

    tokens: Int[Tensor, "B T"]
    weights: Float[Tensor, "B T"]
    hidden: Mapping[int, Float[Tensor, "B T H"]]
    seed: int
    done: float = 1.0

    def chance(self) -> torch.Generator:
        """Random numbers that depend on the seed alone, so that a resumed run draws the same."""
        return torch.Generator(device=self.tokens.device).manual_seed(self.seed)


class Recipe(nn.Module, ABC, Generic[Net]):
    """A net with its loss, as one module, so that data-parallel wrappers see one forward. Subclasses are final.

    ``taps``: the target's hidden layers that a lesson must hold. ``net``: what is trained and saved. ``paces``: parts
    of the net, by name, that learn at a share of the learning rate.
    """

    taps: tuple[int, ...]
    net: Net
    paces: Mapping[str, float] = MappingProxyType({})

    @abstractmethod
    def forward(self, lesson: Lesson) -> dict[str, Tensor]:
        """The loss, a scalar under ``loss``, and whatever else is worth logging, detached scalars."""


def recompute(enabled: bool, function, *inputs):
    """Call a function of tensors; if enabled, keep none of what it computes for the backward pass: it runs again."""
    if enabled and torch.is_grad_enabled():
        return checkpoint(function, *inputs, use_reentrant=False)
    return function(*inputs)
