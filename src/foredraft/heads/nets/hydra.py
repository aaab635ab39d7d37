"""Hydra heads (Ankner et al., arXiv:2402.05109): Medusa-like heads that also read the drafted tokens before theirs."""

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from foredraft.core.target_parts import TargetParts
from foredraft.heads.nets.blocks import Attend, Block, BlockConfig, Rotary
from foredraft.heads.nets.ttt_attention import Unrolled


@dataclass(frozen=True, slots=True, kw_only=True)
class HydraConfig:
    """Config of Hydra heads.

    ``prefix``: Hydra++'s decoder layer over the target's states, before the heads; None for Hydra. ``own_heads``: each
    head has its own output layer with a bias; otherwise they share the target's. ``accuracies[i][r]``: measured
    accuracy of head i's token of rank r, if known.
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
    """A first layer from (i + 2) H to H with a linear shortcut, then one residual block applied ``layers - 1`` times.

    The published code repeats one module for the further layers.
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


class PrefixLayer(nn.Module):
    """Hydra++'s prefix layer: a decoder block over the target's states, then a norm."""

    def __init__(self, config: BlockConfig, rotary: Rotary) -> None:
        super().__init__()
        self.config = config
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
    """Head i (from 0) reads h_t and the embeddings of tokens t + 1, ..., t + 1 + i, and predicts token t + 2 + i."""

    def __init__(self, config: HydraConfig, rotary: Rotary | None, target: TargetParts) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        if config.prefix is not None and rotary is None:
            raise ValueError("a prefix layer needs rotary positions")
        self.prefix = PrefixLayer(config.prefix, rotary) if config.prefix and rotary else None
        self.mlps = nn.ModuleList(HydraMlp((i + 2) * width, width, config.num_layers) for i in range(config.num_heads))
        self.own_output = config.own_heads
        own = config.num_heads if config.own_heads else 0
        self.heads = nn.ModuleList(nn.Linear(width, config.vocab_size) for _ in range(own))
        self.dropout = nn.Dropout(config.dropout)
        self.target = target

    def prefixed(self, hidden: Float[Tensor, "B N H"]) -> Float[Tensor, "B N H"]:
        """What the heads read: the target's states at positions 0 to N - 1, or of Hydra++'s prefix layer over them."""
        if self.prefix is None:
            return hidden
        positions = torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape[0], -1)
        return self.prefix(hidden, positions, Unrolled(positions).first)

    def logits(self, hidden: Float[Tensor, "B N H"], tokens: Int[Tensor, "B N K"], head: int) -> Float[Tensor, "B N V"]:
        """Logits of head ``head`` after K = head + 1 tokens: the target's token, then drafted ones."""
        embedded = self.target.embed(tokens).flatten(2)
        x = torch.cat([hidden.to(embedded.dtype), embedded], dim=-1)
        x = self.mlps[head](self.dropout(x))
        return self.heads[head](self.dropout(x)) if self.config.own_heads else self.target.head(x)
