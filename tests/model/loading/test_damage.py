"""Damage to folders of models and heads: one sentence, at once, that names what is wrong."""

import json
import math
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import foredraft
import gguf_files
import tiny
from foredraft import quantize
from foredraft.core.errors import ForedraftError
from foredraft.heads.formats import inspect_head
from foredraft.model.gguf.file import GgufFile
from foredraft.model.loading.bundled import resolve
from foredraft.model.loading.load import load_model
from foredraft.model.loading.tokenizers import as_tokenizer

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"), "~", max_position_embeddings=64)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices can be saved in codes."""
    return tiny.save(tmp_path_factory.mktemp("wide"), "~", intermediate_size=64)


def head() -> Path:
    return Path(resolve("sample-eagle3"))


def put(file: str, content: str | bytes) -> Damage:
    return lambda folder: (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())


def cut(file: str, size: int) -> Damage:
    return lambda folder: os.truncate(folder / file, size)


def flip(file: str, place: int) -> Damage:
    """Invert the bits of one byte."""

    def change(folder: Path) -> None:
        content = bytearray((folder / file).read_bytes())
        content[place] ^= 0xFF
        (folder / file).write_bytes(content)

    return change


def config(**fields: Any) -> Damage:
    """Change fields of config.json; None removes one."""

    def change(folder: Path) -> None:
        found = {**json.loads((folder / "config.json").read_text()), **fields}
        (folder / "config.json").write_text(
            json.dumps({key: value for key, value in found.items() if value is not None})
        )

    return change


def layer(**fields: Any) -> Damage:
    """Change fields of the layer of a head in the format of speculators."""

    def change(folder: Path) -> None:
        old = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
        config(transformer_layer_config={**old, **fields})(folder)

    return change


