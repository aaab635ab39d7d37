"""Sizes read from a config against those of the real model and its caches, and the plan made of them."""

import json
import re
import shlex
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

import foredraft
import gguf_files
import tiny
from foredraft.bench.capacity import HEADROOM, Load, capacity, deployments, drafter_sizes
from foredraft.cli import main
from foredraft.core.errors import ModelError, OptionError
from foredraft.heads.formats import inspect_head
from foredraft.model.gguf.file import GgufFile
from foredraft.model.loading.bundled import resolve
from foredraft.model.loading.sizes import ModelSizes, model_sizes
from foredraft.model.memory import stored_bytes

GB = 10**9


@pytest.mark.parametrize("name", [*tiny.MODELS, "deepseek_v3", "gpt_oss"])
def test_sizes_are_those_of_the_loaded_model(name: str, tmp_path: Path):
    raw = tiny.build(name)
    raw.config.save_pretrained(tmp_path)  # no weights
    sizes = model_sizes(str(tmp_path), "float32")
    assert sizes.weights == stored_bytes(raw)
    with torch.no_grad():
        filled = raw(torch.zeros(1, 1, dtype=torch.long), use_cache=True).past_key_values
    assert sizes.kv_token == sum(part.nbytes for layer in filled.layers for part in (layer.keys, layer.values))
    assert model_sizes(str(tmp_path), "bfloat16").kv_token == sizes.kv_token // 2


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16", "F32"])
def test_a_gguf_file_counts_as_it_is_stored(kind: str, tmp_path: Path):
    model, path = tiny.build("llama", intermediate_size=64, head_dim=32, tie_word_embeddings=True), tmp_path / "m.gguf"
    gguf_files.writer().write(path, model, kind=kind)
    sizes, size = model_sizes(str(path)), path.stat().st_size
    assert 0.5 * size < sizes.weights < size, "the rest is the header"
    file = GgufFile(path)
    assert sizes.weights == sum(file.data(name).nbytes for name in file.tensors)
    with foredraft.load(str(path), "none") as g:
        states = g.engine.target.token_bytes if kind[0] == "Q" else sizes.kv_token
        if kind[0] == "Q":
            assert sizes.weights == pytest.approx(g.engine.target.weight_bytes, rel=0.1)
    assert sizes.kv_token == states
    floats = model_sizes(str(path), "float32")
    assert floats.weights == stored_bytes(model) and floats.kv_token == sizes.kv_token * (1 if kind == "F32" else 2)


