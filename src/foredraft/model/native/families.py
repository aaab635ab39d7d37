"""What differs between decoders of the Llama shape, as a table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.model.hf.support import layout_of

NO_HEAD_NORM, EACH_HEAD, ALL_HEADS = range(3)


@dataclass(frozen=True, slots=True)
class Norms:
    """The names of a layer's norms, before and after attention and MLP; None: there is none."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """How models of one type differ from Llama.

    ``head_norm``: norms of queries and keys, of each head or of all together. ``norm_offset``: added to the weights of
    norms. ``scaled_embedding``: embeddings are multiplied by the root of the hidden size.
    """

    norms: Norms = Norms()
    head_norm: int = NO_HEAD_NORM
    norm_offset: float = 0.0
    scaled_embedding: bool = False


_SANDWICH = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")

FAMILIES: Mapping[str, ModelFamily] = {
    "llama": ModelFamily(),
    "mistral": ModelFamily(),
    "qwen2": ModelFamily(),
    "qwen3": ModelFamily(head_norm=EACH_HEAD),
    "gemma": ModelFamily(norm_offset=1.0, scaled_embedding=True),
    "gemma2": ModelFamily(_SANDWICH, norm_offset=1.0, scaled_embedding=True),
    "gemma3_text": ModelFamily(_SANDWICH, EACH_HEAD, norm_offset=1.0, scaled_embedding=True),
    "phi3": ModelFamily(),
    "granite": ModelFamily(),
    "olmo2": ModelFamily(_AFTER, ALL_HEADS),
    "arcee": ModelFamily(),
}
"""By the config's ``model_type``."""

ACTIVATIONS = {
    "silu": 0,
    "swish": 0,
    "gelu_pytorch_tanh": 1,
    "gelu_new": 1,
    "gelu": 2,
    "relu": 3,
    "relu2": 4,
}
"""Numbers of the kernels' activations."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes and constants of a decoder, as the kernels take them. ``kinds``: each layer's place in ``layout_of``."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    activation: int
    eps: float
    embedding_scale: float
    residual_scale: float
    attention_scale: float
    attention_cap: float
    logit_scale: float
    logit_cap: float
    kinds: tuple[int, ...]
    rotary: tuple[int, ...]
    frequencies: tuple["Frequencies", ...]


@dataclass(frozen=True, eq=False, slots=True)
class Frequencies:
    """Rotary frequencies, and the factor on cosines and sines."""

    inverse: Float[Tensor, "F"]
    factor: float

    def table(self, start: int, count: int) -> Float[Tensor, "count 2 F"]:
        """Cosines and sines of the positions from ``start`` on.

        Angles are products in float32, as in transformers; their cosines are those of float64, so that they do not
        depend on the place in a vector.
        """
        angles = torch.arange(start, start + count, dtype=torch.float32)[:, None] * self.inverse
        angles = angles.double()
        return (torch.stack([angles.cos(), angles.sin()], dim=1) * self.factor).float()


def why_not_native(model: PreTrainedModel) -> str | None:
    """Why the native engine cannot run a model of this type, as the end of a sentence; None if it can."""
    config = model.config.get_text_config()
    if config.model_type not in FAMILIES:
        return f"it has no kernels for the type {config.model_type} (it knows {', '.join(FAMILIES)})"
    activation = _activation(config)
    if activation not in ACTIVATIONS:
        return f"it has no kernel for the activation {activation}"
    ropes = _rotary_of(model)
    kinds = {str(kind) for kind in vars(ropes).get("rope_type", {}).values()} if _by_type(ropes) else {ropes.rope_type}
    if any("dynamic" in kind for kind in kinds):
        return "its rotary embedding changes as a text grows (rope_type dynamic)"
    return None


def shape_of(model: PreTrainedModel) -> Shape:
    """The sizes of a model whose type is in ``FAMILIES``; its weights may be on the meta device."""
    config: Any = model.config.get_text_config()
    family = FAMILIES[config.model_type]
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    layout = layout_of(model)
    names = list(layout.kinds)
    types = tuple(getattr(config, "layer_types", None) or ())
    kinds = tuple(names.index(kind) for kind in types) if len(names) > 1 else (0,) * config.num_hidden_layers
    scale = (
        getattr(config, "attention_multiplier", None) or (getattr(config, "query_pre_attn_scalar", None) or dim) ** -0.5
    )
    embedding = config.hidden_size**0.5 if family.scaled_embedding else getattr(config, "embedding_multiplier", None)
    rotary = _rotary_of(model)
    by_type = _by_type(rotary)
    return Shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=dim,
        inner=config.intermediate_size,
        vocabulary=config.vocab_size,
        activation=ACTIVATIONS[_activation(config)],
        eps=config.rms_norm_eps,
        embedding_scale=embedding or 1.0,
        residual_scale=getattr(config, "residual_multiplier", None) or 1.0,
        attention_scale=scale,
        attention_cap=getattr(config, "attn_logit_softcapping", None) or 0.0,
        logit_scale=1.0 / (getattr(config, "logits_scaling", None) or 1.0),
        logit_cap=getattr(config, "final_logit_softcapping", None) or 0.0,
        kinds=kinds,
        rotary=tuple(names.index(kind) for kind in types) if by_type else (0,) * config.num_hidden_layers,
        frequencies=tuple(_frequencies(rotary, f"{name}_") for name in names)
        if by_type
        else (_frequencies(rotary, ""),),
    )


def _activation(config: Any) -> str:
    return getattr(config, "hidden_activation", None) or config.hidden_act


def _rotary_of(model: PreTrainedModel) -> Any:
    """The rotary embedding, rebuilt if the model has no data."""
    found: nn.Module = next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))
    if any(each.is_meta for each in found.buffers()):
        rebuild: Any = type(found)
        return rebuild(model.config.get_text_config())
    return found


def _by_type(rotary: Any) -> bool:
    """Whether each type of layers has its own frequencies."""
    return isinstance(rotary.rope_type, dict)


def _frequencies(rotary: Any, prefix: str) -> Frequencies:
    inverse: Tensor = getattr(rotary, f"{prefix}inv_freq")
    return Frequencies(inverse.detach().float().cpu(), float(getattr(rotary, f"{prefix}attention_scaling")))
