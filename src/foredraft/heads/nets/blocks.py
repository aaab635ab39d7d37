"""Building blocks of heads: rotary embeddings, and a Llama-like decoder block with attention as an argument.

Attention is an argument because it differs: over cache slots when drafting, causal or unrolled when training.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, query [B, heads, N, E], key [B, groups, N, E], value [B, groups, N, E]) -> [B, N, heads, E]``.

Query and key are already rotated; the number of groups divides the number of heads.
"""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """The config of a decoder block, with transformers' field names.

    ``rope_scaling``: transformers' dict without the base; None for default rotary embeddings. ``sliding_window``: how
    many tokens a row attends to, itself included; None for all.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None


_TABLE_GRAIN, _LONGEST_TABLE = 1024, 65536


class Rotary(nn.Module):
    """Rotary embeddings (Su et al., arXiv:2104.09864), with halves rotated as in Llama.

    Sines of the first half are negative, as ``rotate`` takes them.

    Args:
        frequencies: [E / 2], radians per position.
        scale: factor on cosines and sines, used by some long-context schemes.
    """

    def __init__(self, frequencies: Float[Tensor, "E"], scale: float = 1.0) -> None:
        super().__init__()
        self.frequencies: Tensor
        self.register_buffer("frequencies", frequencies.float(), persistent=False)
        self.scale = scale
        self._table: Tensor | None = None  # [L, 2, E]: cosines and sines
        self._version = 0

    def reserve(self, length: int) -> int:
        """Precompute a table for positions below ``length``; return a number that grows when the table changes."""
        have = 0 if self._table is None else self._table.shape[0]
        if have < length <= _LONGEST_TABLE:
            size = -(-length // _TABLE_GRAIN) * _TABLE_GRAIN
            with torch.inference_mode(False), torch.no_grad():  # compilers reject tensors of inference mode
                cos, sin = self._computed(torch.arange(size, device=self.frequencies.device)[None])
                self._table = torch.stack([cos[0, 0], sin[0, 0]], 1)
            self._version += 1
        elif length > _LONGEST_TABLE and have:
            self._table = None
            self._version += 1
        return self._version

    def forward(self, positions: Int[Tensor, "B N"]) -> tuple[Float[Tensor, "B 1 N E"], Float[Tensor, "B 1 N E"]]:
        if self._table is None:
            return self._computed(positions)
        cos, sin = self._table[positions].unsqueeze(1).unbind(3)
        return cos, sin

    def _computed(self, positions: Int[Tensor, "B N"]) -> tuple[Float[Tensor, "B 1 N E"], Float[Tensor, "B 1 N E"]]:
        with torch.autocast(positions.device.type, enabled=False):
            angles = positions[:, None, :, None].to(self.frequencies.dtype) * self.frequencies
            angles = torch.cat([-angles, angles], dim=-1)
            return angles.cos() * self.scale, angles.sin() * self.scale


def rotate(x: Float[Tensor, "B h N E"], cos: Float[Tensor, "B 1 N E"], sin: Float[Tensor, "B 1 N E"]) -> Tensor:
    """Rotate each pair (i, i + E/2) of x by its angle; ``cos`` and ``sin`` are those of ``Rotary``."""
    left, right = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat([right, left], dim=-1), sin).to(x.dtype)


def concatenated(*layers: nn.Linear) -> nn.Linear:
    """One linear layer with the concatenated outputs of several."""
    first = layers[0]
    outputs = sum(layer.out_features for layer in layers)
    fused = nn.Linear(first.in_features, outputs, first.bias is not None, first.weight.device, first.weight.dtype)
    fused.requires_grad_(False)
    fused.weight.copy_(torch.cat([layer.weight for layer in layers]))
    if first.bias is not None:
        fused.bias.copy_(torch.cat([layer.bias for layer in layers]))
    return fused


def fuse(net: nn.Module) -> None:
    """Fuse the projections of all attention and MLP layers of a net, which can then not be trained or saved."""
    for module in net.modules():
        if isinstance(module, (Attention, Mlp)):
            module.fuse()


class Attention(nn.Module):
    """The projections of an attention layer. ``inputs``: input width of q, k and v."""

    def __init__(self, config: BlockConfig, inputs: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(inputs, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(inputs, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(inputs, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.output_bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
        self.fused: nn.Linear | None = None

    def fuse(self) -> None:
        """Replace the q, k and v projections by one, for drafting."""
        self.fused = concatenated(self.q_proj, self.k_proj, self.v_proj)
        del self.q_proj, self.k_proj, self.v_proj

    def _projected(self, x: Float[Tensor, "B N I"]) -> tuple[Float[Tensor, "B N h E"], Float[Tensor, "B N g E"]]:
        """Queries and keys, one after the other, and values."""
        queries, keys, values = self.heads
        if self.fused is None:
            projections = (self.q_proj, self.k_proj, self.v_proj)
            query, key, value = (projection(x).unflatten(-1, (-1, self.head_dim)) for projection in projections)
        else:
            both, value = self.fused(x).unflatten(-1, (-1, self.head_dim)).split((queries + keys, values), dim=2)
            if isinstance(self.q_norm, nn.Identity):
                return both, value
            query, key = both.split((queries, keys), dim=2)
        return torch.cat([self.q_norm(query), self.k_norm(key)], 2), value

    def forward(
        self, x: Float[Tensor, "B N I"], turn: tuple[Tensor, Tensor], layer: int, attend: Attend
    ) -> Float[Tensor, "B N H"]:
        both, value = self._projected(x)
        query, key = rotate(both.transpose(1, 2), *turn).split(self.heads[:2], dim=1)
        output = attend(layer, query, key, value.transpose(1, 2))
        return self.o_proj(output.flatten(2))


class Mlp(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(width, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, width, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.fused: nn.Linear | None = None

    def fuse(self) -> None:
        """Replace the gate and up projections by one, for drafting."""
        self.fused = concatenated(self.gate_proj, self.up_proj)
        del self.gate_proj, self.up_proj

    def forward(self, x: Float[Tensor, "B N H"]) -> Float[Tensor, "B N H"]:
        if self.fused is not None:
            gate, up = self.fused(x).chunk(2, dim=-1)
            return self.down_proj(self.activation(gate) * up)
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A pre-norm decoder block. ``normed_input=False`` omits the first norm, as in EAGLE-1's first layer."""

    def __init__(self, config: BlockConfig, *, normed_input: bool = True) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, width)
        self.mlp = Mlp(config)
        self.input_layernorm = nn.RMSNorm(width, eps=eps) if normed_input else nn.Identity()
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)

    def forward(
        self, x: Float[Tensor, "B N H"], turn: tuple[Tensor, Tensor], layer: int, attend: Attend
    ) -> Float[Tensor, "B N H"]:
        x = x + self.self_attn(self.input_layernorm(x), turn, layer, attend)
        return x + self.mlp(self.post_attention_layernorm(x))
