"""Recipes: a net, the hidden states that it needs, and a loss."""

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
class TrainBatch:
    """Training windows with the target's hidden states.

    ``weights[b, j]``: loss weight of the token *after* position j: 1, or 0 if it is not to be learned (a user's turn).
    ``hidden``: the target's states by tap. ``seed``: for the recipe's random numbers. ``step``: optimizer steps
    before this one. ``progress``: fraction of the training that is done.
    """

    tokens: Int[Tensor, "B T"]
    weights: Float[Tensor, "B T"]
    hidden: Mapping[int, Float[Tensor, "B T H"]]
    seed: int
    step: int = 0
    progress: float = 1.0

    def rng(self) -> torch.Generator:
        """A generator that depends only on the seed, so that a resumed run draws the same numbers."""
        return torch.Generator(device=self.tokens.device).manual_seed(self.seed)


class Recipe(nn.Module, ABC, Generic[Net]):
    """A net and its loss in one module, so that data-parallel wrappers see one forward. Subclasses are final.

    ``taps``: the target's hidden layers that a batch must have. ``net``: the module to train and save. ``paces``:
    learning rate factors of the net's children, by name; 1 by default. ``lr``: the peak unless another is given.
    """

    taps: tuple[int, ...]
    net: Net
    lr: float = 1e-3
    paces: Mapping[str, float] = MappingProxyType({})

    @abstractmethod
    def forward(self, batch: TrainBatch) -> dict[str, Tensor]:
        """Scalars: the loss under ``loss``, and detached metrics for the log."""


def recompute(enabled: bool, function, *inputs):
    """Call a function of tensors; if enabled, recompute its activations in the backward pass (checkpointing)."""
    if enabled and torch.is_grad_enabled():
        return checkpoint(function, *inputs, use_reentrant=False)
    return function(*inputs)
