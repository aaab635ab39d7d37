"""What the heads are built of: rotary positions and a Llama-like decoder block whose attention is handed in.

Attention is an argument because it differs: over slots when drafting, causal or unrolled when training.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, query [B, heads, N, E], key [B, groups, N, E], value [B, groups, N, E]) -> [B, N, heads, E]``.

Keys are rotated already; groups divide heads.
"""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """The shape of a decoder block, in transformers' words.

    ``rope_scaling`` is transformers' dict without the base, None for plain rotary positions. ``sliding_window``
    counts the tokens that a row sees, itself included; None for all.
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


class Rotary(nn.Module):
    """Cosines and sines by position (Su et al., arXiv:2104.09864), halves rotated as in Llama.

    Args:
        frequencies: [E / 2], radians a position.
        scale: what cosines and sines are multiplied with (some long-context schemes want that).
    """

    def __init__(self, frequencies: Float[Tensor, "E"], scale: float = 1.0) -> None:
        super().__init__()
        self.frequencies: Tensor
        self.register_buffer("frequencies", frequencies.float(), persistent=False)
        self.scale = scale

    def forward(self, positions: Int[Tensor, "B N"]) -> tuple[Float[Tensor, "B 1 N E"], Float[Tensor, "B 1 N E"]]:
        with torch.autocast(positions.device.type, enabled=False):
            angles = positions[:, None, :, None].to(self.frequencies.dtype) * self.frequencies
            angles = torch.cat([angles, angles], dim=-1)
            return angles.cos() * self.scale, angles.sin() * self.scale


def rotate(x: Float[Tensor, "B h N E"], cos: Float[Tensor, "B 1 N E"], sin: Float[Tensor, "B 1 N E"]) -> Tensor:
    """Turn each pair (i, i + E/2) of x by its angle."""
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-right, left], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Projections around an attention that is handed in. ``inputs`` is the width that q, k and v read."""

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

    def forward(
        self, x: Float[Tensor, "B N I"], turn: tuple[Tensor, Tensor], layer: int, attend: Attend
    ) -> Float[Tensor, "B N H"]:
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = rotate(self.q_norm(query).transpose(1, 2), *turn)
        key = rotate(self.k_norm(key).transpose(1, 2), *turn)
        mixed = attend(layer, query, key, value.transpose(1, 2))
        return self.o_proj(mixed.flatten(2))


class Mlp(nn.Module):
    """Llama's gated feed-forward layer."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(width, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, width, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Float[Tensor, "B N H"]) -> Float[Tensor, "B N H"]:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A pre-norm decoder block. ``normed_input=False`` leaves out the first norm, as EAGLE-1's first layer does."""

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
