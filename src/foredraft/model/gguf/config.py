"""A transformers config from the metadata of a GGUF file."""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedConfig

from foredraft.model.gguf.architectures import ARCHITECTURES, Architecture
from foredraft.model.gguf.blocks import dequantize
from foredraft.model.gguf.file import GgufError, GgufFile, shown

_MOST = (1 << 31) - 1
"""The largest count in a config."""

_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of the models that scale queries by the hidden size per head; the file does not say so."""

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Llama 3.1's and 3.2's rotary scaling. A file has only the factors that come out of it."""

_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}


def architecture_of(file: GgufFile) -> Architecture:
    """The file's row of the table.

    Raises:
        GgufError: the architecture is unknown, or the model is a mixture of experts.
    """
    name = file.text("general.architecture")
    if name not in ARCHITECTURES:
        raise GgufError(
            f"{file.path!r} has the architecture {shown(name)}; GGUF files can be read for {', '.join(ARCHITECTURES)}. "
            "Load the original model's folder instead."
        )
    if file.metadata.get(f"{name}.expert_count", 0):
        raise GgufError(
            f"{file.path!r} is a mixture of experts, which cannot be read from GGUF; load its folder instead."
        )
    return ARCHITECTURES[name]


def config_of(file: GgufFile) -> PreTrainedConfig:
    """The config of the model in a file.

    Raises:
        GgufError: the architecture is unknown, or a value is missing, impossible or not supported.
    """
    architecture = architecture_of(file)
    values = _Values(file)
    try:
        return AutoConfig.for_model(architecture.model_type, **_config(values, architecture))
    except GgufError:
        raise
    except Exception as error:  # transformers checks values in many ways
        message = " ".join(str(error).split())[:200].rstrip(".")
        raise GgufError(f"The metadata of {file.path!r} is no valid config: {message}.") from error


def end_ids(file: GgufFile) -> list[int]:
    """End-of-sequence ids: the file's own, and the tokens that end a turn or a text by their names."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    tokens = tokens if isinstance(tokens, list) else []
    keys = (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
    found = [number for key in keys if (number := token_id(file, key)) is not None]
    kinds = file.metadata.get("tokenizer.ggml.token_type")
    if isinstance(kinds, np.ndarray) and len(kinds) == len(tokens):
        found += [number for number in np.flatnonzero(kinds == 3).tolist() if tokens[number] in _ENDS]
    return list(dict.fromkeys(found))


def token_id(file: GgufFile, key: str) -> int | None:
    """A token's id in the metadata; None if it is missing or outside of the vocabulary."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    number = file.metadata.get(key)
    if isinstance(tokens, list) and isinstance(number, int) and not isinstance(number, bool):
        return number if 0 <= number < len(tokens) else None
    return None


_ENDS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<EOT>",
    "<|return|>",
}  # fmt: skip
"""Control tokens after which an answer is over; llama.cpp stops at the same."""


