"""Writes a GGUF file of a Hugging Face folder, with weights of one type, for comparisons with other engines.

Names of tensors come from the gguf package. Linear layers and the embedding take the type where their width allows,
vectors stay in float32; llama.cpp's own quantiser mixes types and searches for better scales, this one does neither.

    PYTHONPATH=src python benchmarks/write_gguf.py path/to/folder model.gguf --type Q4_0 --split smollm
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase

NAMES = {"gemma3_text": "gemma3"}
"""GGUF's names of models, where they are not transformers'."""

INTERLEAVED = ("llama", "granite", "smollm3")
OFFSET = ("gemma", "gemma2", "gemma3")
OWN = {
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "sliding_window": "attention.sliding_window",
    },
    "gemma3": {
        "final_logit_softcapping": "final_logit_softcapping",
        "sliding_window": "attention.sliding_window",
    },
    "granite": {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    },
    "phi3": {
        "sliding_window": "attention.sliding_window",
        "original_max_position_embeddings": "rope.scaling.original_context_length",
    },
}
"""Config values of some models, and their keys."""

COMMON = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "vocab_size": "vocab_size",
}
SCALING = {
    "factor": "scaling.factor",
    "original_max_position_embeddings": "scaling.original_context_length",
    "attention_factor": "scaling.yarn_attn_factor",
    "beta_fast": "scaling.yarn_beta_fast",
    "beta_slow": "scaling.yarn_beta_slow",
}

SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
"""Those of Llama 3.2, but for the vocabulary."""


def write(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    kind: str = "F32",
    split: str = "",
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write a file as llama.cpp's converter does.

    Args:
        kind: the type of matrices, such as Q4_0, where their width is a multiple of the block.
        split: llama.cpp's name for the tokenizer's split; "llama" for a SentencePiece tokenizer.
        metadata: further entries, or other values for those that would be written; None leaves one out.
    """
    config = model.config.get_text_config()
    name = NAMES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, name)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    entries = {**_values(config, name), **(_vocabulary(tokenizer, split) if tokenizer else {}), **(metadata or {})}
    for key, value in entries.items():
        _add(writer, key, value)
    for tensor, array in _tensors(model, config, name).items():
        fits = array.ndim > 1 and array.shape[-1] % gguf.GGML_QUANT_SIZES[Type[kind]][0] == 0
        chosen = Type[kind] if fits else Type.F32
        writer.add_tensor(tensor, gguf.quants.quantize(array, chosen), raw_dtype=chosen)
    _finish(writer)


