"""GGUF files as files: the header, everywhere a model is named, and damaged or crafted files, which get a sentence."""

import resource
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch

import foredraft
import gguf_files
import tiny
from foredraft.core.errors import ForedraftError, ModelError
from foredraft.model.gguf.config import config_of
from foredraft.model.gguf.file import GgufError, GgufFile
from foredraft.model.gguf.tokenizer import tokenizer_of
from foredraft.model.gguf.weights import GgufWeights
from foredraft.model.loading.load import load_model
from foredraft.model.native.outline import Outline


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with quantised weights and a tokenizer."""
    place = tmp_path_factory.mktemp("gguf") / "model.gguf"
    tokenizer = gguf_files.byte_level(size=280)
    model = tiny.build("llama", vocab_size=len(tokenizer), intermediate_size=64)
    gguf_files.writer().write(place, model, tokenizer, kind="Q4_1", split="smollm")
    return place


def refused(path: object, match: str) -> None:
    with pytest.raises(ForedraftError, match=match) as caught:
        load_model(str(path))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_metadata_and_tensors(path: Path):
    file = GgufFile(path)
    assert file.text("general.architecture") == "llama" and file.metadata["llama.block_count"] == 2
    assert file.metadata["tokenizer.ggml.tokens"][:2] == ["<|pad|>", "<|end|>"]
    assert file.metadata["tokenizer.ggml.token_type"][:5].tolist() == [3, 3, 3, 3, 1]
    info = file.tensors["blk.0.ffn_down.weight"]
    assert (info.kind.name, info.shape, info.rows, info.row_bytes) == ("Q4_1", (32, 64), 32, 40)
    assert torch.equal(file.data("blk.0.ffn_down.weight", slice(3, 5)), file.data("blk.0.ffn_down.weight")[3:5])
    norm = file.tensors["output_norm.weight"]
    assert (norm.kind.name, norm.shape, norm.rows) == ("F32", (32,), 32)


@pytest.mark.parametrize("drafter", ["none", "draft_model:{path}"])
def test_wherever_a_model_is_named(drafter: str, path: Path):
    """Outputs are those of the same weights from a folder."""
    loaded = load_model(str(path))
    with foredraft.load(loaded.model, "none", tokenizer=loaded.tokenizer) as g:
        expected = g.generate("The quick 12", max_new_tokens=16)
    with foredraft.load(path, drafter.format(path=path), dtype="float32") as g:
        found = g.generate("The quick 12", max_new_tokens=16)
    assert found.tokens == expected.tokens and found.text == expected.text


def test_a_path_as_a_drafter_is_a_draft_model(path: Path):
    with foredraft.load(path, path) as g:
        assert g.generate("The quick 12", max_new_tokens=8).stats.acceptance_length > 1


def test_a_file_by_its_first_bytes(path: Path, tmp_path: Path):
    other = tmp_path / "sha256-0123"
    other.write_bytes(path.read_bytes())
    assert load_model(str(other)).model.config.vocab_size == load_model(str(path)).model.config.vocab_size


def test_a_file_on_the_hub(path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []

    def download(repository: str, file: str, **options: Any) -> str:
        asked.append((repository, file, options))
        return str(path)

    monkeypatch.setattr("foredraft.model.hf.hub.hf_hub_download", download)
    monkeypatch.setattr("foredraft.model.hf.hub.cached_only", lambda *given: {})
    loaded = load_model("some/one/sub/model.gguf", options={"revision": "v2", "trust_remote_code": True})
    assert asked == [("some/one", "sub/model.gguf", {"revision": "v2"})] and loaded.tokenizer is not None


def test_files_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    refused(tmp_path / "nothing.gguf", "There is no file '.*nothing.gguf'")
    refused("./nothing.gguf", "There is no file './nothing.gguf'")
    refused("nothing.gguf", "There is no file 'nothing.gguf'")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refused("nobody/nothing/model.gguf", "There is no file .*, and downloading it from the hub failed: ")


def test_files_that_are_something_else(path: Path, tmp_path: Path):
    other = tmp_path / "model.gguf"
    for content, match in {
        b"": "is empty",
        b"GG": "ends within its header",
        b"GGML" + bytes(64): "does not start with GGUF",
        b"GGUF" + struct.pack("<IQQ", 1, 0, 0): "its version is 1",
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0): "it is big-endian",
        b"GGUF" + struct.pack("<IQQ", 3, 0, 0): "has the architecture None",
        path.read_bytes()[:-200]: "ends within the tensor",
    }.items():
        other.write_bytes(content)
        refused(other, match)


def header(*entries: bytes, tensors: bytes = b"", count: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, count, len(entries)) + b"".join(entries) + tensors


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(name: str, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


CRAFTED: dict[str, tuple[bytes, str]] = {
    "2**40 tensors": (header(count=1 << 40), "ends before the 1099511627776 tensors"),
    "2**63 entries": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 63), "ends before the 9223372036854775808 metadata"),
    "a name of 2**62 bytes": (header(struct.pack("<Q", 1 << 62) + bytes(16)), "a name in it has 4611686018427387904"),
    "a text of 2**62 bytes": (header(text("a") + struct.pack("<IQ", 8, 1 << 62)), "ends within its header"),
    "2**61 numbers": (header(text("a") + struct.pack("<IIQ", 9, 4, 1 << 61)), "ends before the .* values of 'a'"),
    "2**61 texts": (header(text("a") + struct.pack("<IIQ", 9, 8, 1 << 61)), "ends before the .* strings of 'a'"),
    "texts that end": (header(text("a") + struct.pack("<IIQQ", 9, 8, 1, 99)), "ends within its header"),
    "arrays of arrays": (
        header(text("a") + struct.pack("<IIQ", 9, 9, 1) + bytes(64)),
        "an array of the unknown type 9",
    ),
    "an unknown type": (header(text("a") + struct.pack("<I", 99) + bytes(64)), "'a' has the unknown type 99"),
    "an entry twice": (header(*[text("a") + struct.pack("<IB", 7, 1)] * 2), "it has 'a' twice"),
    "no alignment": (header(text("general.alignment") + struct.pack("<II", 4, 0)), "its alignment is 0"),
    "an odd alignment": (header(text("general.alignment") + struct.pack("<II", 4, 33)), "its alignment is 33"),
    "2**31 dimensions": (
        header(count=1, tensors=text("a") + struct.pack("<I", 1 << 31) + bytes(64)),
        "the tensor 'a' has 2147483648 dimensions",
    ),
    "no width": (header(count=1, tensors=tensor("a", 0) + bytes(99)), "the tensor 'a' has a wrong shape or offset"),
    "half a block": (header(count=1, tensors=tensor("a", 33, kind=2) + bytes(99)), "has a wrong shape or offset"),
    "an odd offset": (header(count=1, tensors=tensor("a", 1, offset=3) + bytes(99)), "has a wrong shape or offset"),
    "a tensor beyond the end": (header(count=1, tensors=tensor("a", 1, offset=1 << 62)), "ends within the tensor 'a'"),
    "2**186 weights": (header(count=1, tensors=tensor("a", *[1 << 62] * 3) + bytes(99)), "ends within the tensor 'a'"),
    "an unknown kind": (
        header(count=1, tensors=tensor("a", 1, kind=77) + bytes(99)),
        "the tensor 'a' in the unknown type 77",
    ),
    "another program's kind": (
        header(count=1, tensors=tensor("a", 1, kind=139) + bytes(99)),
        "in the unknown type 139, of a newer llama.cpp or of another program. Take the file in another type",
    ),
    "a withdrawn kind": (
        header(count=1, tensors=tensor("a", 1, kind=31) + bytes(99)),
        "in the type Q4_0_4_4, which llama.cpp has withdrawn. Take the file in another type, such as",
    ),
    "a tensor twice": (header(count=2, tensors=tensor("a", 1) * 2 + bytes(99)), "it has the tensor 'a' twice"),
    "one place twice": (
        header(count=2, tensors=tensor("a", 8) + tensor("b", 8) + bytes(99)),
        "the tensors 'a' and 'b' overlap",
    ),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_files_cost_a_sentence_and_no_memory(name: str, tmp_path: Path):
    content, match = CRAFTED[name]
    (tmp_path / "model.gguf").write_bytes(content)
    tracemalloc.start()
    refused(tmp_path / "model.gguf", match)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_millions_of_strings_are_refused_before_they_become_objects(tmp_path: Path):
    count = (1 << 22) + 1
    content = header(text("a") + struct.pack("<IIQ", 9, 8, count)) + bytes(8 * count)
    (tmp_path / "model.gguf").write_bytes(content)
    refused(tmp_path / "model.gguf", "it has more than 4,194,304 strings")


def check_sentence(error: ForedraftError) -> None:
    assert "\n" not in str(error) and len(str(error)) < 500


def fuzz(path: Path, place: Path, count: int, seed: int) -> None:
    """Read all of each damaged file: it works, or there is a sentence."""
    file = GgufFile(path)
    begin = min(info.start for info in file.tensors.values())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for damaged in gguf_files.mutations(path.read_bytes(), begin, count, seed):
        place.write_bytes(damaged)
        try:
            file = GgufFile(place)
            weights = GgufWeights(file, Outline.of_config(config_of(file)))
            for name in weights.names:
                weights.tensor(name)
                weights.blocks(name)
            tokenizer_of(file)("Hello 123 <|end|>")
        except ForedraftError as error:
            check_sentence(error)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000, "kilobytes"


def test_damaged_files(path: Path, tmp_path: Path):
    fuzz(path, tmp_path / "damaged.gguf", 2000, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_many_damaged_files(seed: int, path: Path, tmp_path: Path):
    fuzz(path, tmp_path / "damaged.gguf", 20_000, seed)


ODD: list[Any] = [
    None,
    0,
    1,
    -1,
    2,
    7,
    (1 << 31) - 1,
    1 << 32,
    1 << 62,
    0.0,
    1e-38,
    1e38,
    float("nan"),
    float("inf"),
    "x",
    "",
]
ARRAYS: list[Any] = [[], ["x"], np.zeros(0), np.arange(3), np.array([1e38, np.nan]), True]


def test_odd_values_of_metadata(path: Path, tmp_path: Path):
    """Each entry with values of each type, and with extremes."""
    file = GgufFile(path)
    original = dict(file.metadata)
    for key in [*original, "llama.rope.scaling.type", "llama.rope.scaling.factor", "tokenizer.chat_templates"]:
        for value in [*ODD, *ARRAYS]:
            file.metadata = {**original, key: value}
            try:
                GgufWeights(file, Outline.of_config(config_of(file)))
                if key.startswith("tokenizer"):
                    tokenizer_of(file)("Hello 123 <|end|>")
            except ForedraftError as error:
                check_sentence(error)


def test_errors_are_model_errors():
    assert issubclass(GgufError, ModelError)
