"""transformers models of the engine's rounded weights: of all layers, or of the first to compare with the engine."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from foredraft.core.errors import ModelError, first_line
from foredraft.model.hf.causal_lm import MODEL_ERRORS
from foredraft.model.hf.empty import model_class
from foredraft.model.hf.hub import quiet
from foredraft.model.hf.taps import Taps
from foredraft.model.hf_types import PreTrainedModel
from foredraft.model.native.decoder import Decoder, PackedLayer
from foredraft.model.native.families import FAMILIES
from foredraft.model.native.model import NativeLM
from foredraft.model.native.outline import Outline
from foredraft.model.native.weights import PackedMatrix

_TOKENS = 24


def deviation(engine: NativeLM) -> float:
    """The error of hidden states after the first layers of all types, as a share of their deviation.

    Only activations, keys and values are rounded differently. The median over some tokens, since a model may be at a
    loss after some, and then any rounding changes much.

    Raises:
        ModelError: transformers cannot run the layers.
    """
    shape = engine.decoder.shape
    count = max(shape.kinds.index(kind) for kind in set(shape.kinds)) + 1
    ids = (torch.arange(1, _TOKENS + 1) * 997 % shape.vocabulary)[None]
    found = engine.read(ids, (count,))[count][0]
    try:
        layers = _first_layers(engine.outline, engine.decoder, count, ids[0])
        with torch.inference_mode(), Taps(layers, [count]) as taps:
            layers(torch.arange(_TOKENS)[None], use_cache=False)
            expected = taps.take()[count][0]
    except MODEL_ERRORS as error:
        raise ModelError(f"{engine.name} cannot run a plain forward: {first_line(error).rstrip('.')}.") from error
    return float(((found - expected).std(1) / expected.std(1).clamp(min=1e-6)).median())


def dequantised(outline: Outline, decoder: Decoder) -> PreTrainedModel:
    """A transformers model in float32 whose weights are those of the engine, as they are rounded."""
    reference = _first_layers(outline, decoder, decoder.shape.layers, torch.arange(decoder.shape.vocabulary))
    reference.generation_config = outline.generation_config
    return reference


def _first_layers(outline: Outline, decoder: Decoder, count: int, ids: Tensor) -> Any:
    """A transformers model of the first layers, whose vocabulary are these tokens."""
    config: Any = copy.deepcopy(outline.config.get_text_config())
    kind = model_class(outline.config)
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = count, len(ids), None
    config.tie_word_embeddings = False
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:count]
    with torch.device("meta"):
        shapes = {name: each.shape for name, each in kind(copy.deepcopy(config)).named_parameters()}
    offset = FAMILIES[config.model_type].norm_offset
    state = {
        "model.embed_tokens.weight": decoder.embedding.rows(ids),
        "lm_head.weight": decoder.head.rows(ids),
        "model.norm.weight": decoder.final_norm - offset,
    }
    for number in range(count):
        state.update(_state(decoder.layers[number], f"model.layers.{number}.", shapes, offset, config.model_type))
    with quiet():
        return kind.from_pretrained(None, config=config, state_dict=state, dtype=torch.float32).eval()


def _state(
    layer: PackedLayer, prefix: str, shapes: dict[str, torch.Size], offset: float, kind: str
) -> Iterator[tuple[str, Tensor]]:
    """A layer's weights by their names in transformers."""
    parts = {
        "self_attn.": (layer.qkv, ("q_proj", "k_proj", "v_proj", "qkv_proj")),
        "self_attn": (layer.out, (".o_proj",)),
        "mlp.": (layer.up, ("gate_proj", "up_proj", "gate_up_proj")),
        "mlp": (layer.down, (".down_proj",)),
    }
    for place, (matrix, names) in parts.items():
        yield from _split(matrix, [f"{prefix}{place}{name}" for name in names], shapes)
    for place, norm in layer.norms.items():
        name = getattr(FAMILIES[kind].norms, place, None) or f"self_attn.{place[0]}_norm"
        yield f"{prefix}{name}.weight", norm - offset


def _split(matrix: PackedMatrix, names: list[str], shapes: dict[str, torch.Size]) -> Iterator[tuple[str, Tensor]]:
    """Rows of a matrix, and of its bias, for each of these names that the model has."""
    weights, first = matrix.dequantised(), 0
    for name in names:
        if f"{name}.weight" not in shapes:
            continue
        rows = slice(first, first + shapes[f"{name}.weight"][0])
        yield f"{name}.weight", weights[rows]
        if f"{name}.bias" in shapes and matrix.bias is not None:
            yield f"{name}.bias", matrix.bias[: matrix.outputs][rows]
        first = rows.stop
