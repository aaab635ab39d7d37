"""The decoder block of a head: its config, with the keys of transformers' ``LlamaConfig``."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from foredraft.core.errors import DrafterError
from foredraft.heads.formats.files import Fields
from foredraft.heads.nets.blocks import ACTIVATIONS, BlockConfig, Rotary
from foredraft.model.hf.rope import rope_frequencies

BASE = 10000.0
"""The RoPE base if a config has none."""
_SHARED = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "hidden_act"),
    *("max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling"),
)
"""The fields of a block that all formats have under the same names."""


def read_block(fields: Fields, *, layers: int, notes: list[str], **known: Any) -> BlockConfig:
    """Read a block from a config. ``known``: fields that the caller has determined from the tensors.

    Raises:
        DrafterError: the config is invalid, or uses an unsupported feature.
    """
    width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if "head_dim" not in fields and width % heads:
        raise DrafterError(
            f"The head {fields.name!r} has a width of {width}, not divisible by {heads} attention heads."
        )
    groups, size = fields.integer("num_key_value_heads", heads), fields.integer("head_dim", width // heads or None)
    if heads % groups or size % 2 or size > 1 << 16:
        raise DrafterError(
            f"The head {fields.name!r} has {heads} attention heads of width {size} and {groups} key-value heads, "
            "which do not fit together."
        )
    activation = fields.text("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise DrafterError(
            f"The head {fields.name!r} uses the unknown activation {activation!r}. Known: {', '.join(ACTIVATIONS)}."
        )
    window = _window(fields, layers)
    theta, scaling = _rope(fields, window is not None)
    if theta is None:
        notes.append("rope_theta is missing; 10000 is used.")
    shape: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": size,
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "hidden_act": activation,
        "mlp_bias": fields.flag("mlp_bias", False),
        "sliding_window": window,
        "max_position_embeddings": fields.integer("max_position_embeddings", 2048),
        "rope_theta": BASE if theta is None else theta,
        "rope_scaling": scaling,
    }
    return BlockConfig(**{**shape, **known})


def override_theta(block: BlockConfig, theta: float, notes: list[str]) -> BlockConfig:
    """The block with the caller's RoPE base."""
    notes.append(f"rope_theta is set to {theta:g}; the config has {block.rope_theta:g}.")
    return replace(block, rope_theta=theta)


def _window(fields: Fields, layers: int) -> int | None:
    """The sliding window of all layers of the head, or None.

    Qwen's configs have a window that is off unless ``use_sliding_window``; ``layer_types`` takes precedence.
    """
    kinds = fields.values.get("layer_types")
    if isinstance(kinds, list) and len(kinds) >= layers:
        own = set(map(str, kinds[:layers]))
        if own == {"full_attention"}:
            return None
        if own != {"sliding_attention"}:
            raise DrafterError(
                f"The layers of the head {fields.name!r} are of the types {', '.join(sorted(own))}; "
                "only all full or all sliding layers are supported."
            )
        return fields.integer("sliding_window")
    off = fields.text("model_type", "llama").startswith("qwen")
    used = "sliding_window" in fields and fields.flag("use_sliding_window", not off)
    return fields.integer("sliding_window") if used else None


def _rope(fields: Fields, sliding: bool) -> tuple[float | None, dict[str, Any] | None]:
    """RoPE base (None if missing) and scaling (None for default), from any of the three keys that configs use."""
    found = fields.part("rope_parameters")
    if any(isinstance(value, dict) for value in found.values.values()):  # one dict per layer type
        found = found.part("sliding_attention" if sliding else "full_attention")
    if not found.values:
        found = fields.part("rope_scaling")
    for place in (found, fields):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            raise DrafterError(
                f"The head {fields.name!r} uses rotary embeddings on a part of each attention head "
                "(partial_rotary_factor), which is not supported."
            )
    place = found if "rope_theta" in found else fields
    theta = place.number("rope_theta") if "rope_theta" in place else None
    scheme = {k: v for k, v in found.values.items() if k not in ("rope_theta", "type", "partial_rotary_factor")}
    kind = found.values.get("rope_type") or found.values.get("type") or "default"
    if kind in ("default", "mrope") or "mrope_section" in scheme:  # mrope on text alone equals the default
        return theta, None
    if not isinstance(kind, str):
        raise DrafterError(f"The rope_scaling of the head {fields.name!r} has no rope_type.")
    return theta, {**scheme, "rope_type": kind}


def write_block(block: BlockConfig, target: Mapping[str, Any], *, vocab_size: int, layers: int) -> dict[str, Any]:
    """The config entries that all formats share. Special token ids are the target's."""
    return {
        "model_type": "llama",
        **{name: getattr(block, name) for name in _SHARED},
        "num_hidden_layers": layers,
        "vocab_size": vocab_size,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "use_cache": True,
        "tie_word_embeddings": False,
        **{name: target.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }


def unsupported_by_block(block: BlockConfig, allowed: Collection[str] = ()) -> list[str]:
    """Fields of this block that a plain Llama layer does not support, except those ``allowed``."""
    differs = {
        "head_dim": block.head_dim * block.num_attention_heads != block.hidden_size,
        "attention_bias": block.attention_bias,
        "output_bias": block.output_bias,
        "mlp_bias": block.mlp_bias,
        "qk_norm": block.qk_norm,
        "sliding_window": block.sliding_window is not None,
    }
    return [name for name, different in differs.items() if different and name not in allowed]


def old_scaling(block: BlockConfig) -> dict[str, Any] | None:
    """``rope_scaling`` for SafeAILab's code, which reads exactly the keys type and factor.

    Raises:
        DrafterError: a scheme that it does not support.
    """
    scaling = block.rope_scaling
    if scaling is None:
        return None
    if scaling.get("rope_type") not in ("linear", "dynamic") or set(scaling) != {"rope_type", "factor"}:
        raise DrafterError(
            f"SafeAILab's code supports linear and dynamic rope_scaling only, not {scaling.get('rope_type')!r}."
        )
    return {"type": scaling["rope_type"], "factor": scaling["factor"]}


def block_like(config: Any, **changes: Any) -> BlockConfig:
    """The config of a decoder block with the width, heads and positions of a target's text config."""
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # models with several layer types have one dict each
    shape: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
        "max_position_embeddings": getattr(config, "max_position_embeddings", None) or 2048,
        "rope_theta": float(rope.get("rope_theta") or 10000.0),
        "rope_scaling": _rope_scaling(rope),
    }
    return BlockConfig(**{**shape, **changes})


def _rope_scaling(rope: dict[str, Any]) -> dict[str, Any] | None:
    if rope.get("rope_type", "default") == "default":
        return None
    return {key: value for key, value in rope.items() if key != "rope_theta"}


def rotary_of(block: BlockConfig) -> Rotary:
    """The block's rotary embedding; see ``rope_frequencies`` for schemes and errors."""
    shape = {
        "hidden_size": block.hidden_size,
        "num_attention_heads": block.num_attention_heads,
        "head_dim": block.head_dim,
        "max_position_embeddings": block.max_position_embeddings,
    }
    return Rotary(*rope_frequencies(shape, block.rope_theta, block.rope_scaling))
