"""``foredraft inspect`` and ``foredraft export`` on files made by hand."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from cli_cases import Run
from safetensors.torch import load_file, save_file

import random_heads as heads
import tiny
from foredraft.heads.formats import save_head
from foredraft.model.hf.causal_lm import CausalLM


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of eight layers, with heads for it."""
    folder = tmp_path_factory.mktemp("heads")
    model = tiny.build("llama", num_hidden_layers=8)
    model.save_pretrained(folder / "target")
    lm = CausalLM(model, verify=False)
    ids = torch.arange(1, 81, 2)
    nets = {
        "eagle3": (heads.eagle3(lm, taps=(2, 4, 5), vocabulary=ids), "sglang"),
        "eagle": (heads.eagle(lm), "eagle"),
        "medusa": (heads.medusa(lm), "medusa"),
    }
    for name, (net, to) in nets.items():
        config = model.config.to_dict()
        save_head(net, folder / name, to=to, target_name="my/target", target_config=config, dtype=torch.float32)
    return folder


def test_inspect(run: Run, place: Path):
    ended = run("inspect", place / "eagle3")
    assert ended.status == 0 and "\x1b" not in ended.out
    for part in (
        "eagle3",
        "SpecForge/SGLang EAGLE-3",
        "2, 4, 5",
        "hidden size 32",
        "vocabulary 96",
        "draft_vocab_size",
    ):
        assert part in ended.out
    assert "3 heads" not in run("inspect", place / "medusa").out
    assert "3,835,392" in run("inspect", "sample-eagle3").out, "a bundled head has a name"


@pytest.mark.parametrize("name", ["eagle3", "eagle", "medusa"])
def test_inspect_as_json(run: Run, place: Path, name: str):
    found = json.loads(run("inspect", place / name, "--json").out)
    assert set(found) == {"path", "method", "format", "parameters", "dtype", "target", "config", "notes"}
    assert found["method"] == name and found["dtype"] == "float32" and found["target"]["hidden_size"] == 32


@pytest.mark.parametrize("width", [40, 60, 160])
def test_inspect_fits_the_screen(run: Run, place: Path, monkeypatch: pytest.MonkeyPatch, width: int):
    monkeypatch.setenv("COLUMNS", str(width))
    assert max(map(len, run("inspect", place / "eagle").out.splitlines())) <= width


@pytest.mark.parametrize("to", ["speculators", "vllm"])
def test_export(run: Run, place: Path, tmp_path: Path, to: str):
    ended = run("export", place / "eagle3", "--to", to, "-m", place / "target", "--out", tmp_path / "a")
    assert (ended.status, ended.out) == (0, "")
    assert f"Wrote SpecForge/SGLang EAGLE-3 as {to}" in ended.err
    given, made = load_file(place / "eagle3" / "model.safetensors"), load_file(tmp_path / "a" / "model.safetensors")
    for name, tensor in given.items():
        wanted = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(made[name.replace("midlayer.", "layers.0.")], wanted)
    found = json.loads(run("inspect", tmp_path / "a", "--json").out)
    assert found["config"]["taps"] == [2, 4, 5] and found["target"]["name"] == str(place / "target")
    assert json.loads((tmp_path / "a" / "provenance.json").read_text())["exported_from"] == f"{place.name}/eagle3"


@pytest.mark.parametrize("recorded", ["../target", "my/target", None])
def test_export_takes_the_target_from_the_heads_record(run: Run, place: Path, tmp_path: Path, recorded: str | None):
    """A folder is recorded relative to the head, so both may move together."""
    shutil.copytree(place / "target", tmp_path / "target")
    shutil.copytree(place / "eagle3", tmp_path / "head")
    if recorded is not None:
        (tmp_path / "head" / "provenance.json").write_text(json.dumps({"target_model": recorded}))
    ended = run("export", tmp_path / "head", "--to", "speculators", "--out", tmp_path / "a")
    if recorded == "../target":
        assert ended.status == 0, ended.err
        assert json.loads(run("inspect", tmp_path / "a", "--json").out)["target"]["name"] == str(tmp_path / "target")
    elif recorded is None:
        assert ended.refusal == "The head's files do not name its target: give --model."
    else:
        assert "my/target" in ended.refusal_after_warnings


def test_a_recorded_target_that_has_gone(run: Run, place: Path, tmp_path: Path):
    shutil.copytree(place / "eagle3", tmp_path / "head")
    (tmp_path / "head" / "provenance.json").write_text(json.dumps({"target_model": "../target"}))
    said = run("export", tmp_path / "head", "--to", "speculators", "--out", tmp_path / "a").refusal
    assert said == "The head's files name the target '../target', which is not there: give --model."


def test_export_with_another_base(run: Run, place: Path, tmp_path: Path):
    options = ("--rope-theta", "777", "--dtype", "float32")
    out = tmp_path / "a"
    assert run("export", place / "eagle3", "--to", "eagle", "-m", place / "target", "--out", out, *options).status == 0
    assert json.loads((out / "config.json").read_text())["rope_theta"] == 777.0


def test_what_export_refuses(run: Run, place: Path, tmp_path: Path):
    def sentence(head: str, to: str, *more: str, out: Path = tmp_path / "a") -> str:
        said = run(
            "export", place / head, "--to", to, "-m", place / "target", "--out", out, *more
        ).refusal_after_warnings
        assert not (tmp_path / "a").exists()
        return said

    assert "Unknown format 'gguf'. Known: eagle, sglang" in sentence("eagle3", "gguf")
    assert "Unknown dtype 'int8'" in sentence("eagle3", "sglang", "--dtype", "int8")
    assert "Medusa cannot be written in the format 'sglang'" in sentence("medusa", "sglang")
    assert "no rotary embedding" in sentence("medusa", "medusa", "--rope-theta", "5")
    assert "There is no folder" in sentence("nothing", "sglang")
    assert "the folder of the head itself" in sentence("eagle", "eagle", out=place / "eagle")


def test_inspect_refuses_in_one_sentence(run: Run, tmp_path: Path):
    assert "Cannot read the config.json" in run("inspect", tmp_path).refusal
    (tmp_path / "config.json").write_text("{}")
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    assert "no known draft head" in run("inspect", tmp_path).refusal
