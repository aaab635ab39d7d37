"""A transformers config from the metadata of a GGUF file."""

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from foredraft.model.gguf.architectures import ARCHITECTURES, Architecture
from foredraft.model.gguf.blocks import dequantize
from foredraft.model.gguf.file import GgufError, GgufFile, shown

_MOST = (1 << 31) - 1
"""The largest count in a config."""

_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of the models that scale queries by the hidden size per head; the file does not say so."""

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Llama 3.1's and 3.2's rotary scaling. A file has only the factors that come out of it."""

_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}


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
    found = [number for kind in ("eos", "eot", "eom") if (number := token_id(file, kind)) is not None]
    kinds = file.metadata.get("tokenizer.ggml.token_type")
    kinds = kinds if isinstance(kinds, np.ndarray) and len(kinds) >= len(tokens) else None
    named = {number: token for number, token in enumerate(tokens) if token in ENDS}
    if kinds is not None:
        named |= {n: token for n, token in enumerate(tokens) if token in _CONTROL_ENDS and kinds[n] == CONTROL}
    if {"<|return|>", "<|call|>"} <= set(named.values()):  # there, <|end|> ends a message and not the turn
        named = {number: token for number, token in named.items() if token != "<|end|>"}
    return list(dict.fromkeys([*found, *named]))


def token_id(file: GgufFile, kind: str) -> int | None:
    """The id of a special token, such as "eos"; SentencePiece has defaults. None if it is missing or no token's id."""
    tokens, number = file.metadata.get("tokenizer.ggml.tokens"), file.metadata.get(f"tokenizer.ggml.{kind}_token_id")
    if number is None and file.text("tokenizer.ggml.model") == "llama":
        number = _SENTENCE_PIECE.get(kind)
    if isinstance(tokens, list) and isinstance(number, int) and not isinstance(number, bool):
        return number if 0 <= number < len(tokens) else None
    return None


CONTROL = 3
"""The type of tokens that text does not contain."""

_SENTENCE_PIECE = {"unknown": 0, "bos": 1, "eos": 2}

ENDS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<EOT>",
    "_<EOT>", "[EOT]", "<end_of_utterance>", "<|return|>", "<|call|>", "<|eot|>", "<|end_of_turn|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
}  # fmt: skip
"""Tokens after which an answer is over, of whatever type: converters write control, user-defined and normal. llama.cpp
stops at the same, but for <|eot|> and <|end_of_turn|> where a file does not name them as its end, and at what separates
files (<|file_sep|>), where the original models go on."""

_CONTROL_ENDS = {"</s>", "<eos>", "[EOS]"}
"""Ends of a text if they are control tokens; in some vocabularies they are text."""


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
        "bos_token_id": token_id(file, "bos"),
        "pad_token_id": token_id(file, "padding"),
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
    """Rows of the embedding; they may be more than the tokens, but not fewer."""
    info = file.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2 or info.shape[1] != hidden:
        raise GgufError(f"{file.path!r} has no embedding of the size that it names: it holds no whole language model.")
    rows, tokens = info.shape[0], file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > rows:
        raise GgufError(
            f"{file.path!r} has {len(tokens)} tokens and an embedding of {rows}: the model does not know "
            f"{shown(tokens[rows])}. Resize the original's embedding (resize_token_embeddings) and convert it again."
        )
    return rows


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
    """Whether linear layers have biases, for configs that have a flag for them. Then all have: see ``GgufWeights``."""
    biased = {name.split(".")[-2].partition("_")[0] for name in file.tensors if name.endswith(".bias")}
    found = {"attention_bias": "attn" in biased, "mlp_bias": "ffn" in biased}
    known = {each.name for each in fields(CONFIG_MAPPING[architecture.model_type])}
    return {flag: value for flag, value in found.items() if flag in known}


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
    kind, factor = values.get("rope.scaling.type"), _factor(values)
    if kind not in (None, "none", "linear", "yarn", "longrope"):
        raise values.wrong("rope.scaling.type", kind)
    if kind in ("none", "longrope") or (kind is None and factor == 1.0):  # longrope without factors is no scaling
        return {"rope_type": "default"}
    if kind != "yarn":  # a factor alone is linear, as in llama.cpp
        return {"rope_type": "linear", "factor": factor}
    original = values.count("rope.scaling.original_context_length", config["max_position_embeddings"])
    found: dict[str, Any] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for key, name in _YARN.items():
        if values.get(f"rope.scaling.{key}") is not None:
            found[name] = values.number(f"rope.scaling.{key}")
    if values.get("rope.scaling.attn_factor") is not None:  # beside the usual one
        found["attention_factor"] = values.number("rope.scaling.attn_factor") * (0.1 * math.log(factor) + 1.0)
    return found


def _factor(values: _Values) -> float:
    """What positions are divided by; 1 if the file does not say, or says 0. Old files have another key."""
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        if values.get(key):
            return float(values.number(key))
    return 1.0


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
