"""GGUF files on the native engine: codes as the file has them, and outputs that drafts do not change."""

from pathlib import Path

import pytest
import torch

import foredraft
import gguf_files
import tiny
from foredraft.engine.policy import Constant
from foredraft.model.gguf.config import config_of
from foredraft.model.gguf.file import GgufFile
from foredraft.model.gguf.load import empty_model, weights_of
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.loading.load import load_model
from foredraft.model.loading.quantised import native_model
from foredraft.model.native import build as native_build, library as native_library
from foredraft.model.native.model import NativeLM
from foredraft.model.native.weights import PackedMatrix
from native import needs_compiler

pytestmark = needs_compiler
KEPT = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 8, "Q5_1": 8, "Q8_0": 8}
"""Types that stay as they are, and the bits that the engine stores them in."""


def written(path: Path, name: str = "llama", kind: str = "Q4_1", **changes: object) -> Path:
    tokenizer = gguf_files.byte_level(size=299)
    model = tiny.build(name, seed=0, intermediate_size=64, vocab_size=300, **changes)
    gguf_files.writer().write(path / f"{name}.gguf", model, tokenizer, kind=kind, split="smollm")
    return path / f"{name}.gguf"


def on_engine(path: Path, weights: str = "auto") -> NativeLM:
    file = GgufFile(path)
    empty = empty_model(config_of(file))
    return native_model(empty, weights_of(file, empty), weights)


def rows(matrix: PackedMatrix) -> torch.Tensor:
    return matrix.rows(torch.arange(matrix.outputs))


@pytest.mark.parametrize("kind", KEPT)
def test_weights_are_those_of_the_file_to_the_last_bit(kind: str, tmp_path: Path):
    path = written(tmp_path, kind=kind)
    layer, floats = on_engine(path).decoder.layers[1], load_model(str(path)).model.model.layers[1]
    attention, mlp = floats.self_attn, floats.mlp
    parts = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert layer.qkv.bits == layer.down.bits == KEPT[kind]
    assert torch.equal(rows(layer.qkv), parts)
    assert torch.equal(rows(layer.out), attention.o_proj.weight)
    assert torch.equal(rows(layer.up), torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
    assert torch.equal(rows(layer.down), mlp.down_proj.weight)


def test_four_bits_of_a_file_in_eight(tmp_path: Path):
    decoder = on_engine(written(tmp_path, kind="Q8_0"), "int4").decoder
    assert decoder.layers[0].down.bits == 4 and decoder.head.bits == 8
    decoder = on_engine(written(tmp_path, kind="Q4_0"), "int8").decoder
    assert decoder.layers[0].down.bits == decoder.head.bits == 4


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "phi3", "granite", "olmo2"])
def test_logits_are_near_those_of_the_same_weights_in_floats(name: str, tmp_path: Path):
    path = written(tmp_path, name, "Q8_0", **({"tie_word_embeddings": True} if name == "gemma2" else {}))
    ids = torch.arange(24)[None] * 7 % 300
    with torch.no_grad():
        expected = load_model(str(path)).model(ids).logits[0]
    found = on_engine(path).stock_logits(ids)[0]
    assert float(((found - expected).std(1) / expected.std(1)).median()) < 0.05


def test_a_file_of_quantised_weights_runs_on_the_engine_by_default(tmp_path: Path):
    path = written(tmp_path, kind="Q4_0")
    with foredraft.load(path, "none") as ours, foredraft.load(path, "none", weights="auto") as asked:
        assert isinstance(ours.engine.target, NativeLM)
        ids = torch.arange(9)[None]
        assert torch.equal(ours.engine.target.stock_logits(ids), asked.engine.target.stock_logits(ids))
    with foredraft.load(path, "none", dtype="float32") as floats:
        assert isinstance(floats.engine.target, CausalLM)
    with foredraft.load(written(tmp_path, "qwen2", kind="F16"), "none") as floats:
        assert isinstance(floats.engine.target, CausalLM) and floats.engine.target.dtype == torch.float32


@pytest.mark.parametrize("drafter", ["prompt_lookup", "draft_model"])
def test_drafts_give_the_output_of_plain_decoding(drafter: str, tmp_path: Path):
    path = written(tmp_path)
    spec = f"draft_model:{path}" if drafter == "draft_model" else drafter
    prompt = "The quick 12 The quick 12 The"
    with foredraft.load(path, "none", weights="auto") as plain:
        assert isinstance(plain.engine.target, NativeLM)
        expected = plain.generate(prompt, max_new_tokens=30)
    with foredraft.load(path, spec, weights="auto", policy=Constant(4)) as g:
        found = g.generate(prompt, max_new_tokens=30)
    assert found.tokens == expected.tokens and found.stats.drafted > 0
    if drafter == "draft_model":
        assert found.stats.acceptance_length >= 2, "its best token is the target's"


def test_another_tokenizer(tmp_path: Path):
    path = written(tmp_path)
    with foredraft.load(path, "none", weights="auto", tokenizer=gguf_files.byte_level(size=299)) as g:
        assert isinstance(g.engine.target, NativeLM) and g.generate("The quick", max_new_tokens=4).tokens


def test_what_the_engine_does_not_know_is_read_in_floats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = written(tmp_path, "smollm3")
    with foredraft.load(path, "none", weights="auto") as g:
        assert isinstance(g.engine.target, CausalLM) and g.engine.target.weights is None
    path = written(tmp_path)
    monkeypatch.setattr(native_build, "compiler", lambda: None)
    monkeypatch.setattr(native_build, "BUILT", native_build.SOURCES)
    native_library.library.cache_clear()
    try:
        with foredraft.load(path, "none", weights="int8") as g:
            assert isinstance(g.engine.target, CausalLM) and g.engine.target.weights == "int8"
            assert g.generate("The quick", max_new_tokens=4).tokens
    finally:
        native_library.library.cache_clear()
