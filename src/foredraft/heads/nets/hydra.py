"""Hydra heads (Ankner et al., arXiv:2402.05109): like Medusa's, but each head knows the tokens drafted before it."""

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from foredraft.heads.nets.blocks import Attend, Block, BlockConfig, Rotary
from foredraft.heads.nets.target_parts import TargetParts


@dataclass(frozen=True, slots=True, kw_only=True)
class HydraConfig:
    """``prefix``: Hydra++'s layer, which goes over the target's states before the heads read them; None for Hydra.

    ``own_heads``: each head has an output layer of its own, with a bias; otherwise they share the target's.
    ``accuracies[i][r]``: how often head i's token of rank r was right when it was measured, if it was.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1
    prefix: BlockConfig | None = None
    own_heads: bool = True
    dropout: float = 0.0
    accuracies: tuple[tuple[float, ...], ...] | None = None


class HydraMlp(nn.Module):
    """The first layer takes (i + 2) H to H with a linear shortcut; then one residual block is applied again and again.

    That the further layers are one module is how the published code has it.
    """

    def __init__(self, inputs: int, width: int, layers: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, width)
        self.res_connection = nn.Linear(inputs, width)
        self.block = nn.Linear(width, width) if layers > 1 else None
        self.repeats = layers - 1

    def forward(self, x: Float[Tensor, "B N I"]) -> Float[Tensor, "B N H"]:
        x = self.res_connection(x) + F.silu(self.linear(x))
        if self.block is not None:
            for _ in range(self.repeats):
                x = x + F.silu(self.block(x))
        return x


class Prefix(nn.Module):
    """Hydra++'s prefix layer: a decoder block over the target's states, then a norm."""

    def __init__(self, config: BlockConfig, rotary: Rotary) -> None:
        super().__init__()
        self.layer = Block(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = rotary
        self.window = config.sliding_window

    def forward(
        self, hidden: Float[Tensor, "B N H"], positions: Int[Tensor, "B N"], attend: Attend
    ) -> Float[Tensor, "B N H"]:
        return self.norm(self.layer(hidden, self.rotary(positions), 0, attend))


@final
class Hydra(nn.Module):
    """Head i (from 0) reads h_t and the embeddings of t + 1, ..., t + 1 + i, and says token t + 2 + i."""

    def __init__(self, config: HydraConfig, rotary: Rotary | None, target: TargetParts) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        if config.prefix is not None and rotary is None:
            raise ValueError("a prefix layer needs rotary positions")
        self.prefix = Prefix(config.prefix, rotary) if config.prefix and rotary else None
        self.mlps = nn.ModuleList(HydraMlp((i + 2) * width, width, config.num_layers) for i in range(config.num_heads))
        own = config.num_heads if config.own_heads else 0
        self.heads = nn.ModuleList(nn.Linear(width, config.vocab_size) for _ in range(own))
        self.dropout = nn.Dropout(config.dropout)
        self.target = target

    @property
    def count(self) -> int:
        return self.config.num_heads

    def logits(self, hidden: Float[Tensor, "B N H"], tokens: Int[Tensor, "B N K"], head: int) -> Float[Tensor, "B N V"]:
        """Scores of head ``head`` after K = head + 1 tokens: the first is what the target said, the others drafts."""
        embedded = self.target.embed(tokens).flatten(2)
        x = torch.cat([hidden.to(embedded.dtype), embedded], dim=-1)
        x = self.mlps[head](self.dropout(x))
        return self.heads[head](self.dropout(x)) if self.config.own_heads else self.target.head(x)
