"""Quantised models on disk: the same bits in seconds, and a sentence for a file that is not right."""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import foredraft
import gguf_files
import tiny
from foredraft.bench.measure.arms import ArmSpec, LoopArm, StockArm, make_arms
from foredraft.cli import main
from foredraft.compose.options import LoadOptions
from foredraft.core.errors import ForedraftError, ModelError, OptionError
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.generator import Generator
from foredraft.files.write import partial_name
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.loading.load import load_model
from foredraft.model.native.outline import Outline
from foredraft.model.native.saved import FILE, save_weights
from native import needs_compiler

pytestmark = needs_compiler
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "seed": 3}
PROMPT = [5, 6, 7, 5, 6]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    model = tiny.build("llama", **SIZES)
    model.generation_config.eos_token_id = [3, 4]
    model.save_pretrained(place)
    return place


@pytest.fixture
def saved(source: Path, tmp_path: Path) -> Path:
    foredraft.quantize(source, tmp_path / "saved")
    return tmp_path / "saved"


def logits(generator: Generator) -> torch.Tensor:
    return generator.engine.target.stock_logits(torch.tensor([PROMPT]))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text", "phi3"])
@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_a_saved_model_has_the_bits_of_the_one_that_is_quantised(name: str, weights: str, tmp_path: Path):
    """With biases, norms of heads, fused matrices, tied and untied output layers."""
    model = tiny.build(name, **{**SIZES, "seed": None}, tie_word_embeddings=name == "qwen2")
    model.save_pretrained(tmp_path / "model")
    done: list[str] = []
    foredraft.quantize(tmp_path / "model", tmp_path / "out", weights, done.append)
    assert len(done) == len(set(done)) > 10
    ours, other = foredraft.load(tmp_path / "out", "none"), foredraft.load(tmp_path / "model", "none", weights=weights)
    assert ours.engine.target.weights == weights
    assert torch.equal(logits(ours), logits(other))
    size = sum(each.nbytes for each in load_file(tmp_path / "out" / FILE).values())
    floats = sum(each.nbytes for each in model.state_dict().values())
    assert size < (0.33 if weights == "int8" else 0.2) * floats


def test_a_weight_is_on_disk_before_the_next_is_read(tmp_path: Path):
    model = tiny.build("llama", **SIZES, num_hidden_layers=40)
    weights, living, sizes = model.state_dict(), list[weakref.ref[torch.Tensor]](), list[int]()

    def source(name: str) -> torch.Tensor:
        assert sum(each() is not None for each in living) <= 1  # the one before, until its place is taken
        found = weights[name].clone()
        living.append(weakref.ref(found))
        sizes.append((tmp_path / partial_name(FILE)).stat().st_size)
        return found

    save_weights(tmp_path, Outline.of(model), source, "int8")
    whole, largest = (tmp_path / FILE).stat().st_size, max(each.nbytes for each in weights.values())
    assert sizes == sorted(sizes) and sizes[-1] > whole - 2 * largest > whole / 2


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0", "F16"])
def test_a_file_stays_as_it_is(kind: str, tmp_path: Path):
    gguf_files.writer().write(tmp_path / "model.gguf", tiny.build("llama", **SIZES), kind=kind)
    for weights in ("int4", "int8"):
        foredraft.quantize(tmp_path / "model.gguf", tmp_path / weights, weights)
        ours = foredraft.load(tmp_path / weights, "none")
        assert torch.equal(logits(ours), logits(foredraft.load(tmp_path / "model.gguf", "none", weights=weights)))


def test_what_is_beside_the_weights_is_kept(tmp_path: Path):
    foredraft.quantize("sample", tmp_path / "out", "int8")
    ours, other = foredraft.load(tmp_path / "out", "none"), foredraft.load("sample", "none", weights="int8")
    asked = "def add(a, b):"
    assert ours.generate(asked, max_new_tokens=12).text == other.generate(asked, max_new_tokens=12).text
    assert ours.eos_token_ids == other.eos_token_ids
    assert ours.engine.target.max_length == other.engine.target.max_length


