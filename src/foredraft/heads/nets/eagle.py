"""EAGLE heads: a small decoder layer over the target's features.

Row j reads the target's feature f_j and the next token t_{j+1}, and predicts t_{j+2}. At drafted positions the head's
own previous state replaces the feature. Li et al., arXiv:2401.15077 (EAGLE-1; EAGLE-2, arXiv:2406.16858, has the same
weights) and arXiv:2503.01840 (EAGLE-3).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from foredraft.core.target_parts import FINAL, TargetParts
from foredraft.heads.nets.blocks import Attend, Attention, Block, BlockConfig, Mlp, Rotary


class EagleNet(nn.Module, ABC):
    """The interface of EAGLE heads for drafters and training recipes.

    ``taps``: the target's hidden layers that it reads (numbers of decoder layers, or ``FINAL``). ``depth``: its number
    of layers. ``window``: how many positions these attend to; None for all. ``vocabulary``: the target ids of its
    vocabulary, ascending; None for all. ``own_output``: it does not use the target's output layer.
    """

    taps: tuple[int, ...]
    depth: int
    window: int | None
    vocabulary: Tensor | None
    target: TargetParts
    rotary: Rotary
    own_output: bool = False

    @abstractmethod
    def features(self, hidden: Mapping[int, Float[Tensor, "B N T"]]) -> Float[Tensor, "B N F"]:
        """The head's input features, from the target's hidden states."""

    @abstractmethod
    def forward(
        self,
        tokens: Int[Tensor, "B N"],
        features: Float[Tensor, "B N F"],
        positions: Int[Tensor, "B N"],
        attend: Attend,
    ) -> Float[Tensor, "B N H"]:
        """The states of N rows. ``positions`` are those of the features: the tokens' positions minus one."""

    @abstractmethod
    def logits(self, states: Float[Tensor, "B N H"]) -> Float[Tensor, "B N v"]:
        """Logits of the token after each row's token, over the draft vocabulary."""

    @abstractmethod
    def carry(self, states: Float[Tensor, "B N H"]) -> Float[Tensor, "B N F"]:
        """The features of the next rows at drafted positions, from the head's own states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """Config of EAGLE-1 and EAGLE-2 heads."""

    block: BlockConfig
    num_layers: int = 1
    fc_bias: bool = True


@final
class Eagle(EagleNet):
    """EAGLE-1 and EAGLE-2: predicts the target's next feature; the target's output layer turns it into logits.

    The layers read ``fc(cat(embedding, feature))``. The first layer has no input norm. There is no final norm, since
    the feature is the target's state after its final norm.
    """

    taps = (FINAL,)

    def __init__(self, config: EagleConfig, rotary: Rotary, target: TargetParts) -> None:
        super().__init__()
        self.config = config
        self.depth = config.num_layers
        self.window = config.block.sliding_window
        self.vocabulary = None
        width = config.block.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=config.fc_bias)
        self.layers = nn.ModuleList(Block(config.block, normed_input=i > 0) for i in range(config.num_layers))
        self.rotary = rotary
        self.target = target

    def features(self, hidden: Mapping[int, Float[Tensor, "B N T"]]) -> Float[Tensor, "B N F"]:
        return hidden[FINAL]

    def forward(
        self,
        tokens: Int[Tensor, "B N"],
        features: Float[Tensor, "B N F"],
        positions: Int[Tensor, "B N"],
        attend: Attend,
    ) -> Float[Tensor, "B N H"]:
        embedded = self.target.embed(tokens)
        x = self.fc(torch.cat([embedded, features.to(embedded.dtype)], dim=-1))
        turn = self.rotary(positions)
        for i, layer in enumerate(self.layers):
            x = layer(x, turn, i, attend)
        return x

    def logits(self, states: Float[Tensor, "B N H"]) -> Float[Tensor, "B N v"]:
        return self.target.head(states)

    def carry(self, states: Float[Tensor, "B N H"]) -> Float[Tensor, "B N F"]:
        return states


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """Config of EAGLE-3 heads, covering all published variants.

    taps: the target's hidden layers, ascending, as numbers of decoder layers.
    norm_before_residual: the residual is taken after ``hidden_norm``, not before.
    norm_before_fc: one norm over the concatenated features; ``fc_norm``: one norm for each of them.
    norm_carried: drafted positions read the state after the final norm, as the output layer does (``norm_output``).
    own_embedding: the head has its own embedding instead of the target's.
    own_head: the head has its own output layer instead of the target's.
    """

    block: BlockConfig
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    taps: tuple[int, ...]
    num_layers: int = 1
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_carried: bool = False
    own_embedding: bool = False
    own_head: bool = True


class MidLayer(nn.Module):
    """EAGLE-3's first layer: attention reads embedding and feature concatenated, each with its own norm."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        width, eps = config.block.hidden_size, config.block.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.self_attn = Attention(config.block, 2 * width)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)
        self.mlp = Mlp(config.block)

    def forward(
        self, embedded: Float[Tensor, "B N H"], x: Float[Tensor, "B N H"], turn: tuple[Tensor, Tensor], attend: Attend
    ) -> Float[Tensor, "B N H"]:
        normed = self.hidden_norm(x)
        residual = normed if self.norm_before_residual else x
        both = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        x = residual + self.self_attn(both, turn, 0, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


@final
class Eagle3(EagleNet):
    """EAGLE-3: fuses several of the target's layers, and predicts tokens instead of features."""

    def __init__(self, config: Eagle3Config, rotary: Rotary, target: TargetParts) -> None:
        super().__init__()
        self.config = config
        self.taps = config.taps
        self.depth = config.num_layers
        self.window = config.block.sliding_window
        width, eps = config.block.hidden_size, config.block.rms_norm_eps
        fused = len(config.taps) * config.target_hidden_size
        self.input_norm = nn.RMSNorm(fused, eps=eps) if config.norm_before_fc else nn.Identity()
        norms = len(config.taps) if config.fc_norm else 0
        self.fc_norm = nn.ModuleList(nn.RMSNorm(config.target_hidden_size, eps=eps) for _ in range(norms))
        self.fc = nn.Linear(fused, width, bias=config.fc_bias)
        self.midlayer = MidLayer(config)
        self.layers = nn.ModuleList(Block(config.block) for _ in range(config.num_layers - 1))
        self.norm = nn.RMSNorm(width, eps=eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None
        self.own_output = config.own_head
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False) if config.own_head else None
        self.vocabulary: Tensor | None
        reduced = config.draft_vocab_size < config.vocab_size
        ids = torch.from_numpy(np.arange(config.draft_vocab_size)) if reduced else None  # torch's on meta imports sympy
        self.register_buffer("vocabulary", ids, persistent=False)
        self.rotary = rotary
        self.target = target

    @property
    def fuses_linearly(self) -> bool:
        """Whether features are a product of the layers next to each other, without norms."""
        return not self.config.norm_before_fc and not self.config.fc_norm

    def features(self, hidden: Mapping[int, Float[Tensor, "B N T"]]) -> Float[Tensor, "B N F"]:
        layers = [hidden[tap] for tap in self.taps]
        if self.fc_norm:
            layers = [norm(layer) for norm, layer in zip(self.fc_norm, layers, strict=True)]
        fused = torch.cat(layers, dim=-1).to(self.norm.weight.dtype)
        return self.fc(self.input_norm(fused) if self.config.norm_before_fc else fused)

    def forward(
        self,
        tokens: Int[Tensor, "B N"],
        features: Float[Tensor, "B N F"],
        positions: Int[Tensor, "B N"],
        attend: Attend,
    ) -> Float[Tensor, "B N H"]:
        embedded = self.target.embed(tokens) if self.embed_tokens is None else self.embed_tokens(tokens)
        turn = self.rotary(positions)
        x = self.midlayer(embedded, features, turn, attend)
        for i, layer in enumerate(self.layers, start=1):
            x = layer(x, turn, i, attend)
        return x

    def logits(self, states: Float[Tensor, "B N H"]) -> Float[Tensor, "B N v"]:
        head = self.target.head if self.lm_head is None else self.lm_head
        return head(self.norm(states))

    def carry(self, states: Float[Tensor, "B N H"]) -> Float[Tensor, "B N F"]:
        return self.norm(states) if self.config.norm_carried else states
