"""``--weights`` on every command that runs a model, and the engine that ``inspect`` names."""

import json
from pathlib import Path

import pytest
from cli_cases import PROMPT, Run

import foredraft
import gguf_files
import tiny
from foredraft.bench.measure.records import read_runs
from native import needs_compiler

pytestmark = needs_compiler


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "p.txt"
    path.write_text(f"{PROMPT}\n---\nclass A:\n")
    return path


@pytest.fixture(scope="module")
def int4() -> list[int]:
    return foredraft.load("sample", "none", weights="int4").generate(PROMPT, max_new_tokens=8).tokens


def test_bench(run: Run, prompts: Path, tmp_path: Path, int4: list[int]):
    out = tmp_path / "bench.jsonl"
    arguments = (
        "bench",
        "-d",
        "none",
        "-d",
        "prompt_lookup",
        "--prompts",
        prompts,
        "--max-new-tokens",
        "8",
        "--out",
        out,
    )
    assert run(*arguments, "--weights", "int4").status == 0
    runs = read_runs(out).runs
    first = {each.arm: list(each.outputs[0].output) for each in runs if each.prompts == runs[0].prompts}
    assert first == {"none": int4, "prompt_lookup": int4}
    assert "weights" in run(*arguments).refusal, "a file is of one precision"


def test_keys_and_values_in_8_bits(run: Run):
    small = ("-m", "sample", "--weights", "int4", "--max-new-tokens", "8", "--json", "--raw")
    expected = foredraft.load("sample", "none", weights="int4", kv_cache_dtype="int8")
    tokens = expected.generate(PROMPT, max_new_tokens=8).tokens
    said = run("generate", *small, "--kv-cache-dtype", "int8", "-d", "prompt_lookup", PROMPT)
    assert json.loads(said.out)["tokens"] == tokens
    bits = ("check", "-m", "sample", "--weights", "int4", "-d", "prompt_lookup", "--bits", "--output-tokens", "4")
    found = json.loads(run(*bits, "--count", "1", "--kv-cache-dtype", "int8", "--json").out)
    assert found["lossless"] and found["kv_cache_dtype"] == "int8" and found["positions"] > 100
    assert "Known: float16, int8" in run("generate", *small, "--kv-cache-dtype", "int4", PROMPT).refusal


def test_tune(run: Run, prompts: Path, tmp_path: Path):
    small = ("--max-new-tokens", "8", "--verify", "1", "--batch-size", "1", "--count", "1")
    out = tmp_path / "tuned.json"
    stored = ("--weights", "int4", "--kv-cache-dtype", "int8")
    ended = run("tune", "-d", "prompt_lookup", "--prompts", prompts, *small, *stored, "--out", out)
    assert ended.status == 0 and ended.err == "", ended.err
    assert "foredraft generate --model sample --weights int4 --kv-cache-dtype int8 --drafter" in " ".join(
        ended.out.split()
    )


def test_skip_and_layer_skip(run: Run, prompts: Path, tmp_path: Path, int4: list[int]):
    out, small = tmp_path / "skips.json", ("--max-new-tokens", "8", "--min-new-tokens", "8", "--trials", "4")
    common = ("skip", "--prompts", prompts, *small, "--longest", "3", "--out", out)
    ended = run(*common, "--weights", "int4")
    assert ended.status == 0 and ended.err == "", ended.err
    assert "--model sample --weights int4 --drafter layer_skip:" in " ".join(ended.out.split())
    assert "another search" in run(*common).refusal, "a search is for one precision"
    more = ("--weights", "int4", "-d", f"layer_skip:{out},num_assistant_tokens=3")
    said = run("generate", *more, "--max-new-tokens", "8", "--json", "--raw", PROMPT)
    assert json.loads(said.out)["tokens"] == int4


def test_inspect_names_the_engine_of_a_folder_and_why(run: Run, tmp_path: Path):
    for name in ("llama", "gpt2"):
        tiny.build(name).save_pretrained(tmp_path / name)
    found = json.loads(run("inspect", tmp_path / "llama", "--json").out)
    assert found["engine"] == "native" and "kernels for" in found["why"] and found["layers"] == 2
    assert found["parameters"] == sum(each.numel() for each in tiny.build("llama").parameters())
    assert "--weights int4, int8 or auto: native." in run("inspect", tmp_path / "llama").out
    found = json.loads(run("inspect", tmp_path / "gpt2", "--json").out)
    assert found["engine"] == "transformers" and "no kernels for the type gpt2" in found["why"]
    assert "native. Its forward" in " ".join(run("inspect", "sample").out.split()), "a bundled model has a name"


@pytest.mark.parametrize(
    ("kind", "native"),
    [
        ("Q4_0", "as it is"),
        ("Q8_0", "int8: as it is; int4: layers to 4 bits"),
        ("F16", "int8: to 8 bits; int4: to 4 bits"),
    ],
)
def test_inspect_says_what_the_engine_makes_of_a_files_types(run: Run, tmp_path: Path, kind: str, native: str):
    place = tmp_path / "model.gguf"
    gguf_files.writer().write(place, tiny.build("llama", hidden_size=64, intermediate_size=64), kind=kind)
    found = json.loads(run("inspect", place, "--json").out)
    assert found["engine"] == "native"
    said = {each["type"]: each["native"] for each in found["types"]}
    assert said == {kind: native, "F32": None}, "vectors are floats"
    assert native.split(";")[0] in run("inspect", place).out