def test_as_target_and_as_draft(source: Path, saved: Path):
    ours = foredraft.load(saved, f"draft_model:{saved}")
    result = ours.generate(PROMPT, max_new_tokens=12)
    assert result.tokens == foredraft.load(source, "none", weights="int4").generate(PROMPT, max_new_tokens=12).tokens
    assert ours.eos_token_ids == (3, 4) and result.stats.accepted > 0
    mixed = foredraft.load(source, f"draft_model:{saved}", dtype="float32")
    assert isinstance(mixed.engine.target, CausalLM)
    expected = foredraft.load(source, "none").generate(PROMPT, max_new_tokens=12).tokens
    assert mixed.generate(PROMPT, max_new_tokens=12).tokens == expected


def test_where_floats_are_needed_the_original_is_asked_for(saved: Path):
    with pytest.raises(OptionError, match="holds weights in int4: leave weights out"):
        foredraft.load(saved, "none", weights="int8")
    with pytest.raises(ForedraftError, match="only the CPU engine runs: use the original model"):
        load_model(str(saved))
    assert foredraft.load(saved, "none", weights="auto").engine.target.weights == "int4"


@pytest.mark.parametrize("weights", ["int4", "int8", None])
def test_arms_of_transformers_run_the_rounded_weights(weights: str | None, source: Path, saved: Path):
    """As floats: every matrix is the engine's to the last bit, and not the checkpoint's."""
    place = source if weights else saved
    specs = [ArmSpec.parse(text) for text in ("none", "transformers", f"transformers_assisted:{place}")]
    ours, plain, assisted = make_arms(specs, str(place), LoadOptions(weights=weights, max_batch_size=1))
    assert isinstance(ours, LoopArm) and isinstance(plain, StockArm) and isinstance(assisted, StockArm)
    assert assisted._assistant is not None
    target: Any = ours.generator.engine.target
    original = tiny.build("llama", **SIZES).model.layers[1]
    for model in (plain._model.model, assisted._assistant.model):
        layer, packed = model.model.layers[1], target.decoder.layers[1]
        assert model.dtype == torch.float32
        assert torch.equal(layer.mlp.down_proj.weight, packed.down.dequantised())
        assert torch.equal(layer.self_attn.k_proj.weight, packed.qkv.dequantised()[64:96])
        assert torch.equal(model.lm_head.weight, target.decoder.head.dequantised())
        assert not torch.equal(layer.mlp.down_proj.weight, original.mlp.down_proj.weight)
    ids = torch.tensor([PROMPT])
    logits = plain._model.model(ids).logits
    assert (logits - target.stock_logits(ids)).std() < 0.1 * logits.std(), "only activations are rounded otherwise"
    assert len(plain.run([PROMPT], SamplingParams(max_new_tokens=4)).tokens[0]) > 0


def test_arms_of_transformers_keep_a_model_that_the_engine_does_not_run(tmp_path: Path):
    model = tiny.build("gpt2")
    model.save_pretrained(tmp_path)
    (arm,) = make_arms([ArmSpec.parse("transformers")], str(tmp_path), LoadOptions(weights="int8"))
    assert isinstance(arm, StockArm)
    assert all(torch.equal(a, b) for a, b in zip(arm._model.model.parameters(), model.parameters(), strict=True))


