"""Medusa heads (Cai et al., arXiv:2401.10774) and blockwise parallel decoding (Stern et al., arXiv:1811.03115).

Both read the target's last hidden state and predict several future tokens, each independently of the others.
"""

from dataclasses import dataclass
from typing import final

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from foredraft.core.target_parts import TargetParts


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """Config of Medusa heads.

    ``own_heads``: each head has its own output layer; otherwise they share the target's. ``accuracies[i][r]``:
    measured accuracy of head i's token of rank r, if known. ``num_layers``: how often a head's single residual block is
    applied (the published code repeats one module).
    """

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1
    own_heads: bool = True
    accuracies: tuple[tuple[float, ...], ...] | None = None


class ResBlock(nn.Module):
    """x + SiLU(W x + b). W and b are initialised to zero, so it starts as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Float[Tensor, "B N H"]) -> Float[Tensor, "B N H"]:
        return x + F.silu(self.linear(x))


@final
class Medusa(nn.Module):
    """Head i (from 0) reads the target's state h_t, after its final norm, and predicts token t + 2 + i.

    ``own_output``: it does not use the target's output layer.
    """

    def __init__(self, config: MedusaConfig, target: TargetParts) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.blocks = nn.ModuleList(ResBlock(width) for _ in range(config.num_heads))
        self.own_output = config.own_heads
        own = config.num_heads if config.own_heads else 0
        self.heads = nn.ModuleList(nn.Linear(width, config.vocab_size, bias=False) for _ in range(own))
        self.target = target

    def logits(self, hidden: Float[Tensor, "B N H"], head: int) -> Float[Tensor, "B N V"]:
        for _ in range(self.config.num_layers):
            hidden = self.blocks[head](hidden)
        return self.heads[head](hidden) if self.config.own_heads else self.target.head(hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockwiseConfig:
    """Config of blockwise heads. ``inner_size``: width of each head's hidden layer."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    inner_size: int


@final
class Blockwise(nn.Module):
    """A residual feed-forward layer per head, then the target's output layer (section 4).

    The paper's single hidden layer of ``num_heads`` times ``inner_size`` units is split by head. Head i (from 0)
    predicts token t + 2 + i; the paper's p_1 is the target itself.
    """

    own_output = False

    def __init__(self, config: BlockwiseConfig, target: TargetParts) -> None:
        super().__init__()
        self.config = config
        self.inner = nn.ModuleList(nn.Linear(config.hidden_size, config.inner_size) for _ in range(config.num_heads))
        self.outer = nn.ModuleList(nn.Linear(config.inner_size, config.hidden_size) for _ in range(config.num_heads))
        for layer in self.outer:
            nn.init.zeros_(layer.weight)  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        self.target = target

    def logits(self, hidden: Float[Tensor, "B N H"], head: int) -> Float[Tensor, "B N V"]:
        return self.target.head(hidden + self.outer[head](F.relu(self.inner[head](hidden))))
