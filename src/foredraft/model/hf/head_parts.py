"""The target's parts that heads use, and rotary frequencies of all schemes that transformers supports."""

import functools
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from foredraft.core.errors import ModelError
from foredraft.heads.nets.blocks import BlockConfig, Rotary
from foredraft.heads.nets.target_parts import TargetParts
from foredraft.model.linear.packed import any_weight, int8_copy
from foredraft.model.memory import is_plain


def parts_of(model: PreTrainedModel) -> TargetParts:
    """Embedding and output layer of a model, looked up at each call since they may be packed later.

    Raises:
        ModelError: the model does not name them.
    """
    config = model.config.get_text_config()
    if model.get_input_embeddings() is None or model.get_output_embeddings() is None:
        raise ModelError(f"{model.__class__.__name__} does not name its embedding and its output layer.")
    return TargetParts(
        embed=functools.partial(_embed, model),
        head=functools.partial(_head, model, _logit_scaling(model)),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
    )


def with_int8_output(parts: TargetParts, model: PreTrainedModel) -> TargetParts:
    """``parts`` with an int8 copy of the output layer, for drafting on a CPU; the same parts if it has a bias."""
    layer: Any = model.get_output_embeddings()
    copy = int8_copy(output_weight(model)) if getattr(layer, "bias", None) is None else None
    return parts if copy is None else replace(parts, head=functools.partial(_capped, copy, _logit_scaling(model)))


@torch.no_grad()
def output_weight(model: PreTrainedModel) -> Float[Tensor, "V H"]:
    """The weight of a model's output layer, computed from its products if the layer is quantised.

    Raises:
        ModelError: the model does not name its output layer.
    """
    layer: nn.Module | None = model.get_output_embeddings()
    if layer is None:
        raise ModelError(f"{model.__class__.__name__} does not name its output layer.")
    if is_plain(layer.weight):
        return layer.weight.detach()
    weight = any_weight(model)
    size = model.config.get_text_config().hidden_size
    unit = torch.eye(size, device=weight.device, dtype=weight.dtype)
    zero = layer(torch.zeros_like(unit[:1]))  # the bias
    return (layer(unit) - zero).T


def _embed(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    return model.get_input_embeddings()(tokens)


def _head(model: PreTrainedModel, scaling: tuple[float, float], states: Tensor) -> Tensor:
    layer: nn.Module | None = model.get_output_embeddings()
    assert layer is not None
    return _capped(layer, scaling, states)


def _capped(layer: nn.Module, scaling: tuple[float, float], states: Tensor) -> Tensor:
    logits = layer(states)
    scale, cap = scaling
    if scale != 1.0:
        logits = logits * scale
    return torch.tanh(logits / cap) * cap if cap else logits


def _logit_scaling(model: PreTrainedModel) -> tuple[float, float]:
    """The model's factor on logits (Cohere, Granite; else 1) and soft cap (Gemma 2; else 0)."""
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    return float(scale), float(getattr(config, "final_logit_softcapping", None) or 0.0)


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
    """The block's rotary embedding: default, linear, dynamic, yarn, llama3 or longrope.

    Raises:
        ModelError: the scheme is unknown, or its parameters are missing.
    """
    scaling = dict(block.rope_scaling or {})
    kind = scaling.pop("type", None) or scaling.get("rope_type", "default")
    if kind in ("default", "mrope"):  # mrope on text alone is plain
        steps = torch.arange(0, block.head_dim, 2, dtype=torch.float32) / block.head_dim
        return Rotary(1.0 / block.rope_theta**steps)
    if kind not in ROPE_INIT_FUNCTIONS:
        raise ModelError(f"Unknown rope type {kind!r}. Known: {', '.join(ROPE_INIT_FUNCTIONS)}.")
    shape: dict[str, Any] = {
        "hidden_size": block.hidden_size,
        "num_attention_heads": block.num_attention_heads,
        "head_dim": block.head_dim,
        "max_position_embeddings": block.max_position_embeddings,
    }
    config = PreTrainedConfig(**shape)
    config.rope_parameters = {**scaling, "rope_type": kind, "rope_theta": block.rope_theta}
    try:
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"rope_scaling {block.rope_scaling} cannot be used: {error}.") from error
    return Rotary(frequencies, scale)