class _Values:
    """Metadata of the file's architecture, checked."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.name = file.text("general.architecture")

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.name}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer; an array must have one value for all layers."""
        value = self.get(key)
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MOST:
            raise self.wrong(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.wrong(key, value)
        return value if isinstance(value, int) else float(str(np.float32(value)))  # 1e-06, not 9.99999997e-07

    def factors(self, tensor: str) -> list[float] | None:
        """A vector among the tensors; None if it is missing."""
        info = self.file.tensors.get(tensor)
        if info is None:
            return None
        if len(info.shape) != 1 or info.shape[0] > 1024 or info.kind.name != "F32":
            raise GgufError(f"The tensor {tensor!r} of {self.file.path!r} has a wrong shape or type.")
        found = dequantize(info.kind, self.file.data(tensor), torch.float32).flatten()
        if not bool((found.isfinite() & (found > 0)).all()):
            raise GgufError(f"The tensor {tensor!r} of {self.file.path!r} has impossible values.")
        return found.tolist()

    def wrong(self, key: str, value: Any) -> GgufError:
        found = "missing" if value is None else shown(value)
        return GgufError(f"{self.file.path!r} cannot be read: its {self.name}.{key} is {found}.")


def _config(values: _Values, architecture: Architecture) -> dict[str, Any]:
    """Arguments of the config's class."""
    file = values.file
    heads, hidden = values.count("attention.head_count"), values.count("embedding_length")
    config: dict[str, Any] = {
        "vocab_size": _vocabulary(file, hidden),
        "hidden_size": hidden,
        "intermediate_size": values.count("feed_forward_length"),
        "num_hidden_layers": _layers(values),
        "num_attention_heads": heads,
        "num_key_value_heads": values.count("attention.head_count_kv", heads),
        "max_position_embeddings": values.count("context_length"),
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": end_ids(file) or None,
        "bos_token_id": token_id(file, "tokenizer.ggml.bos_token_id"),
        "pad_token_id": token_id(file, "tokenizer.ggml.padding_token_id"),
        **architecture.fixed,
    }
    for key, name in architecture.values.items():
        config[name] = values.number(key) if values.get(key) else None
    config |= _window(values, architecture)
    config |= _heads(values, architecture, config)
    config |= _biases(file, architecture)
    if architecture.window_pattern:
        config["layer_types"] = _windows(values, architecture, config["num_hidden_layers"])
    config["rope_parameters"] = _rotary(values, architecture, config)
    return config


def _vocabulary(file: GgufFile, hidden: int) -> int:
    info = file.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2 or info.shape[1] != hidden:
        raise GgufError(f"{file.path!r} has no embedding of the size that it names: it holds no whole language model.")
    return info.shape[0]


def _layers(values: _Values) -> int:
    """Layers, of which the file must have the tensors: the model is built before its weights are looked for."""
    layers = values.count("block_count")
    found = {match[1] for name in values.file.tensors if (match := re.match(r"blk\.(\d+)\.", name))}
    if found != {str(number) for number in range(min(layers, len(found) + 1))}:
        raise GgufError(f"{values.file.path!r} names {layers} layers and has tensors of {len(found)}.")
    return layers


def _heads(values: _Values, architecture: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    """The size of a head, and the scale of queries."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = values.count("attention.key_length", max(1, hidden // heads))
    if values.count("attention.value_length", size) != size:
        raise GgufError(f"{values.file.path!r} has keys and values of different sizes, which cannot be read.")
    found: dict[str, Any] = {"head_dim": size}
    if architecture.window_pattern:
        large = _27B[str(values.name)] == config["num_hidden_layers"]
        found["query_pre_attn_scalar"] = hidden // heads if large else size
    return found


def _biases(file: GgufFile, architecture: Architecture) -> dict[str, bool]:
    """Whether linear layers have biases, for configs that have a flag for them."""
    if architecture.model_type not in ("llama", "granite", "smollm3"):
        return {}
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def _window(values: _Values, architecture: Architecture) -> dict[str, int]:
    """The width of sliding windows, a whole number."""
    if not values.get("attention.sliding_window"):
        return {}
    if "attention.sliding_window" not in architecture.values:
        raise values.wrong("attention.sliding_window", values.get("attention.sliding_window"))
    return {"sliding_window": values.count("attention.sliding_window")}


def _windows(values: _Values, architecture: Architecture, layers: int) -> list[str]:
    """Which layers have a sliding window."""
    pattern = values.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray) and len(pattern) >= layers:
        sliding = [bool(each) for each in pattern[:layers]]
    else:
        every = values.count("attention.sliding_window_pattern", architecture.window_pattern)
        sliding = [(layer + 1) % every != 0 for layer in range(layers)]
    return ["sliding_attention" if each else "full_attention" for each in sliding]


def _rotary(values: _Values, architecture: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of the rotary embedding."""
    size, rotated = config["head_dim"], values.count("rope.dimension_count", config["head_dim"])
    base: dict[str, Any] = {"rope_theta": values.number("rope.freq_base", 10000.0)}
    if rotated != size:
        if not architecture.partial_rotary or rotated > size:
            raise values.wrong("rope.dimension_count", rotated)
        base["partial_rotary_factor"] = rotated / size
    full = {**base, **_scaling(values, config, rotated)}
    if values.name != "gemma3":
        return full
    local = {"rope_theta": values.number("rope.freq_base_swa", 10000.0), "rope_type": "default"}
    return {"full_attention": full, "sliding_attention": local}


def _scaling(values: _Values, config: Mapping[str, Any], rotated: int) -> dict[str, Any]:
    """The type of the rotary embedding, and its scaling."""
    if (factors := values.factors("rope_freqs.weight")) is not None:
        return _by_frequency(values, factors, rotated)
    if (long := values.factors("rope_factors_long.weight")) is not None:
        short = values.factors("rope_factors_short.weight")
        original = values.count("rope.scaling.original_context_length", config["max_position_embeddings"])
        return {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "original_max_position_embeddings": original,
        }
    kind = values.get("rope.scaling.type")
    if kind in (None, "none", "longrope"):  # longrope without factors is no scaling
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": values.number("rope.scaling.factor")}
    if kind != "yarn":
        raise values.wrong("rope.scaling.type", kind)
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": values.number("rope.scaling.factor"),
        "original_max_position_embeddings": values.count("rope.scaling.original_context_length"),
    }
    for key, name in {**_YARN, "yarn_attn_factor": "attention_factor", "attn_factor": "attention_factor"}.items():
        if values.get(f"rope.scaling.{key}") is not None:
            found[name] = values.number(f"rope.scaling.{key}")
    return found


def _by_frequency(values: _Values, factors: list[float], rotated: int) -> dict[str, Any]:
    """Llama 3's scaling, from what each frequency is divided by."""
    theta = values.number("rope.freq_base", 10000.0)
    frequencies = theta ** -(torch.arange(0, rotated, 2).float() / rotated)
    low, high, original = (float(each) for each in _LLAMA3.values())
    turns = original * frequencies / (2 * math.pi)  # of each frequency within the original context
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    if len(factors) == len(smooth) and smooth[-1] < 1:
        last = smooth[-1].item()
        factor = round((1 - last) / (1 / factors[-1] - last), 3)
        if torch.allclose(torch.tensor(factors), 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    return {
        "rope_type": "longrope",  # the one type that takes any factors
        "long_factor": factors,
        "short_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": values.count("context_length"),
    }
