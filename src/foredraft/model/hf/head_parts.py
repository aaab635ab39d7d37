"""The parts of a transformers model that heads use."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from foredraft.core.errors import ModelError
from foredraft.core.target_parts import TargetParts
from foredraft.model.hf_types import PreTrainedModel
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
        head=functools.partial(_head, model, _Outputs.of(model)),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
    )


def embedding_rows(model: PreTrainedModel) -> int:
    """The tokens that a model can read; 0 if its embedding does not say."""
    layer: nn.Module | None = model.get_input_embeddings()
    return layer.num_embeddings if isinstance(layer, nn.Embedding) else 0


def wide(logits: Float[Tensor, "*rows v"], width: int) -> Float[Tensor, "*rows V"]:
    """Logits with -inf for tokens that can be read and not generated; as they are if they are not narrower."""
    missing = width - logits.shape[-1]
    return nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits


def with_int8_output(parts: TargetParts, model: PreTrainedModel, weights_version: Callable[[], int]) -> TargetParts:
    """``parts`` with an int8 copy of the output layer, for drafting on a CPU; the same parts if it has a bias.

    Args:
        weights_version: see ``TargetModel``; when it grows, the layer is copied anew.
    """
    layer: Any = model.get_output_embeddings()
    copy = int8_copy(output_weight(model)) if getattr(layer, "bias", None) is None else None
    return parts if copy is None else replace(parts, head=_Int8Output(model, copy, weights_version))


class _Int8Output:
    """The output layer, by its copy."""

    def __init__(self, model: PreTrainedModel, copy: nn.Module, weights_version: Callable[[], int]) -> None:
        self._model, self._copy, self._outputs = model, copy, _Outputs.of(model)
        self._version, self._copied = weights_version, weights_version()

    def __call__(self, states: Tensor) -> Tensor:
        if (now := self._version()) != self._copied:
            fresh = int8_copy(output_weight(self._model))
            self._copy, self._copied = self._copy if fresh is None else fresh, now
        return _logits(self._copy, self._outputs, states)


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


def _head(model: PreTrainedModel, outputs: "_Outputs", states: Tensor) -> Tensor:
    layer: nn.Module | None = model.get_output_embeddings()
    assert layer is not None
    return _logits(layer, outputs, states)


class _Outputs(NamedTuple):
    """Factor on logits (Cohere, Granite; else 1), soft cap (Gemma 2; else 0), and the width that they get."""

    scale: float
    cap: float
    width: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> "_Outputs":
        config = model.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        cap = getattr(config, "final_logit_softcapping", None) or 0.0
        return cls(float(scale), float(cap), embedding_rows(model))


def _logits(layer: nn.Module, outputs: _Outputs, states: Tensor) -> Tensor:
    logits = layer(states)
    if outputs.scale != 1.0:
        logits = logits * outputs.scale
    return wide(torch.tanh(logits / outputs.cap) * outputs.cap if outputs.cap else logits, outputs.width)