def special(file: str, kind: str) -> Damage:
    """Something whose bytes a reader would wait for, or that has no end, in place of a file."""

    def change(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(folder / file)
        else:
            (folder / file).symlink_to("/dev/zero")

    return change


def numbers(name: str, value: float | torch.dtype) -> Damage:
    """Put a number into the middle of a weight, or change its type."""

    def change(folder: Path) -> None:
        state = load_file(folder / WEIGHTS)
        if isinstance(value, torch.dtype):
            state[name] = state[name].to(value)
        else:
            state[name].flatten()[state[name].numel() // 2] = value
        save_file(state, folder / WEIGHTS, {"format": "pt"})

    return change


WEIGHTS = "model.safetensors"
NORM, MATRIX = "model.layers.1.input_layernorm.weight", "model.layers.1.mlp.up_proj.weight"
MODELS: dict[str, tuple[Damage, str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "has no weights"),
    "empty config": (put("config.json", ""), "config.json' is not JSON"),
    "config is null": (put("config.json", "null"), "config.json' is not a JSON object"),
    "config is a list": (put("config.json", "[]"), "config.json' is not a JSON object"),
    "config is nested": (put("config.json", "[" * 100_000), "config.json' is nested too deep"),
    "config is no text": (put("config.json", b"\xff\xfe{"), "config.json' is not JSON"),
    "no type": (config(model_type=None), "model_type"),
    "unknown type": (config(model_type="nope"), "nope"),
    "no heads": (config(num_attention_heads=0), "num_attention_heads .* is 0, not a whole number, 1 or more"),
    "heads that do not divide": (config(num_attention_heads=3), "': The hidden size .* is not a multiple"),
    "no key heads": (config(num_key_value_heads=0), "num_key_value_heads .* is 0"),
    "10**9 layers": (config(num_hidden_layers=10**9), "num_hidden_layers .* is 1000000000, more than 10000"),
    "5000 layers": (config(num_hidden_layers=5000), "num_hidden_layers .* the weights have only 21 tensors"),
    "a layer too many": (config(num_hidden_layers=3), "are incomplete: model.layers.2.input_layernorm.weight"),
    "width of 10**12": (config(hidden_size=10**12), "hidden_size .* is 1000000000000, and the weights have only"),
    "width of 10**12 + 1": (config(hidden_size=10**12 + 1), "': The hidden size .* is not a multiple"),
    "width below zero": (config(hidden_size=-1), "hidden_size .* is -1, not"),
    "no width": (config(hidden_size=0), "hidden_size .* is 0, not"),
    "width is text": (config(hidden_size="x"), "hidden_size .* is 'x', not"),
    "another width": (config(hidden_size=64), "do not have the shapes that its config.json requires"),
    "vocabulary of 10**12": (config(vocab_size=10**12), "vocab_size .* and the weights have only"),
    "another vocabulary": (config(vocab_size=95), "do not have the shapes"),
    "end is text": (config(eos_token_id="x"), "eos_token_id .* is 'x', not a token id"),
    "end of generation is text": (put("generation_config.json", '{"eos_token_id": "x"}'), "eos_token_id is 'x'"),
    "generation is nested": (put("generation_config.json", "[" * 100_000), "is nested too deep"),
    "unknown activation": (config(hidden_act="nope"), "KeyError 'nope'"),
    "wrong type": (config(rms_norm_eps="x"), "Field 'rms_norm_eps' expected float"),
    "empty weights": (put(WEIGHTS, ""), "safetensors' is damaged: header too small"),
    "weights cut in the header": (cut(WEIGHTS, 100), "safetensors' is damaged: invalid header length"),
    "weights cut in the data": (cut(WEIGHTS, 20_000), "safetensors' is damaged: incomplete metadata"),
    "length of the header": (flip(WEIGHTS, 2), "safetensors' is damaged"),
    "first byte of the header": (flip(WEIGHTS, 8), "safetensors' is damaged"),
    "a name in the header": (flip(WEIGHTS, 100), "safetensors' is damaged"),
    "tokenizer": (put("tokenizer.json", "{"), "Cannot load the tokenizer .* pass tokenizer="),
    "tokenizer's config": (put("tokenizer_config.json", "[]"), "Cannot load the tokenizer"),
    "weights are a pipe": (special(WEIGHTS, "pipe"), "model.safetensors' is a named pipe, not a file"),
    "config is a pipe": (special("config.json", "pipe"), "config.json' is a named pipe, not a file"),
    "generation is a pipe": (special("generation_config.json", "pipe"), "generation_config.json' is a named pipe"),
    "tokenizer is a pipe": (special("tokenizer.json", "pipe"), "tokenizer.json' is a named pipe, not a file"),
    "saved weights are a pipe": (special("foredraft.safetensors", "pipe"), "foredraft.safetensors' is a named pipe"),
    "an index is a pipe": (special("model.safetensors.index.json", "pipe"), "index.json' is a named pipe"),
    "weights are a device": (special(WEIGHTS, "device"), "model.safetensors' is a device, not a file"),
    "code": (config(model_type="own", auto_map={"AutoModelForCausalLM": "own.Model"}), "own"),
}


def sentence(call: Callable[[], object]) -> str:
    with pytest.raises(ForedraftError) as caught:
        call()
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    return str(caught.value)


@pytest.mark.parametrize("damage", MODELS)
def test_a_damaged_model_is_one_sentence(damage: str, model: Path, tmp_path: Path):
    folder = copytree(model, tmp_path / "copy")
    change, part = MODELS[damage]
    change(folder)
    said = sentence(lambda: load_model(str(folder)))
    assert re.search(part, said), said


@pytest.mark.parametrize(
    "name, value, part",
    [
        (NORM, math.nan, f"weight {NORM} .*has NaN or infinite values"),
        (NORM, math.inf, f"weight {NORM} .*has NaN or infinite values"),
        (MATRIX, math.nan, f"weight {MATRIX} .*has NaN or infinite values"),
        (MATRIX, -math.inf, f"weight {MATRIX} .*has NaN or infinite values"),
        (NORM, torch.int64, f"weight {NORM} .*is damaged: it has the type I64"),
        (MATRIX, torch.uint8, f"weight {MATRIX} .*is damaged: it has the type U8"),
        (MATRIX, torch.bool, f"weight {MATRIX} .*is damaged: it has the type BOOL"),
    ],
)
@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_damaged_numbers_are_one_sentence(
    name: str, value: Any, part: str, weights: str | None, wide: Path, tmp_path: Path
):
    folder = copytree(wide, tmp_path / "copy")
    numbers(name, value)(folder)
    if weights is not None:
        assert re.search(part, said := sentence(lambda: quantize(folder, tmp_path / "saved", weights=weights))), said
        assert not (tmp_path / "saved" / "foredraft.safetensors").exists()
    said = sentence(lambda: foredraft.load(folder, "none", weights=weights))
    assert re.search(part, said), said


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("part", ["scales", "minima"])
def test_damaged_scales_are_one_sentence(part: str, weights: str, wide: Path, tmp_path: Path):
    quantize(wide, tmp_path / "saved", weights=weights)
    file = tmp_path / "saved" / "foredraft.safetensors"
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
    state = load_file(file)
    state[f"{MATRIX}.{part}"][3, 0] = math.nan
    save_file(state, file, about)
    said = sentence(lambda: foredraft.load(tmp_path / "saved", "none"))
    assert f"The weight {MATRIX} has NaN or infinite values" in said


@pytest.mark.parametrize("kind, place", [("Q8_0", 0), ("Q4_1", 2), ("Q4_0", 0)])
@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}])
def test_damaged_blocks_of_a_gguf_file_are_one_sentence(kind: str, place: int, options: dict[str, Any], tmp_path: Path):
    path = tmp_path / "model.gguf"
    gguf_files.writer().write(path, tiny.build("llama", intermediate_size=64), kind=kind)
    info = GgufFile(path).tensors["blk.1.ffn_up.weight"]
    content = bytearray(path.read_bytes())
    content[info.start + place : info.start + place + 2] = b"\x00\x7e"  # NaN as a scale or minimum
    path.write_bytes(content)
    assert f"The weight {MATRIX} has NaN or infinite values" in sentence(
        lambda: foredraft.load(str(path), "none", **options)
    )


