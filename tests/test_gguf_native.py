"""GGUF files on the native engine: codes as the file has them, and outputs that drafts do not change."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import foredraft
import gguf_files
import tiny
from foredraft.core.errors import ModelError
from foredraft.engine.policy import Constant
from foredraft.model.gguf.config import config_of
from foredraft.model.gguf.file import GgufFile
from foredraft.model.gguf.weights import GgufWeights
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.loading import quantised
from foredraft.model.loading.load import load_model
from foredraft.model.loading.quantised import native_model
from foredraft.model.native import build as native_build, library as native_library, probe_cache
from foredraft.model.native.model import NativeLM
from foredraft.model.native.outline import Outline
from foredraft.model.native.weights import Blocks, PackedMatrix
from native import needs_compiler
from processes import environment

pytestmark = needs_compiler
KEPT = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8}
"""Types that stay as they are, and the bits that the engine stores them in."""


def written(path: Path, name: str = "llama", kind: str = "Q4_1", **changes: object) -> Path:
    tokenizer = gguf_files.byte_level(size=299)
    model = tiny.build(name, seed=0, intermediate_size=64, vocab_size=300, **changes)
    gguf_files.writer().write(path / f"{name}.gguf", model, tokenizer, kind=kind, split="smollm")
    return path / f"{name}.gguf"


def on_engine(path: Path, weights: str = "auto") -> NativeLM:
    file = GgufFile(path)
    outline = Outline.of_config(config_of(file))
    return native_model(outline, GgufWeights(file, outline), weights)


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


K_HALVES = {"Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""First bytes of the factors of scales and minima in a block."""


