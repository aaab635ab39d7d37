"""Sizes of a model from its config alone: no weights are read."""

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from foredraft.core.errors import ModelError, first_line
from foredraft.files.read import read_json
from foredraft.model.gguf.file import GgufFile
from foredraft.model.gguf.load import is_gguf, is_quantised_file, own_dtype
from foredraft.model.hf.hub import fetch_file, local_path, quiet
from foredraft.model.loading.bundled import resolve
from foredraft.model.loading.load import model_config
from foredraft.model.loading.placement import as_dtype
from foredraft.model.native.saved import FILE, saved_weights


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
    """Sizes of a causal LM from the config of a folder, a hub name, a GGUF file or a bundled model.

    Args:
        dtype: of weights, keys and values. "auto": weights that are quantised as they are stored, with keys and values
            in half precision if the native engine runs them; others in the config's own dtype.

    Raises:
        ModelError: there is no config, it is not that of a causal LM, or the size of its KV cache cannot be found.
        OptionError: unknown dtype.
    """
    chosen = None if dtype == "auto" else as_dtype(dtype)
    config, stored = model_config(name), _stored(name) if chosen is None else None
    with quiet():
        try:
            with torch.device("meta"):
                model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        except ModelError:
            raise
        except Exception as error:  # transformers raises many types
            raise ModelError(f"Cannot read the config of a causal LM from {name!r}: {first_line(error)}") from error
    text = config.get_text_config()
    kind = chosen or (_own_dtype(config) if stored is None else stored.states)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    outer = {id(weight): weight for part in ends if part is not None for weight in part.parameters()}  # tied: one
    total = sum(weight.numel() for weight in model.parameters())
    inner = total - sum(weight.numel() for weight in outer.values())
    cached = _cached(name, model)
    weights = total * kind.itemsize if stored is None else stored.weights
    return ModelSizes(
        weights=weights,
        layer=weights * inner // (total * text.num_hidden_layers),
        kv_token=sum(part.numel() for part in cached) * kind.itemsize,
        layers=text.num_hidden_layers,
        kv_heads=min(part.shape[1] for part in cached),
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        context=getattr(text, "max_position_embeddings", None),
        bytes_per_value=kind.itemsize,
    )


class _Stored(NamedTuple):
    """Bytes of weights in files, and the dtype of keys and values beside them."""

    weights: int
    states: torch.dtype


def _stored(name: str) -> _Stored | None:
    """What the weights of a GGUF file, or the quantised ones of a local folder, take; None for others."""
    if is_gguf(path := resolve(name)):
        file = GgufFile(fetch_file(path))
        size = sum(info.rows * info.row_bytes for info in file.tensors.values())
        return _Stored(size, torch.float16 if is_quantised_file(file) else own_dtype(file))
    folder = local_path(path)
    if folder is None:
        return None
    if saved_weights(folder) is not None:
        return _Stored((folder / FILE).stat().st_size, torch.float16)
    config = read_json(folder / "config.json", ModelError)
    size = sum(each.stat().st_size for each in folder.glob("*.safetensors"))
    return _Stored(size, torch.float16) if size and "quantization_config" in config else None


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
