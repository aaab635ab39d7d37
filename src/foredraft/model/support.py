"""Which models can be verified, which cannot and why, and how their layers attend."""

from collections.abc import Mapping

from transformers import PreTrainedModel

from foredraft.core.errors import ModelError
from foredraft.model.masks import Layout

_REACH = {"full_attention": None, "sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}

UNBOUNDED = 1 << 30


def check_supported(model: PreTrainedModel) -> None:
    """Raise a ``ModelError`` that says why for a model whose drafts could not be verified or rolled back."""
    config = model.config.get_text_config()
    name = model.__class__.__name__
    if model.config.is_encoder_decoder:
        raise ModelError(f"{name} is an encoder-decoder; foredraft verifies drafts of decoder-only causal LMs.")
    check_generates(model)
    odd = sorted(set(_layer_types(config)) - _REACH.keys())
    places = {str(weight.device) for weight in model.parameters()}
    away = "meta" in places or "disk" in vars(model).get("hf_device_map", {}).values()
    if len(places) > 1 or away:
        where = ", ".join(sorted(places - {"meta"}) + ["offloaded"] * away)
        raise ModelError(
            f"The weights of this {name} lie on several devices or are offloaded ({where}); foredraft runs a model on "
            'one device: load it with device_map={"": 0}, in a smaller dtype or quantised if need be.'
        )
    if model._is_stateful or odd:
        what = f"layers of type {', '.join(odd)}" if odd else "a recurrent state"
        raise ModelError(
            f"{name} has {what}: a state that was advanced over rejected drafts cannot be rolled back, so they could "
            "not be undone; foredraft needs a model whose whole memory is keys and values."
        )


def check_generates(model: PreTrainedModel) -> None:
    """Raise a ``ModelError`` for a model without a language-model head, such as one of ``AutoModel``."""
    if not model.can_generate():
        raise ModelError(f"{model.__class__.__name__} has no language-model head; load a ...ForCausalLM.")


def context_of(model: PreTrainedModel) -> int:
    """How many tokens a text may have.

    Beyond its last position, and beyond lengths at which it changes what it made of earlier ones: "longrope" turns
    all positions of a batch differently once its longest row has passed the original context, and Llama 4 scales
    queries by positions that it counts itself. There a row would depend on its neighbours.
    """
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or UNBOUNDED
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):  # one for all, or by layer
        if part.get("rope_type") == "longrope":
            limit = min(limit, part["original_max_position_embeddings"])
    if getattr(config, "attn_temperature_tuning", False) and "chunked_attention" in _layer_types(config):
        limit = min(limit, config.floor_scale - 1)
    return limit


def layout_of(model: PreTrainedModel) -> Layout:
    """Layer types of a model with their reach in tokens, read from its config."""
    config = model.config.get_text_config()
    kinds = _layer_types(config)
    if not kinds:
        if getattr(config, "sliding_window", None) is not None:
            kinds = ("sliding_attention",)
        elif getattr(config, "attention_chunk_size", None) is not None:
            kinds = ("chunked_attention",)
        else:
            kinds = ("full_attention",)
    reach = {}
    for kind in sorted(set(kinds)):
        name = _REACH[kind]
        reach[kind] = getattr(config, name) if name is not None else None
    return Layout(reach, by_type=len(reach) > 1, chunked=frozenset(k for k in reach if k == "chunked_attention"))


def _layer_types(config: object) -> tuple[str, ...]:
    return tuple(getattr(config, "layer_types", None) or ())
