"""GGUF files on the command line."""

import json
import logging
from pathlib import Path

import pytest
from cli_cases import BUNDLED, PROMPT, Run
from transformers import AutoModelForCausalLM, AutoTokenizer

import gguf_files
import tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, its weights in bfloat16 as they are."""
    place = tmp_path_factory.mktemp("gguf") / "sample.gguf"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(BUNDLED), AutoTokenizer.from_pretrained(BUNDLED)
    gguf_files.writer().write(place, model, tokenizer, kind="BF16", split="smollm")
    return place


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup"])
def test_generate(drafter: str, path: Path, run: Run):
    common = ("--max-new-tokens", 12, "--json", "--raw", PROMPT)
    found = json.loads(run("generate", "-m", path, "-d", drafter, *common).out)
    expected = json.loads(run("generate", "-m", BUNDLED, "-d", "none", *common).out)
    assert found["text"] == expected["text"] and found["tokens"] == expected["tokens"]


def test_warnings_are_printed(path: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One line each, on stderr, of a file that names no split, and of one that names an unknown one."""
    monkeypatch.setattr(logging.getLogger("foredraft"), "handlers", [])  # a server's, from another test
    model, tokenizer = AutoModelForCausalLM.from_pretrained(BUNDLED), AutoTokenizer.from_pretrained(BUNDLED)
    command = ("generate", "-d", "none", "--max-new-tokens", 12, "--json", PROMPT, "-m")
    place = tmp_path / "sample.gguf"
    gguf_files.writer().write(place, model, tokenizer, kind="BF16", metadata={"tokenizer.ggml.pre": None})
    found = run(*command, place)
    lines = [line for line in found.err.splitlines() if "split" in line]
    assert lines == [
        f"foredraft: {place} does not name the split of its tokenizer: smollm fits its tokens and is used. If token "
        "ids are wrong, pass the original tokenizer."
    ]
    assert json.loads(found.out)["tokens"] == json.loads(run(*command, path).out)["tokens"]
    gguf_files.writer().write(place, model, tokenizer, kind="BF16", split="gpt-99")
    found = run(*command, place)
    assert found.status == 2 and "names the unknown split 'gpt-99' of its tokenizer" in found.err
    assert "Prompts must be token ids, or pass the original tokenizer." in found.err


def test_inspect(path: Path, run: Run, monkeypatch: pytest.MonkeyPatch):
    shown = run("inspect", path)
    assert shown.status == 0 and "\x1b" not in shown.out
    for part in ("llama", "8 layers, hidden size 384, vocabulary 8192", "2048 tokens", "split smollm, 8,192 tokens"):
        assert part in shown.out
    found = json.loads(run("inspect", path, "--json").out)
    assert found["path"] == str(path) and found["model_type"] == "llama" and found["chat_template"] is True
    assert [(each["type"], each["read"]) for each in found["types"]] == [("BF16", "as it is"), ("F32", "as it is")]
    model = AutoModelForCausalLM.from_pretrained(BUNDLED)
    assert found["parameters"] == sum(weight.numel() for weight in model.parameters())
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, run("inspect", path).out.splitlines())) <= 60


def test_types_and_tokenizers_that_inspect_tells_apart(run: Run, tmp_path: Path):
    place = tmp_path / "model.gguf"
    gguf_files.writer().write(place, tiny.build("llama"), kind="Q4_0")
    found = json.loads(run("inspect", place, "--json").out)
    reads = {each["type"]: each["read"] for each in found["types"]}
    assert reads == {"Q4_0": "dequantised without another rounding", "F32": "as it is"}
    assert found["tokenizer"].startswith("none: ") and found["chat_template"] is False


def test_refusals(run: Run, tmp_path: Path):
    (tmp_path / "model.gguf").write_bytes(b"rubbish, and more of it")
    for command in (("generate", PROMPT, "-m"), ("inspect",), ("check", "-m")):
        assert "does not start with GGUF" in run(*command, tmp_path / "model.gguf").refusal
    assert "There is no file" in run("inspect", tmp_path / "nothing.gguf").refusal