def write_random(path: Path, shape: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a Llama model of random weights in Q4_0, in the memory of the file: for speed, not for texts."""
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 4096, "tie_word_embeddings": True}
    config = LlamaConfig(**sizes, **shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    writer, source = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    for key, value in {**_values(config, "llama"), **_vocabulary(tokenizer, "gpt-2")}.items():
        _add(writer, key, value)
    for key, weight in model.named_parameters():
        stem, _, suffix = key.rpartition(".")
        tensor = f"{names.get_name(stem)}.{suffix}"
        if weight.ndim == 1:
            writer.add_tensor(tensor, np.ones(weight.shape, dtype=np.float32))
        else:
            writer.add_tensor(tensor, _random_blocks(source, *weight.shape), raw_dtype=Type.Q4_0)
    _finish(writer)


def _random_blocks(source: np.random.Generator, outputs: int, inputs: int) -> np.ndarray:
    """Rows of Q4_0: for each 32 inputs a scale, with which outputs have about the size of inputs, and random codes."""
    blocks = source.integers(0, 256, (outputs, inputs // 32, 18), dtype=np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(inputs**-0.5 / 4.6).tobytes(), dtype=np.uint8)
    return blocks.reshape(outputs, -1)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _values(config: Any, name: str) -> dict[str, Any]:
    """Metadata from the config."""
    values = config.to_dict()
    found = {ours: values[theirs] for theirs, ours in {**COMMON, **OWN.get(name, {})}.items() if values.get(theirs)}
    rope = config.rope_parameters
    size = values.get("head_dim") or config.hidden_size // config.num_attention_heads
    if "full_attention" in rope:
        found["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    found["rope.freq_base"] = float(rope["rope_theta"])
    found["rope.dimension_count"] = int(size * rope.get("partial_rotary_factor", 1.0))
    found["attention.key_length"] = found["attention.value_length"] = size
    if rope["rope_type"] in ("linear", "yarn"):
        found["rope.scaling.type"] = rope["rope_type"]
        found |= {f"rope.{key}": rope[theirs] for theirs, key in SCALING.items() if rope.get(theirs) is not None}
    return {f"{name}.{key}": value for key, value in found.items()}


def _tensors(model: PreTrainedModel, config: Any, name: str) -> dict[str, np.ndarray]:
    """Arrays in float32 by their names in the file."""
    names = gguf.get_tensor_name_map(
        next(arch for arch, each in gguf.MODEL_ARCH_NAMES.items() if each == name), config.num_hidden_layers
    )
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found = {}
    for key, weight in model.named_parameters():  # tied ones once
        stem, _, suffix = key.rpartition(".")
        weight = weight.detach().float()
        if name in INTERLEAVED and (part := stem.rpartition(".")[2]) in heads:
            halves = weight.view(heads[part], 2, -1, *weight.shape[1:])
            weight = halves.transpose(1, 2).reshape(weight.shape)
        if name in OFFSET and stem.endswith("norm"):
            weight = weight + 1
        found[f"{names.get_name(stem)}.{suffix}"] = weight.contiguous().numpy()
    rope = config.rope_parameters
    for tensor, factors in {
        "rope_freqs.weight": _llama3(config) if rope.get("rope_type") == "llama3" else None,
        "rope_factors_long.weight": rope.get("long_factor"),
        "rope_factors_short.weight": rope.get("short_factor"),
    }.items():
        if factors is not None:
            found[tensor] = np.array(factors, dtype=np.float32)
    return found


def _llama3(config: Any) -> list[float]:
    """What Llama 3's scaling divides each frequency by."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    size = 2 * len(scaled)
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, size, 2).float() / size)
    return (plain / scaled).tolist()


def _vocabulary(tokenizer: PreTrainedTokenizerBase, split: str) -> dict[str, Any]:
    """Metadata of a tokenizer of the tokenizers library."""
    from json import loads

    state = loads(tokenizer.backend_tokenizer.to_str())
    added = {each["id"]: each for each in state["added_tokens"]}
    tokens = dict(
        sorted(
            {
                **{v: k for k, v in state["model"]["vocab"].items()},
                **{i: e["content"] for i, e in added.items()},
            }.items()
        )
    )
    kinds = [gguf.TokenType.NORMAL for _ in tokens]
    for index, each in added.items():
        kinds[index] = gguf.TokenType.CONTROL if each["special"] else gguf.TokenType.USER_DEFINED
    found: dict[str, Any] = {"tokens": list(tokens.values())}
    if split == "llama":
        unknown = state["model"]["unk_token"]
        for index, token in tokens.items():
            if token == unknown:
                kinds[index] = gguf.TokenType.UNKNOWN
            elif len(token) == 6 and token.startswith("<0x"):
                kinds[index] = gguf.TokenType.BYTE
        ranks = {"".join(pair): -float(rank) for rank, pair in reversed(list(enumerate(state["model"]["merges"])))}
        found |= {"model": "llama", "pre": "default", "scores": [ranks.get(token, -1e4) for token in tokens.values()]}
    else:
        found |= {"model": "gpt2", "pre": split, "merges": [" ".join(pair) for pair in state["model"]["merges"]]}
    found["token_type"] = [int(kind) for kind in kinds]
    for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        number = getattr(tokenizer, f"{name}_token_id")
        found[f"{key}_token_id"] = number
    ids = tokenizer("a")["input_ids"]
    found["add_bos_token"] = tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]
    entries = {f"tokenizer.ggml.{key}": value for key, value in found.items()}
    return entries | ({"tokenizer.chat_template": tokenizer.chat_template} if tokenizer.chat_template else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a folder of transformers")
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--type", default="Q8_0", choices=["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
    )
    parser.add_argument("--split", required=True, help="tokenizer.ggml.pre: gpt-2, llama-bpe, smollm, qwen2, ...")
    chosen = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(chosen.folder, dtype=torch.float32)
    write(chosen.out, model, AutoTokenizer.from_pretrained(chosen.folder), kind=chosen.type, split=chosen.split)


if __name__ == "__main__":
    main()