def test_quantised_folders_count_as_they_are_stored(tmp_path: Path):
    model = tiny.build("llama", intermediate_size=64)
    model.save_pretrained(tmp_path / "floats")
    foredraft.quantize(tmp_path / "floats", tmp_path / "int4", "int4")
    assert model_sizes(str(tmp_path / "floats")).weights == stored_bytes(model)
    found, file = model_sizes(str(tmp_path / "int4")), tmp_path / "int4" / "foredraft.safetensors"
    assert found.weights == file.stat().st_size < stored_bytes(model) / 2
    config = json.loads((tmp_path / "floats" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (tmp_path / "floats" / "config.json").write_text(json.dumps(config))
    assert model_sizes(str(tmp_path / "floats")).weights == (tmp_path / "floats" / "model.safetensors").stat().st_size


def test_a_model_that_routes_by_values_is_refused(tmp_path: Path):
    tiny.config("jetmoe").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="KV cache of .* is unknown"):
        model_sizes(str(tmp_path))


def test_a_head_is_about_as_large_as_the_bundled_one():
    head = inspect_head(resolve("sample-eagle3"))
    target = model_sizes("sample", "float32")
    ours = replace(target, vocabulary=head.config.draft_vocab_size)
    assert drafter_sizes("eagle3", ours).weights == pytest.approx(4 * head.parameters, rel=0.1)


SIZES = ModelSizes(
    weights=16 * GB,
    layer=GB // 2,
    kv_token=131_072,
    layers=32,
    kv_heads=8,
    hidden=4096,
    vocabulary=128_256,
    context=131_072,
    bytes_per_value=2,
)


def test_what_is_planned_fits_and_one_row_more_would_not():
    load, none = Load(1000, 8192), drafter_sizes("none", SIZES)
    for devices in (1, 2, 4, 8):
        plan = capacity(SIZES, none, load, 80 * GB, tensor_parallel=devices)
        usable = 80 * GB * (1 - HEADROOM) - plan.weights
        assert plan.rows * (plan.row + plan.workspace) <= usable < (plan.rows + 1) * (plan.row + plan.workspace)
        assert plan.replicas == ceil(1000 / plan.rows) and plan.weights == 16 * GB // devices
        assert plan.row >= (8192 + 60) * 131_072 // devices, "a row holds the request and a draft"


def test_drafters_are_not_shared_out():
    head = drafter_sizes("eagle3", SIZES)
    one, two = (capacity(SIZES, head, Load(8, 4096), 80 * GB, tensor_parallel=count) for count in (1, 2))
    assert one.weights - two.weights == 8 * GB
    assert head.kv_token == 131_072 // 32


def test_the_least_time_of_a_step_is_what_is_read():
    plan = capacity(SIZES, drafter_sizes("none", SIZES), Load(4, 1000), 80 * GB, bandwidth=2e12)
    assert plan.step_seconds == pytest.approx((16 * GB + 4 * 1000 * 131_072) / 2e12)


def test_the_first_deployment_has_the_fewest_devices():
    plans = deployments(SIZES, drafter_sizes("none", SIZES), Load(64, 8192), 80 * GB)
    assert [plan.devices for plan in plans] == sorted(plan.devices for plan in plans)
    assert {plan.tensor_parallel for plan in plans} == {1, 2, 4, 8}
    few = deployments(replace(SIZES, weights=150 * GB), drafter_sizes("none", SIZES), Load(4, 8192), 80 * GB)
    assert few[0].tensor_parallel == 4, "on two devices there is no room for a row"


@pytest.mark.parametrize(
    ("load", "devices", "reason"),
    [
        (Load(1, 200_000), 1, "context has 131072"),
        (Load(1, 100_000), 1, "Not even one request fits"),
        (Load(1, 10), 3, "cannot be shared out"),
    ],
)
def test_what_does_not_fit_is_one_sentence(load: Load, devices: int, reason: str):
    with pytest.raises(OptionError, match=reason):
        capacity(SIZES, drafter_sizes("none", SIZES), load, 24 * GB, tensor_parallel=devices)


def test_bad_input(tmp_path: Path):
    with pytest.raises(OptionError, match="Known: none, prompt_lookup"):
        drafter_sizes("medusa", SIZES)
    with pytest.raises(ModelError, match="has no config.json"):
        model_sizes(str(tmp_path))
    with pytest.raises(OptionError, match="concurrency"):
        Load(0, 10)


def test_the_command(capsys: pytest.CaptureFixture[str]):
    asked = ["capacity", "-m", "sample", "-d", "draft_model:sample-draft", "--concurrency", "64", "--context", "1500"]
    assert main([*asked, "--memory", "2", "--bandwidth", "10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["deployments"][0]["devices"] == min(each["devices"] for each in found["deployments"])
    assert main([*asked, "--memory", "2"]) == 0
    assert "Fewest devices" in capsys.readouterr().out
    assert main([*asked, "--memory", "0.01"]) == 2
    assert "Not even one request fits" in capsys.readouterr().err


def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    page = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text("utf-8")
    command, shown = re.findall(r"```sh\n(foredraft capacity .*)\n```\n\n```\n(.*?)```", page, re.DOTALL)[0]
    llama = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
        max_position_embeddings=131_072,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    llama.save_pretrained(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(shlex.split(command.replace("meta-llama/Llama-3.1-8B-Instruct", str(tmp_path)))[1:]) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == shown.splitlines()
