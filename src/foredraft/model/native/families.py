"""What differs between decoders of the Llama shape, as a table."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

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
    norms. ``scaled_embedding``: embeddings are multiplied by the root of the hidden size. ``biases``: flags of the
    config that give linear layers biases. ``qkv_bias``: queries, keys and values always have some. ``fused``: Q, K and
    V are one matrix, and so are gate and up. ``gated``: the MLP has a gate. ``partial_rotary``: only a part of each
    head may be rotated.
    """

    norms: Norms = Norms()
    head_norm: int = NO_HEAD_NORM
    norm_offset: float = 0.0
    scaled_embedding: bool = False
    biases: tuple[str, ...] = ()
    qkv_bias: bool = False
    fused: bool = False
    gated: bool = True
    partial_rotary: bool = False


_SANDWICH = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_ATTENTION, _BOTH = ("attention_bias",), ("attention_bias", "mlp_bias")

FAMILIES: Mapping[str, ModelFamily] = {
    "llama": ModelFamily(biases=_BOTH),
    "mistral": ModelFamily(),
    "qwen2": ModelFamily(qkv_bias=True),
    "qwen3": ModelFamily(head_norm=EACH_HEAD, biases=_ATTENTION),
    "gemma": ModelFamily(norm_offset=1.0, scaled_embedding=True, biases=_ATTENTION),
    "gemma2": ModelFamily(_SANDWICH, norm_offset=1.0, scaled_embedding=True, biases=_ATTENTION),
    "gemma3_text": ModelFamily(_SANDWICH, EACH_HEAD, norm_offset=1.0, scaled_embedding=True, biases=_ATTENTION),
    "phi3": ModelFamily(fused=True, partial_rotary=True),
    "granite": ModelFamily(biases=_BOTH),
    "olmo2": ModelFamily(_AFTER, ALL_HEADS, biases=_ATTENTION),
    "arcee": ModelFamily(biases=_BOTH, gated=False),
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


def why_not_native(config: PreTrainedConfig) -> str | None:
    """Why the native engine cannot run a model of this config, as the end of a sentence; None if it can."""
    config = config.get_text_config()
    if config.model_type not in FAMILIES:
        return f"it has no kernels for the type {config.model_type} (it knows {', '.join(FAMILIES)})"
    activation = _activation(config)
    if activation not in ACTIVATIONS:
        return f"it has no kernel for the activation {activation}"
    if any("dynamic" in str(each["rope_type"]) for each in _ropes(config).values()):
        return "its rotary embedding changes as a text grows (rope_type dynamic)"
    return None


def shape_of(config: Any) -> Shape:
    """The sizes of a model whose type is in ``FAMILIES``, from its text config."""
    family = FAMILIES[config.model_type]
    dim = _head_dim(config)
    layout = layout_of(config)
    names = list(layout.kinds)
    types = tuple(getattr(config, "layer_types", None) or ())
    kinds = tuple(names.index(kind) for kind in types) if len(names) > 1 else (0,) * config.num_hidden_layers
    scale = (
        getattr(config, "attention_multiplier", None) or (getattr(config, "query_pre_attn_scalar", None) or dim) ** -0.5
    )
    embedding = config.hidden_size**0.5 if family.scaled_embedding else getattr(config, "embedding_multiplier", None)
    by_type = None not in _ropes(config)
    return Shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=_kv_heads(config),
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
        frequencies=tuple(_frequencies(config, family, kind) for kind in (names if by_type else [None])),
    )


def weight_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """The weights of a model whose type is in ``FAMILIES``, as transformers names them, without a tied output layer."""
    family, hidden = FAMILIES[config.model_type], config.hidden_size
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    matrices, norms = _attention_shapes(config, family)
    norms |= {name: hidden for place in fields(family.norms) if (name := getattr(family.norms, place.name))}
    matrices |= _mlp_shapes(config, family)
    for number in range(config.num_hidden_layers):
        prefix = f"model.layers.{number}."
        found |= {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
        for name, (outputs, inputs, biased) in matrices.items():
            found[f"{prefix}{name}.weight"] = (outputs, inputs)
            if biased:
                found[f"{prefix}{name}.bias"] = (outputs,)
    found["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = (config.vocab_size, hidden)
    return found


def _attention_shapes(config: Any, family: ModelFamily) -> tuple[dict[str, tuple[int, int, bool]], dict[str, int]]:
    """Outputs, inputs and whether there is a bias, by the name of a matrix; and the sizes of norms."""
    dim, heads, hidden = _head_dim(config), config.num_attention_heads, config.hidden_size
    width, keys = heads * dim, _kv_heads(config) * dim
    biased = "attention_bias" in family.biases and bool(config.attention_bias)
    sizes = {"q_proj": width, "k_proj": keys, "v_proj": keys}
    if family.fused:
        sizes = {"qkv_proj": sum(sizes.values())}
    found = {f"self_attn.{name}": (size, hidden, biased or family.qkv_bias) for name, size in sizes.items()}
    found["self_attn.o_proj"] = (hidden, width, biased)
    if family.head_norm == NO_HEAD_NORM:
        return found, {}
    own = (width, keys) if family.head_norm == ALL_HEADS else (dim, dim)
    return found, dict(zip(("self_attn.q_norm", "self_attn.k_norm"), own, strict=True))


def _mlp_shapes(config: Any, family: ModelFamily) -> dict[str, tuple[int, int, bool]]:
    inner, hidden = config.intermediate_size, config.hidden_size
    biased = "mlp_bias" in family.biases and bool(config.mlp_bias)
    up = {"up_proj": inner}
    if family.gated:
        up = {"gate_up_proj": 2 * inner} if family.fused else {"gate_proj": inner, **up}
    found = {f"mlp.{name}": (size, hidden, biased) for name, size in up.items()}
    return found | {"mlp.down_proj": (hidden, inner, biased)}


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _kv_heads(config: Any) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _activation(config: Any) -> str:
    return getattr(config, "hidden_activation", None) or config.hidden_act


def _ropes(config: Any) -> dict[str | None, Mapping[str, Any]]:
    """The parameters of the rotary embedding: one for all layers (None), or one for each type of layers."""
    found = config.rope_parameters
    if "rope_type" in found:
        return {None: found}
    return {kind: found[kind] for kind in sorted(set(config.layer_types))}


def _frequencies(config: Any, family: ModelFamily, kind: str | None) -> Frequencies:
    """Those of all layers (None), or of one type of layers, as transformers' modelling code computes them."""
    given = _ropes(config)[kind]
    if given["rope_type"] != "default":
        of_kind = {} if kind is None else {"layer_type": kind}
        inverse, factor = ROPE_INIT_FUNCTIONS[given["rope_type"]](config, torch.device("cpu"), **of_kind)
        return Frequencies(inverse.float(), float(factor))
    dim = _head_dim(config)
    if family.partial_rotary:
        dim = int(dim * given.get("partial_rotary_factor", 1.0))
    return Frequencies(1.0 / (given["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)), 1.0)
