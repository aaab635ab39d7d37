"""The GLIDE head: a decoder layer that also attends to the target's keys and values (Du et al., arXiv:2402.02082).

It is a draft model of one layer with the target's embedding and output layer. Row j reads token t_j alone; after its
causal self-attention it attends to the keys that one layer of the target has stored for the tokens before it, as far as
these are verified, and predicts t_{j+1}.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from jaxtyping import Float, Int
from torch import Tensor, nn

from foredraft.core.target_parts import TargetParts
from foredraft.heads.nets.blocks import Attend, Attention, BlockConfig, Mlp, Rotary, rotate
from foredraft.heads.nets.ttt_attention import take

AttendTarget = Callable[[Tensor], Tensor]
"""``attend(query [B, heads, M, E]) -> [B, M, heads, E]`` over the target's keys; zeros where a row has none to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlideConfig:
    """The config of a GLIDE head. The block has the target's attention heads.

    layer: decoder layer of the target, from 0 on, whose keys and values it reads.
    """

    block: BlockConfig
    layer: int


class CrossAttention(nn.Module):
    """Attention of rows to keys and values that they are given: its queries and its output."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(
        self, x: Float[Tensor, "B M H"], turn: tuple[Tensor, Tensor], attend: AttendTarget
    ) -> Float[Tensor, "B M H"]:
        query = self.q_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return self.o_proj(attend(rotate(query, *turn)).flatten(2))


@final
class Glide(nn.Module):
    """Self-attention, attention to the target's keys, and MLP, with the target's embedding and output layer."""

    own_output = False

    def __init__(self, config: GlideConfig, rotary: Rotary, target: TargetParts) -> None:
        super().__init__()
        self.config = config
        block = config.block
        width, eps = block.hidden_size, block.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.self_attn = Attention(block, width)
        self.cross_layernorm = nn.RMSNorm(width, eps=eps)
        self.cross_attn = CrossAttention(block)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)
        self.mlp = Mlp(block)
        self.norm = nn.RMSNorm(width, eps=eps)
        self.rotary = rotary
        self.target = target

    def forward(
        self,
        tokens: Int[Tensor, "B N"],
        positions: Int[Tensor, "B N"],
        attend: Attend,
        attend_target: AttendTarget,
        chosen: Int[Tensor, "B M"] | None = None,
    ) -> Float[Tensor, "B M H"]:
        """The states after the chosen rows, or after all.

        The keys and values of the head's own layer depend on tokens alone, so other rows need no more than these.

        Args:
            attend: self-attention, which returns the output of the chosen rows.
        """
        x = self.target.embed(tokens)
        own = self.self_attn(self.input_layernorm(x), self.rotary(positions), 0, attend)
        if chosen is not None:
            x, positions = take(x, chosen), positions.gather(1, chosen)
        x = x + own
        x = x + self.cross_attn(self.cross_layernorm(x), self.rotary(positions), attend_target)
        return x + self.mlp(self.post_attention_layernorm(x))

    def logits(self, states: Float[Tensor, "B M H"]) -> Float[Tensor, "B M V"]:
        """Logits of the token after each row's token."""
        return self.target.head(self.norm(states))
