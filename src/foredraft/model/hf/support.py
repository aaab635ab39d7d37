"""Checks whether a model is supported, and reads its context length and attention layout."""

from collections.abc import Mapping
from typing import Any

from transformers import BitsAndBytesConfig, PreTrainedConfig

from foredraft.core.errors import ModelError
from foredraft.model.hf_types import PreTrainedModel
from foredraft.model.kv.masks import Layout

_REACH = {"full_attention": None, "sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}

UNBOUNDED = 1 << 30


def check_supported(model: PreTrainedModel) -> None:
    """Check that the model's drafts can be verified and rolled back.

    Raises:
        ModelError: they cannot; the message says why.
    """
    config = model.config.get_text_config()
    name = model.__class__.__name__
    check_decoder(model.config, name)
    check_generates(model)
    unknown = sorted(set(_layer_types(config)) - _REACH.keys())
    devices = {str(weight.device) for weight in model.parameters()}
    offloaded = "meta" in devices or "disk" in vars(model).get("hf_device_map", {}).values()
    if len(devices) > 1 or offloaded:
        where = ", ".join(sorted(devices - {"meta"}) + ["offloaded"] * offloaded)
        raise ModelError(
            f"The weights of this {name} are on several devices or are offloaded ({where}); foredraft runs a model on "
            'one device: load it with device_map={"": 0}, in a smaller dtype or quantised if needed.'
        )
    if _mixes_rows(model):
        raise ModelError(
            f"This {name} is in 8 bits with outliers in float16 (LLM.int8): which columns are outliers depends on all "
            "tokens of a forward, so drafts would change the output; load it with llm_int8_threshold=0.0 or in 4 bits."
        )
    if model._is_stateful or unknown:
        what = f"layers of type {', '.join(unknown)}" if unknown else "a recurrent state"
        raise ModelError(
            f"{name} has {what}: a state that has read rejected drafts cannot be rolled back; foredraft needs a model "
            "whose only state is its KV cache."
        )


def check_decoder(config: PreTrainedConfig, name: str) -> None:
    """Raise a ``ModelError`` for an encoder-decoder."""
    if config.is_encoder_decoder:
        raise ModelError(f"{name} is an encoder-decoder; foredraft verifies drafts of decoder-only causal LMs.")


def check_generates(model: PreTrainedModel) -> None:
    """Raise a ``ModelError`` for a model without a language-model head, such as an ``AutoModel``."""
    if not model.can_generate():
        raise ModelError(f"{model.__class__.__name__} has no language-model head; load a ...ForCausalLM.")


def has_alibi(model: PreTrainedModel) -> bool:
    """Whether attention has a bias by distance (ALiBi; Press et al. 2021), as the config says."""
    config = model.config.get_text_config()
    own = getattr(config, "attn_config", None) or config  # MPT's is apart
    return config.model_type == "bloom" or bool(getattr(own, "alibi", False))


def is_quantised(config: PreTrainedConfig) -> bool:
    """Whether transformers quantised the model of this config when it was loaded."""
    return getattr(config, "quantization_config", None) is not None


def _mixes_rows(model: PreTrainedModel) -> bool:
    """Whether bitsandbytes chooses the precision of a column by all rows of a product (LLM.int8)."""
    config = getattr(model.config, "quantization_config", None)
    return isinstance(config, BitsAndBytesConfig) and config.load_in_8bit and config.llm_int8_threshold > 0


def context_of(whole: PreTrainedConfig) -> int:
    """The model's context length in tokens.

    At most its last position, and less for models whose rows affect each other at greater lengths: "longrope" changes
    all positions of a batch once its longest row exceeds the original context, and Llama 4 scales queries by positions
    that it counts itself.
    """
    config: Any = whole.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or UNBOUNDED
    for part in _ropes(config):
        if part.get("rope_type") == "longrope":
            limit = min(limit, part["original_max_position_embeddings"])
    if getattr(config, "attn_temperature_tuning", False) and "chunked_attention" in _layer_types(config):
        limit = min(limit, config.floor_scale - 1)
    return limit


def first_token_of(config: Any) -> int:
    """The model's BOS token, else its first EOS token, else token 0."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    named = (token for token in (config.bos_token_id, *ends) if token is not None)
    return next((token for token in named if 0 <= token < config.vocab_size), 0)


def why_eager(model: PreTrainedModel) -> str | None:
    """Why the model's forward cannot be recorded and replayed; None if nothing is known against it."""
    if any("dynamic" in str(part.get("rope_type")) for part in _ropes(model.config.get_text_config())):
        return "its rotary embedding is computed again on the host when the text grows (rope_type dynamic)"
    if (model.tp_size or 1) > 1:
        return "its parts exchange states between layers (tensor parallelism)"
    return None


def _ropes(config: object) -> list[Mapping]:
    """The parameters of rotary embeddings: one dict, or one per layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, Mapping))]


def layout_of(config: PreTrainedConfig) -> Layout:
    """The model's layer types and their attention windows in tokens."""
    config = config.get_text_config()
    kinds = _layer_types(config)
    if not kinds:
        if getattr(config, "sliding_window", None) is not None:
            kinds = ("sliding_attention",)
        elif getattr(config, "attention_chunk_size", None) is not None:
            kinds = ("chunked_attention",)
        else:
            kinds = ("full_attention",)
    window = {}
    for kind in sorted(set(kinds)):
        name = _REACH[kind]
        window[kind] = getattr(config, name) if name is not None else None
    return Layout(window, by_type=len(window) > 1, chunked=frozenset(k for k in window if k == "chunked_attention"))


def _layer_types(config: object) -> tuple[str, ...]:
    return tuple(getattr(config, "layer_types", None) or ())
