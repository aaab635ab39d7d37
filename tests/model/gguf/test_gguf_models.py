"""Models from GGUF files: configs, weights and logits of the models that the files were written from."""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import foredraft
import gguf_files
import tiny
from foredraft.core.errors import OptionError
from foredraft.model.gguf.blocks import KEPT
from foredraft.model.gguf.config import config_of
from foredraft.model.gguf.file import GgufError, GgufFile
from foredraft.model.gguf.load import own_dtype
from foredraft.model.gguf.weights import GgufWeights
from foredraft.model.loading.load import load_model
from foredraft.model.loading.sizes import model_sizes
from foredraft.model.native.library import library
from foredraft.model.native.outline import Outline
from foredraft.model.native.weights import Blocks, floats_of

ROPE: dict[str, dict[str, Any]] = {
    "llama3": {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
    "longrope": {
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "short_factor": [1.0, 1.0, 2.0, 2.0],
        "original_max_position_embeddings": 64,
    },
}


def rope(kind: str, theta: float = 500000.0) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **ROPE[kind]}


LAYERS = {"num_hidden_layers": 7, "layer_types": None, "query_pre_attn_scalar": 8, "tie_word_embeddings": True}
GEMMA3_ROPE = {"full_attention": rope("linear"), "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}

KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, many keys": ("llama", {"num_key_value_heads": 4}),
    "llama 3": ("llama", {"rope_parameters": rope("llama3"), "max_position_embeddings": 1 << 17}),
    "llama, linear": ("llama", {"rope_parameters": rope("linear")}),
    "llama, yarn": ("llama", {"rope_parameters": rope("yarn")}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma": ("gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {**LAYERS, "final_logit_softcapping": 20.0}),
    "gemma3": ("gemma3_text", {**LAYERS, "rope_parameters": GEMMA3_ROPE}),
    "phi3": ("phi3", {"sliding_window": 8}),
    "phi3, long": ("phi3", {"rope_parameters": rope("longrope"), "original_max_position_embeddings": 64}),
    "phi3, partial": (
        "phi3",
        {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "granite": (
        "granite",
        {"attention_multiplier": 0.25, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "olmo2": ("olmo2", {"tie_word_embeddings": False}),
}


def original(name: str) -> PreTrainedModel:
    kind, changes = MODELS[name]
    return tiny.build(kind, seed=0, **changes)


def logits(model: PreTrainedModel) -> torch.Tensor:
    tokens = torch.arange(40)[None] * 7 % 96
    with torch.no_grad():
        return model(tokens).logits


def settings(model: PreTrainedModel) -> dict[str, Any]:
    """The config but for what says where a model comes from."""
    left_out = {"architectures", "dtype", "_name_or_path", "transformers_version"}
    return {key: value for key, value in model.config.to_dict().items() if key not in left_out}


@pytest.mark.parametrize("name", MODELS)
def test_a_file_gives_the_model_that_it_was_written_from(name: str, tmp_path: Path):
    model, path = original(name), tmp_path / "model.gguf"
    gguf_files.writer().write(path, model)
    loaded = load_model(str(path))
    found = loaded.model
    assert loaded.tokenizer is None and not found.training and found.dtype == torch.float32
    assert settings(found) == settings(model)
    expected, state = model.state_dict(), found.state_dict()
    assert expected.keys() == state.keys()
    for key, weight in expected.items():  # norms of Gemma are stored plus 1, which rounds
        assert torch.allclose(weight, state[key], rtol=0, atol=1e-6 if "norm" in key and "gemma" in name else 0), key
    assert torch.equal(logits(found), logits(model))


@pytest.mark.parametrize(
    "name, kind",
    [*(("llama", kind) for kind in KINDS), ("qwen2", "Q4_0"), ("qwen3", "Q8_0"), ("phi3", "Q5_1"), ("gemma2", "Q4_1")],
)
def test_quantised_weights_are_those_that_transformers_reads(name: str, kind: str, tmp_path: Path):
    """Transformers takes heads of 128 in Qwen 3, and the default scale of queries in Gemma 2, whatever a file says."""
    changes = {"qwen3": {"head_dim": 128}, "gemma2": {"head_dim": 256, "tie_word_embeddings": True}}.get(name, {})
    model = tiny.build(name, seed=0, intermediate_size=64, vocab_size=300, **changes)
    gguf_files.writer().write(
        tmp_path / "model.gguf", model, gguf_files.byte_level(size=299), kind=kind, split="smollm"
    )
    ours = load_model(str(tmp_path / "model.gguf")).model
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    state = theirs.state_dict()
    assert all(torch.equal(weight, state[key]) for key, weight in ours.state_dict().items())
    assert torch.equal(logits(ours), logits(theirs))


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants(kind: str, tmp_path: Path):
    """Blocks with random bits but small scales, in place of each matrix."""
    path = tmp_path / "model.gguf"
    model = tiny.build("llama", hidden_size=256, intermediate_size=256, head_dim=64, num_hidden_layers=1)
    gguf_files.writer().write(path, model)
    raw = gguf.GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[raw]
    halves = {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}[kind]
    tensors: dict[str, np.ndarray] = {}
    for name, array in arrays(path).items():
        if array.ndim > 1:
            blocks = np.random.default_rng(0).integers(0, 256, (len(array), size * array.shape[1] // values), np.uint8)
            for half in halves:
                blocks[:, half : half + 2] = np.full(1, 1e-4, np.float16).view(np.uint8)
            array = blocks
        tensors[name] = array
    other = rewritten(path, tensors, "other", raw=raw)
    ours = load_model(str(other)).model
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=other.name, dtype=torch.float32)
    state = theirs.state_dict()
    assert all(torch.equal(weight, state[key]) for key, weight in ours.state_dict().items())


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_blocks_and_floats_are_the_same_weights(name: str, tmp_path: Path):
    model = tiny.build(name, seed=0, intermediate_size=64)
    gguf_files.writer().write(tmp_path / "model.gguf", model, kind="Q4_1")
    file = GgufFile(tmp_path / "model.gguf")
    weights = GgufWeights(file, Outline.of_config(config_of(file)))
    kept = [key for key in weights.names if all(kind.name in KEPT for kind in weights.kinds(key))]
    assert len(kept) > 8 and "model.layers.1.mlp.down_proj.weight" in kept
    for key in weights.names:
        blocks = weights.blocks(key)
        assert isinstance(blocks, Blocks) == (key in kept)
        assert blocks is None or torch.equal(floats_of(library(), blocks), weights.tensor(key))


def rewritten(path: Path, tensors: dict[str, np.ndarray], name: str, raw: Any = None) -> Path:
    """Another file with the metadata of one, but with these tensors; bytes are of the type ``raw``."""
    file, out = GgufFile(path), path.with_name(f"{name}.gguf")
    writer = gguf.GGUFWriter(out, file.text("general.architecture") or "")
    for key, value in file.metadata.items():
        if key != "general.architecture":
            gguf_files.writer()._add(writer, key, value)
    for key, array in tensors.items():
        writer.add_tensor(key, array, raw_dtype=raw if array.dtype == np.uint8 else None)
    gguf_files.writer()._finish(writer)
    return out


def arrays(path: Path) -> dict[str, np.ndarray]:
    file = GgufFile(path)
    return {
        key: file.data(key).contiguous().view(torch.float32).view(info.shape).numpy()
        for key, info in file.tensors.items()
    }


def test_q_k_and_v_in_one_tensor_or_in_three(tmp_path: Path):
    path = tmp_path / "model.gguf"
    for name in ("llama", "phi3"):
        model = original(name)
        gguf_files.writer().write(path, model)
        tensors = arrays(path)
        for layer in range(2):
            parts = [f"blk.{layer}.attn_{part}.weight" for part in ("q", "k", "v")]
            fused = f"blk.{layer}.attn_qkv.weight"
            if name == "llama":
                tensors[fused] = np.concatenate([tensors.pop(part) for part in parts])
            else:
                cut = np.split(tensors.pop(fused), [32, 48])
                tensors |= dict(zip(parts, cut, strict=True))
        found = load_model(str(rewritten(path, tensors, "other"))).model
        assert torch.equal(logits(found), logits(model))


def test_any_scaling_of_frequencies(tmp_path: Path):
    """Factors that are no Llama 3's: each frequency is divided by its own."""
    model, path = original("llama"), tmp_path / "model.gguf"
    gguf_files.writer().write(path, model)
    factors = np.array([1, 1.5, 7, 3], dtype=np.float32)
    found = load_model(str(rewritten(path, {**arrays(path), "rope_freqs.weight": factors}, "other"))).model
    model.model.rotary_emb.inv_freq /= torch.from_numpy(factors)
    assert torch.allclose(logits(found), logits(model), atol=1e-5)


@pytest.mark.parametrize(
    "metadata, expected",
    [
        ({"scaling.factor": 4.0}, rope("linear")),
        ({"scale_linear": 4.0}, rope("linear")),
        ({"scaling.type": "linear", "scale_linear": 4.0}, rope("linear")),
        ({"scaling.type": "linear"}, {**rope("linear"), "factor": 1.0}),
        ({"scaling.type": "linear", "scaling.factor": 0.0}, {**rope("linear"), "factor": 1.0}),
        ({"scaling.type": "none", "scaling.factor": 4.0}, {"rope_type": "default", "rope_theta": 500000.0}),
        ({"scaling.factor": 1.0}, {"rope_type": "default", "rope_theta": 500000.0}),
        ({}, {"rope_type": "default", "rope_theta": 500000.0}),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0},
            {**rope("yarn"), "beta_fast": 32.0, "original_max_position_embeddings": 512},
        ),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.attn_factor": 0.5},
            {
                **rope("yarn"),
                "beta_fast": 32.0,
                "original_max_position_embeddings": 512,
                "attention_factor": 0.5 * (1 + 0.1 * math.log(4)),
            },
        ),
    ],
)
def test_scaling_without_all_its_values_is_llama_cpp_s(
    metadata: dict[str, Any], expected: dict[str, Any], tmp_path: Path
):
    """A factor without a type is linear; the original context is by default the context."""
    expected_model = tiny.build("llama", seed=0, rope_parameters=expected, max_position_embeddings=512)
    plain = tiny.build("llama", seed=0, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    given = {f"llama.rope.{key}": value for key, value in metadata.items()}
    gguf_files.writer().write(tmp_path / "model.gguf", plain, metadata={"llama.context_length": 512, **given})
    assert torch.equal(logits(load_model(str(tmp_path / "model.gguf")).model), logits(expected_model))


@pytest.mark.parametrize(
    "kind, parts",
    [
        ("llama", ["attn_q", "attn_k", "attn_v"]),
        ("llama", ["attn_v"]),
        ("llama", ["attn_output"]),
        ("llama", ["ffn_down"]),
        ("llama", ["attn_k", "ffn_gate", "ffn_up"]),
        ("granite", ["attn_q", "attn_k", "attn_v"]),
        ("qwen3", ["attn_q", "attn_k", "attn_v"]),
        ("gemma", ["attn_q"]),
        ("qwen2", ["attn_q", "attn_k"]),
    ],
)
def test_biases_of_some_layers(kind: str, parts: list[str], tmp_path: Path):
    """What a file leaves out is 0, here in the second layer and in the other parts."""
    flags = {} if kind == "qwen2" else {"attention_bias": True, "mlp_bias": True}
    model = tiny.build(kind, seed=0, **flags)
    random = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if name.endswith(".bias"):
            weight.data = torch.randn(weight.shape, generator=random)
    path = tmp_path / "model.gguf"
    gguf_files.writer().write(path, model)
    kept = {
        name: array
        for name, array in arrays(path).items()
        if not name.endswith(".bias") or (name.startswith("blk.0.") and name.split(".")[2] in parts)
    }
    names = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
    names |= {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
    for name, weight in model.named_parameters():
        if name.endswith(".bias") and not (".0." in name and name.split(".")[-2] in {names[part] for part in parts}):
            weight.data.zero_()
    other = rewritten(path, kept, "other")
    assert torch.allclose(logits(load_model(str(other)).model), logits(model), atol=1e-5)
    with foredraft.load(str(other), "none", weights="int8") as g, foredraft.load(model, "none", weights="int8") as h:
        assert g.generate([5, 6, 7], max_new_tokens=8).tokens == h.generate([5, 6, 7], max_new_tokens=8).tokens


def test_a_bias_that_a_model_has_not(tmp_path: Path):
    path = tmp_path / "model.gguf"
    gguf_files.writer().write(path, tiny.build("qwen2"))
    more = {**arrays(path), "blk.0.attn_output.bias": np.ones(32, np.float32)}
    refused(rewritten(path, more, "more"), "has model.layers.0.self_attn.o_proj.bias and 0 more weights that its model")


def test_more_tokens_than_rows(tmp_path: Path):
    """As converters write files whose tokenizer has added tokens, and whose embedding was not resized."""
    tokenizer, path = gguf_files.byte_level(), tmp_path / "model.gguf"
    for rows, fits in ((len(tokenizer) - 2, False), (len(tokenizer), True), (len(tokenizer) + 31, True)):
        gguf_files.writer().write(path, tiny.build("llama", vocab_size=rows), tokenizer, split="smollm")
        if fits:
            assert load_model(str(path)).model.config.vocab_size == rows
        else:
            refused(path, f"has {len(tokenizer)} tokens and an embedding of {rows}: the model does not know")


def test_sizes_and_types(tmp_path: Path):
    model, path = tiny.build("llama", tie_word_embeddings=True), tmp_path / "model.gguf"
    gguf_files.writer().write(path, model, kind="F16")
    assert own_dtype(GgufFile(path)) == torch.float16
    assert load_model(str(path), dtype="auto").model.dtype == torch.float16
    assert load_model(str(path), dtype="bfloat16").model.dtype == torch.bfloat16
    sizes = model_sizes(str(path), "float32")
    assert sizes.weights == 4 * sum(weight.numel() for weight in model.parameters())
    gguf_files.writer().write(path, model, kind="Q8_0")
    assert own_dtype(GgufFile(path)) == torch.bfloat16


def refused(path: Path, match: str, **options: Any) -> None:
    with pytest.raises((GgufError, OptionError), match=match) as caught:
        load_model(str(path), **options)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_read_gets_a_sentence(tmp_path: Path):
    model, path = original("llama"), tmp_path / "model.gguf"
    write = gguf_files.writer().write
    for metadata, match in {
        "llama.expert_count 8": "is a mixture of experts",
        "llama.block_count 3": "names 3 layers and has tensors of 2",
        "llama.block_count 1": "names 1 layers and has tensors of 2",
        "llama.block_count 4000000000": "its llama.block_count is 4000000000",
        "llama.embedding_length 64": "has no embedding of the size that it names",
        "llama.attention.head_count 0": "its llama.attention.head_count is 0",
        "llama.attention.head_count 5": "shape|no valid config",
        "llama.attention.key_length 4": "keys and values of different sizes",
        "llama.attention.sliding_window 7": "its llama.attention.sliding_window is 7",
        "llama.rope.dimension_count 6": "its llama.rope.dimension_count is 6",
        "split.count 3": "one of 3 parts: join them",
    }.items():
        key, value = metadata.split()
        write(path, model, metadata={key: int(value)})
        refused(path, match)
    write(path, model, metadata={"llama.context_length": None})
    refused(path, "its llama.context_length is missing")
    write(path, model, metadata={"llama.rope.scaling.type": "magic"})
    refused(path, "its llama.rope.scaling.type is 'magic'")
    write(path, model, metadata={"llama.rope.freq_base": float("nan")})
    refused(path, "its llama.rope.freq_base is nan")
    write(path, model)
    refused(path, "quantization_config does not apply to a GGUF file", options={"quantization_config": {}})
    refused(rewritten(path, {"token_embd.weight": np.zeros((96, 32), np.float32)}, "few"), "has tensors of 0")
    more = {**arrays(path), "blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    refused(rewritten(path, more, "more"), "has the tensor 'blk.0.attn_sinks.weight', which a llama model has not")
    less = {key: value for key, value in arrays(path).items() if key != "blk.1.ffn_up.weight"}
    refused(rewritten(path, less, "less"), "lacks model.layers.1.mlp.up_proj.weight and 0 more")
    wrong = {**arrays(path), "blk.1.ffn_up.weight": np.zeros((47, 32), np.float32)}
    refused(rewritten(path, wrong, "wrong"), "has model.layers.1.mlp.up_proj.weight in the shape \\(47, 32\\)")
    gguf_files.writer().write(path, tiny.build("starcoder2"), metadata={"general.architecture": "starcoder2"})
    refused(path, "has the architecture 'starcoder2'; GGUF files can be read for llama, ")