def written_in_k(path: Path, kinds: Mapping[str, str]) -> Path:
    """A file whose matrices have random blocks with small scales: of the type of their part, else Q4_K."""
    model = tiny.build("qwen2", seed=0, hidden_size=256, intermediate_size=256, head_dim=64, vocab_size=300)
    gguf_files.writer().write(path, model, gguf_files.byte_level(size=299), split="qwen2")
    file, out = GgufFile(path), path.with_name("k.gguf")
    writer = gguf.GGUFWriter(out, "qwen2")
    for key, value in file.metadata.items():
        if key != "general.architecture":
            gguf_files.writer()._add(writer, key, value.tolist() if isinstance(value, np.ndarray) else value)
    random = np.random.default_rng(0)
    for name, info in file.tensors.items():
        kind = kinds.get(name.split(".")[-2], "Q4_K") if len(info.shape) > 1 else "F32"
        if kind == "F32":
            writer.add_tensor(name, file.data(name).contiguous().view(torch.float32).view(info.shape).numpy())
            continue
        raw = gguf.GGMLQuantizationType[kind]
        values, size = gguf.GGML_QUANT_SIZES[raw]
        blocks = random.integers(
            0, 256, (info.rows, info.row_bytes // info.kind.bytes * info.kind.values // values, size), np.uint8
        )
        for half in K_HALVES[kind]:
            scales = random.uniform(0.5, 1.5, blocks.shape[:2]) * (1e-4 if half != 2 else 7e-4)
            blocks[..., half : half + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
        writer.add_tensor(name, blocks.reshape(info.rows, -1), raw_dtype=raw)
    gguf_files.writer()._finish(writer)
    return out


MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "ffn_up": "Q5_K", "attn_output": "Q3_K", "token_embd": "Q6_K"}


@pytest.mark.parametrize("kinds", [MIXED, {"attn_k": "Q6_K"}], ids=["mixed", "one"])
def test_k_quants_run_as_they_are(kinds: Mapping[str, str], tmp_path: Path):
    """Q, K and V of several types are one product; weights are the file's to the last bit."""
    path = written_in_k(tmp_path / "model.gguf", kinds)
    floats, engine = load_model(str(path)).model, on_engine(path)
    for number, layer in enumerate(engine.decoder.layers):
        own = floats.model.layers[number]
        parts = [each.weight for each in (own.self_attn.q_proj, own.self_attn.k_proj, own.self_attn.v_proj)]
        assert torch.equal(rows(layer.qkv), torch.cat(parts)) and layer.qkv.next is not None
        assert torch.equal(rows(layer.up), torch.cat([own.mlp.gate_proj.weight, own.mlp.up_proj.weight]))
        assert torch.equal(rows(layer.down), own.mlp.down_proj.weight)
        assert torch.equal(rows(layer.out), own.self_attn.o_proj.weight)
    ids = torch.arange(24)[None] * 7 % 300
    with torch.no_grad():
        expected = floats(ids).logits[0]
    found = engine.stock_logits(ids)[0]
    assert float(((found - expected).std(1) / expected.std(1)).median()) < 0.02


def test_drafts_on_k_quants_give_the_output_of_plain_decoding(tmp_path: Path):
    path = written_in_k(tmp_path / "model.gguf", MIXED)
    options = {"max_new_tokens": 40, "temperature": 1.0, "seed": 3}
    with foredraft.load(path, "none") as plain, foredraft.load(path, f"draft_model:{path}", policy=Constant(4)) as g:
        assert isinstance(plain.engine.target, NativeLM) and plain.engine.target.decoder.layers[0].qkv.bits == 6
        prompts = ["The quick 12 The quick 12 The", "def add(a, b):"]
        expected = [each.tokens for each in plain.generate(prompts, **options)]
        assert [each.tokens for each in g.generate(prompts, **options)] == expected
        found = g.generate(prompts[0], **options)
        assert found.tokens == plain.generate(prompts[0], **options).tokens
        assert found.stats.acceptance_length > 2, "a draft of the same weights"


def test_k_quants_are_quantised_anew_where_four_bits_are_asked_for(tmp_path: Path):
    decoder = on_engine(written_in_k(tmp_path / "model.gguf", {"ffn_down": "Q6_K"}), "int4").decoder
    kept = PackedMatrix.of_blocks(
        decoder.library, [Blocks("w", 12, (torch.zeros(16, 144, dtype=torch.uint8),), 256)]
    ).form
    assert decoder.layers[0].up.form == kept and decoder.layers[0].down.form.bits == 4
    assert decoder.layers[0].down.form != kept


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


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[NativeLM]:
    """The models whose hidden states were compared with those of transformers."""
    found: list[NativeLM] = []
    deviation = quantised.deviation
    monkeypatch.setattr(quantised, "deviation", lambda engine: (found.append(engine), deviation(engine))[1])
    return found


def test_a_file_is_compared_with_transformers_once(tmp_path: Path, compared: list[NativeLM]):
    path, other = written(tmp_path), written(tmp_path, "qwen2")
    for _ in range(2):
        foredraft.load(str(path), "none").close()
    assert len(compared) == 1
    foredraft.load(str(path), "none", kv_cache_dtype="int8").close()
    foredraft.load(str(other), "none").close()
    assert len(compared) == 3, "other roundings and other models are compared, too"


def test_what_a_comparison_depends_on_is_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine, names = on_engine(written(tmp_path)), set()
    before = probe_cache._name(engine)
    monkeypatch.setattr(engine.outline.config, "rms_norm_eps", 0.5)
    names.add(probe_cache._name(engine))
    monkeypatch.undo()
    monkeypatch.setattr(probe_cache, "version", lambda name: "0")
    names.add(probe_cache._name(engine))
    monkeypatch.undo()
    monkeypatch.setattr(probe_cache, "_digest_of_code", lambda: "other")
    names.add(probe_cache._name(engine))
    monkeypatch.undo()
    assert before == probe_cache._name(engine) and before not in names and len(names) == 3
    monkeypatch.setattr(engine, "_contents", None)
    assert probe_cache._name(engine) is None


def test_a_model_that_failed_is_compared_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = written(tmp_path)
    monkeypatch.setattr(quantised, "deviation", lambda engine: float("nan"))
    for _ in range(2):
        with pytest.raises(ModelError, match="gives other states"):
            foredraft.load(str(path), "none")


def test_without_a_cache_to_write_to_each_load_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compared: list[NativeLM]
):
    path = written(tmp_path)
    monkeypatch.setattr(probe_cache, "folder", lambda: path / "no folder")
    for _ in range(2):
        foredraft.load(str(path), "none").close()
    assert len(compared) == 2


def test_a_loaded_model_is_compared_each_time(compared: list[NativeLM]):
    """Its code may have been changed."""
    for _ in range(2):
        foredraft.load(tiny.build("llama"), "none", weights="int8").close()
    assert len(compared) == 2


START = """
import sys
from pathlib import Path
from foredraft.cli import main
from foredraft.model.native import probe_cache
probe_cache.folder = lambda: Path(sys.argv[1])
assert main(["generate", "--raw", "abc", "-m", sys.argv[2], "--max-new-tokens", "2", "-q"]) == 0
slow = {"transformers.modeling_utils", "torch._dynamo", "torch.distributed.tensor", "scipy", "sympy"}
print(*sorted(slow & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("name", "left"), [("qwen2", []), ("llama", ["sympy", "torch._dynamo", "torch.distributed.tensor"])]
)
def test_the_second_start_imports_no_modelling_code(name: str, left: list[str], tmp_path: Path):
    """``left``: what the module of Llama's config in transformers imports."""
    path = written(tmp_path, name)
    command = [sys.executable, "-c", START, str(tmp_path / "compared"), str(path)]
    imported = []
    for _ in range(2):
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        imported.append(done.stdout.splitlines()[-1].split())
    assert "transformers.modeling_utils" in imported[0] and imported[1] == left