def test_the_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["quantize", str(source), str(tmp_path / "out"), "--weights", "int8"]) == 0
    assert f"Wrote {source} in int8 to {tmp_path / 'out'}." in " ".join(capsys.readouterr().err.split())
    assert main(["inspect", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engine"] == "native"
    assert main(["quantize", str(source), str(source)]) == 2
    assert main(["quantize", str(source), str(tmp_path / "out"), "--weights", "auto"]) == 2
    assert "weights must be int4 or int8" in capsys.readouterr().err


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The tokenizers package raises an exception of no class for it."""

    def full(self: object, folder: object, **given: object) -> None:
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", full)
    with pytest.raises(ModelError, match=r"^Cannot write to '.*': No space left on device \(os error 28\)\.$"):
        foredraft.quantize("sample", tmp_path / "out")


def test_models_that_the_engine_does_not_run_are_not_saved(tmp_path: Path):
    tiny.build("gpt2").save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="no kernels for the type gpt2"):
        foredraft.quantize(tmp_path / "model", tmp_path / "out")
    tiny.build("llama").save_pretrained(tmp_path / "odd")
    with pytest.raises(ModelError, match="48 inputs, which is no multiple of 32"):
        foredraft.quantize(tmp_path / "odd", tmp_path / "out")


NAME = "model.layers.0.self_attn.q_proj.weight"


def resized(part: str, change: Any) -> Any:
    return lambda tensors, metadata: tensors.update({f"{NAME}.{part}": change(tensors[f"{NAME}.{part}"]).contiguous()})


DAMAGE: dict[str, tuple[Any, str]] = {
    "codes of another width": (resized("codes", lambda x: x[:, 1:]), "wrong shape or type"),
    "fewer codes": (resized("codes", lambda x: x[1:]), "wrong shape or type"),
    "codes of one dimension": (resized("codes", lambda x: x.flatten()), "wrong shape or type"),
    "no codes": (resized("codes", lambda x: x[:0]), "wrong shape or type"),
    "codes in floats": (resized("codes", lambda x: x.half()), "wrong shape or type"),
    "fewer scales": (resized("scales", lambda x: x[:, :1]), "wrong shape or type"),
    "scales in float32": (resized("scales", lambda x: x.float()), "wrong shape or type"),
    "fewer minima": (resized("minima", lambda x: x[1:]), "wrong shape or type"),
    "no minima": (lambda tensors, metadata: tensors.pop(f"{NAME}.minima"), f"{NAME} is missing"),
    "fewer rows": (
        lambda tensors, metadata: [
            tensors.update({name: tensors[name][:16].contiguous()}) for name in list(tensors) if NAME in name
        ],
        "the config says",
    ),
    "a norm of another size": (
        lambda tensors, metadata: tensors.update({"model.norm.weight": torch.ones(8)}),
        "the config says",
    ),
    "another version": (lambda tensors, metadata: metadata.update(version="2"), "of another version"),
    "another format": (lambda tensors, metadata: metadata.pop("format"), "holds no weights of foredraft quantize"),
    "unknown weights": (lambda tensors, metadata: metadata.update(weights="int3"), "holds no weights of"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_crafted_file_gets_a_sentence(name: str, saved: Path):
    change, said = DAMAGE[name]
    tensors = load_file(saved / FILE)
    metadata = {"format": "foredraft quantised weights", "version": "1", "weights": "int4"}
    change(tensors, metadata)
    save_file(tensors, saved / FILE, metadata)
    with pytest.raises(ModelError, match=said):
        foredraft.load(saved, "none")


@pytest.mark.parametrize("keep", [0, 4, 100, 5000])
def test_a_file_that_was_cut_off_gets_a_sentence(keep: int, saved: Path):
    (saved / FILE).write_bytes((saved / FILE).read_bytes()[:keep])
    with pytest.raises(ModelError, match="is damaged"):
        foredraft.load(saved, "none")


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"])
def test_a_config_of_another_model_gets_a_sentence(key: str, saved: Path):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, key: 2 * config[key]}))
    with pytest.raises(ModelError):
        foredraft.load(saved, "none")


def test_the_file_holds_codes_and_not_the_kernels_layout(source: Path, saved: Path):
    """What a reader on another processor computes from it are the weights."""
    tensors, target = load_file(saved / FILE), foredraft.load(source, "none", weights="int4").engine.target
    codes, scales, minima = (tensors[f"model.embed_tokens.weight.{part}"] for part in ("codes", "scales", "minima"))
    values = torch.stack([codes & 15, codes >> 4], 2).flatten(1).unflatten(1, (-1, 32)).float()
    weight = (values * scales.float()[..., None] + minima.float()[..., None]).flatten(1)
    assert torch.allclose(weight, target.embedding(), atol=1e-6)
