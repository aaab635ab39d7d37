"""Models of real shapes with random weights, whose drafts are accepted at given rates.

After token t the target generates ``Text.after[t]``, whatever came before: the embedding outweighs all layers, and the
output layer maps it to that token. A draft model and an EAGLE-3 head have the same table, but rank another token first
for a share of the tokens. So every step does all the work of its shape, and acceptance is a setting, not a result.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from foredraft.heads.formats.block import block_like, rotary_of
from foredraft.heads.formats.layers import default_taps
from foredraft.heads.nets.blocks import fuse
from foredraft.heads.nets.eagle import Eagle3, Eagle3Config
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.hf.head_parts import parts_of

FIRST, SECOND = 0.75, 0.15
"""Shares of tokens for which a draft ranks the right token first and second. A chain's acceptance rate is ``FIRST``, a
wide tree's the sum of both."""
_SHARP = 13.0
"""Logit of a draft's first token; all but the first and the second are near 0. The target's is four times as large, so
that it generates the text at temperature 1, too."""
_DECOY = 0.8
"""Weight of the second token, relative to the first."""
_LOUD = 100.0
"""Size of embeddings; layers add a few units each."""
_FOCUS = 16.0
"""Size of the query and key of a head that attends to its own position alone."""


@dataclass(frozen=True, slots=True)
class Text:
    """The successor of each of the first K tokens, in one cycle, and the wrong token that a draft ranks beside it."""

    after: Tensor
    decoy: Tensor
    right: Tensor  # weight of the right token in a draft, 1 if it is first
    wrong: Tensor

    @classmethod
    def of(cls, tokens: int, device: torch.device) -> "Text":
        rng = torch.Generator().manual_seed(1)
        cycle, chance = torch.randperm(tokens, generator=rng), torch.rand(tokens, generator=rng)
        after, decoy = torch.empty(tokens, dtype=torch.long), torch.empty(tokens, dtype=torch.long)
        after[cycle], decoy[cycle] = cycle.roll(-1), cycle.roll(-tokens // 3)
        first, second = chance < FIRST, (chance >= FIRST) & (chance < FIRST + SECOND)
        right = torch.where(first, 1.0, torch.where(second, _DECOY, 0.0))
        wrong = torch.where(first, _DECOY, 1.0)
        return cls(*(each.to(device) for each in (after, decoy, right, wrong)))

    def prompts(self, rows: int, length: int) -> list[list[int]]:
        rng = torch.Generator().manual_seed(2)
        return torch.randint(len(self.after), (rows, length), generator=rng).tolist()


@contextmanager
def built(device: torch.device, dtype: torch.dtype):
    """Create modules on the device, in ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    try:
        with torch.device(device), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(before)


def model(config: PretrainedConfig, text: Text, dtype: torch.dtype, *, draft: bool) -> CausalLM:
    """A model of this config that generates the text, or a draft's version of it."""
    count, width = len(text.after), config.hidden_size
    with built(text.after.device, dtype):
        config.tie_word_embeddings, config.dtype = False, dtype
        raw = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
        raw.generation_config.eos_token_id = None
        rows = nn.functional.normalize(torch.randn(config.vocab_size, width), dim=1)
        raw.get_input_embeddings().weight.copy_(_LOUD * width**0.5 * rows)
        output = raw.get_output_embeddings().weight.zero_()
        right, wrong = (text.right, text.wrong) if draft else (torch.ones_like(text.right), None)
        _write(output, rows[:count], text, right, wrong)
        output *= (1 if draft else 4) * _SHARP / width**0.5
    return CausalLM(raw, verify=False, owned=True)


def eagle3(target: CausalLM, text: Text) -> Eagle3:
    """A head of the published shape, with the text's tokens as its vocabulary (biases apart).

    Attention looks at its own position alone, whose value is the token's embedding; the feature is scaled away.
    """
    count = len(text.after)
    with built(target.device, target.dtype):
        block, parts = block_like(target.config, attention_bias=True), parts_of(target.model)
        config = Eagle3Config(
            block=block,
            vocab_size=parts.vocab_size,
            draft_vocab_size=count,
            target_hidden_size=parts.hidden_size,
            taps=default_taps(target.layers),
            norm_before_residual=True,
        )
        net = Eagle3(config, rotary_of(block), parts)
        net.vocabulary = torch.arange(count)
        attention, width = net.midlayer.self_attn, block.hidden_size
        net.midlayer.hidden_norm.weight.fill_(0.01)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.weight.zero_()
            projection.bias.zero_()
        fast = torch.arange(block.head_dim) % (block.head_dim // 2) < block.head_dim // 4  # see Rotary: the high half
        for projection in (attention.q_proj, attention.k_proj):
            projection.bias.copy_((_FOCUS * fast).repeat(len(projection.bias) // block.head_dim))
        value = attention.v_proj.weight[:, :width].normal_(std=width**-0.5)
        attention.o_proj.weight.normal_(std=len(attention.q_proj.bias) ** -0.5)
        embedded = net.midlayer.input_layernorm(parts.embed(torch.arange(count)))
        seen = (embedded @ value.T).unflatten(1, (block.num_key_value_heads, -1))
        seen = seen.repeat_interleave(block.num_attention_heads // block.num_key_value_heads, dim=1)
        rows = nn.functional.normalize(attention.o_proj(seen.flatten(1)), dim=1)
        assert net.lm_head is not None
        _write(net.lm_head.weight.zero_(), rows, text, text.right, text.wrong)
        net.lm_head.weight *= _SHARP / width**0.5
    net.to(device=target.device).eval().requires_grad_(False)
    fuse(net)
    return net


def _write(output: Tensor, rows: Tensor, text: Text, right: Tensor, wrong: Tensor | None) -> None:
    """Make the output layer map ``rows[t]`` to the successor of token t."""
    output[text.after] += right[:, None].to(output.dtype) * rows
    if wrong is not None:
        output[text.decoy] += wrong[:, None].to(output.dtype) * rows