def test_logits_that_do_not_fit_their_type_are_one_sentence(model: Path):
    loaded = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        loaded.lm_head.weight.mul_(1e38).mul_(1e3 if loaded.lm_head.weight.abs().max() < 1 else 1)
        loaded.lm_head.weight.clamp_(-3e38, 3e38)
    assert "The logits of this LlamaForCausalLM are NaN or infinite in float32" in sentence(
        lambda: foredraft.load(loaded, "none")
    )


def test_a_pipe_is_no_gguf_file_and_no_tokenizer(tmp_path: Path):
    os.mkfifo(tmp_path / "model.gguf")
    os.mkfifo(tmp_path / "tokenizer.json")
    assert "is a named pipe, not a file" in sentence(lambda: load_model(str(tmp_path / "model.gguf")))
    assert "is a named pipe, not a file" in sentence(lambda: as_tokenizer(tmp_path))


HEADS: dict[str, tuple[Damage, str]] = {
    "weights are a pipe": (special(WEIGHTS, "pipe"), "model.safetensors' is a named pipe, not a file"),
    "config is a pipe": (special("config.json", "pipe"), "config.json' is a named pipe, not a file"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "Cannot read the config.json of the head"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "has no weights"),
    "config is nested": (put("config.json", "[" * 100_000), "is nested too deep"),
    "config is null": (put("config.json", "null"), "is not a JSON object"),
    "10**9 layers": (layer(num_hidden_layers=10**9), "num_hidden_layers .* is 1000000000, not at most 1024"),
    "width of 10**12": (layer(hidden_size=10**12), "no multiple of the target's width"),
    "width is text": (layer(hidden_size="x"), "hidden_size .* is 'x', not a positive integer"),
    "no heads": (layer(num_attention_heads=0), "num_attention_heads .* is 0, not a positive integer"),
    "no vocabulary": (config(draft_vocab_size=0), "draft_vocab_size .* is 0, not a positive integer"),
    "length of the header": (flip(WEIGHTS, 2), "truncated or not a safetensors file"),
    "first byte of the header": (flip(WEIGHTS, 8), "truncated or not a safetensors file"),
    "a name in the header": (flip(WEIGHTS, 100), "truncated or not a safetensors file"),
    "weights cut in the data": (cut(WEIGHTS, 20_000), "truncated or not a safetensors file"),
}


@pytest.mark.parametrize("damage", HEADS)
def test_a_damaged_head_is_one_sentence(damage: str, tmp_path: Path):
    folder = copytree(head(), tmp_path / "copy")
    change, part = HEADS[damage]
    change(folder)
    said = sentence(lambda: inspect_head(str(folder)))
    assert re.search(part, said), said


@pytest.mark.parametrize("of", ["model", "head"])
def test_every_bit_of_a_header_counts(of: str, model: Path, tmp_path: Path):
    """Whatever byte of a safetensors header is inverted, the folder is refused, or it loads as it is."""
    folder = copytree(model if of == "model" else head(), tmp_path / "copy")
    content = (folder / WEIGHTS).read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    for place in random.Random(0).sample(range(size), 40):
        (folder / WEIGHTS).write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        try:
            _ = load_model(str(folder)) if of == "model" else inspect_head(str(folder))
        except ForedraftError as error:
            assert "\n" not in str(error)


@contextmanager
def without_rights() -> Iterator[None]:
    """Run without root's right to read all files."""
    root = os.getuid() == 0
    if root:
        os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        if root:
            os.setresuid(0, 0, 0)


@pytest.mark.parametrize("locked", [".", "config.json", WEIGHTS, "tokenizer.json"])
@pytest.mark.parametrize("of", ["model", "head"])
def test_files_without_permission_are_one_sentence(of: str, locked: str, model: Path):
    if of == "head" and locked == "tokenizer.json":
        pytest.skip("heads have no tokenizer")
    with tempfile.TemporaryDirectory() as place:  # others cannot enter pytest's own
        Path(place).chmod(0o755)
        folder = copytree(model if of == "model" else head(), Path(place) / "copy")
        for each in (folder, *folder.iterdir()):
            each.chmod(0o755)

        def load() -> object:
            return load_model(str(folder)) if of == "model" else inspect_head(str(folder))

        load()  # imports what it needs
        (folder / locked).chmod(0)
        with without_rights():
            said = sentence(load)
        (folder / locked).chmod(0o755)
    assert "ermission denied" in said, said
