"""Architectures by their names in GGUF files: a table of names, not code per model.

llama.cpp's converter renames tensors and config values; for some models it also interleaves the rows of Q and K (its
rotary embedding rotates neighbours, transformers' the two halves of a head) or adds 1 to norms. A row of the table
says what to undo.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_SANDWICH = {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm", **_POST_NORMS}
_LLAMA = {**_ATTENTION, **_MLP, **_PRE_NORMS}
_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How a model's tensors and values are named in a file, and in transformers.

    ``layer``: tensors of a layer, "blk.0.X" to "model.layers.0.Y". ``permuted``: the rows of Q and K are interleaved.
    ``norm_offset``: what the converter added to every norm. ``values``: metadata keys behind the architecture's name,
    and their names in the config. ``fixed``: further values of the config. ``window_pattern``: every layer but each
    n-th has a sliding window; 0 for a model without. ``partial_rotary``: only a part of each head may be rotated.
    """

    model_type: str
    layer: Mapping[str, str]
    permuted: bool = False
    norm_offset: float = 0.0
    values: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    window_pattern: int = 0
    partial_rotary: bool = False

    def in_transformers(self, name: str) -> str | None:
        """The name of a tensor in transformers; None for one that is unknown."""
        stem, _, kind = name.rpartition(".")
        if kind not in ("weight", "bias"):
            return None
        if stem in _ENDS:
            return f"{_ENDS[stem]}.{kind}"
        block, _, rest = stem.partition(".")
        number, _, part = rest.partition(".")
        if block != "blk" or not number.isdecimal() or part not in self.layer:
            return None
        return f"model.layers.{number}.{self.layer[part]}.{kind}"


ARCHITECTURES = {
    "llama": Architecture(model_type="llama", layer=_LLAMA, permuted=True),  # SmolLM and Mistral, too
    "smollm3": Architecture(model_type="smollm3", layer=_LLAMA, permuted=True),
    "granite": Architecture(model_type="granite", layer=_LLAMA, permuted=True, values=_SCALES),
    "qwen2": Architecture(model_type="qwen2", layer=_LLAMA, fixed={"use_sliding_window": False}),
    "qwen3": Architecture(model_type="qwen3", layer={**_LLAMA, **_QK_NORMS}, fixed={"use_sliding_window": False}),
    "gemma": Architecture(model_type="gemma", layer=_LLAMA, norm_offset=1.0),
    "gemma2": Architecture(
        model_type="gemma2",
        layer={**_ATTENTION, **_MLP, **_SANDWICH},
        norm_offset=1.0,
        values=_CAPS,
        window_pattern=2,
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        layer={**_ATTENTION, **_QK_NORMS, **_MLP, **_SANDWICH},
        norm_offset=1.0,
        values=_CAPS,
        window_pattern=6,
    ),
    "phi3": Architecture(
        model_type="phi3",
        layer={
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
            **_PRE_NORMS,
        },
        values={
            "attention.sliding_window": "sliding_window",
            "rope.scaling.original_context_length": "original_max_position_embeddings",
        },
        partial_rotary=True,
    ),
    "olmo2": Architecture(model_type="olmo2", layer={**_ATTENTION, **_QK_NORMS, **_MLP, **_POST_NORMS}),
}
"""By ``general.architecture``."""
