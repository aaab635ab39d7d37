"""Sizes of a model from its config alone: no weights are read."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from foredraft.core.errors import ModelError, first_line
from foredraft.model.loading.load import model_config, quiet
from foredraft.model.loading.placement import as_dtype


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What a model takes.

    ``weights``: bytes of its weights, tied ones once. ``layer``: bytes of one decoder layer, the mean of all.
    ``kv_token``: bytes of keys and values of one token in all layers. ``kv_heads``: heads that tensor parallelism can
    share out. ``context``: positions, None if the config names no limit.
    """

    weights: int
    layer: int
    kv_token: int
    layers: int
    kv_heads: int
    hidden: int
    vocabulary: int
    context: int | None
    bytes_per_value: int


def model_sizes(name: str, dtype: str = "auto") -> ModelSizes:
    """Sizes of a causal LM from the config of a folder, a hub name or a bundled model.

    Args:
        dtype: of weights, keys and values; "auto" for the config's own.

    Raises:
        ModelError: there is no config, it is not that of a causal LM, or the size of its KV cache cannot be found.
        OptionError: unknown dtype.
    """
    chosen = None if dtype == "auto" else as_dtype(dtype)
    config = model_config(name)
    with quiet():
        try:
            with torch.device("meta"):
                model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        except ModelError:
            raise
        except Exception as error:  # transformers raises many types
            raise ModelError(f"Cannot read the config of a causal LM from {name!r}: {first_line(error)}") from error
    text = config.get_text_config()
    kind = chosen or _own_dtype(config)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    outer = {id(weight): weight for part in ends if part is not None for weight in part.parameters()}  # tied: one
    total = sum(weight.numel() for weight in model.parameters())
    inner = total - sum(weight.numel() for weight in outer.values())
    cached = _cached(name, model)
    return ModelSizes(
        weights=total * kind.itemsize,
        layer=inner // text.num_hidden_layers * kind.itemsize,
        kv_token=sum(part.numel() for part in cached) * kind.itemsize,
        layers=text.num_hidden_layers,
        kv_heads=min(part.shape[1] for part in cached),
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        context=getattr(text, "max_position_embeddings", None),
        bytes_per_value=kind.itemsize,
    )


def _cached(name: str, model: Any) -> list[Tensor]:
    """Keys and values ``[1, heads, 1, width]`` that a forward of one token leaves, without data."""
    try:
        with torch.no_grad():  # in bfloat16, which all kernels without data take
            output = model.bfloat16()(torch.zeros(1, 1, dtype=torch.long, device="meta"), use_cache=True)
        cache = output["cache" if "cache" in output else "past_key_values"]  # from transformers 5.24 on, and before
        return [part for layer in cache.layers for part in (layer.keys, layer.values)]
    except Exception as error:  # depends on the model
        raise ModelError(
            f"The size of the KV cache of {name!r} is unknown: its forward needs data, or it has layers without keys "
            "and values."
        ) from error


def _own_dtype(config: PreTrainedConfig) -> torch.dtype:
    own: Any = config.dtype or config.get_text_config().dtype
    return own if isinstance(own, torch.dtype) else torch.float32
