"""The parts of a transformers model that heads use."""

import functools
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.core.errors import ModelError
from foredraft.core.target_parts import TargetParts
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
