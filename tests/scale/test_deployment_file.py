"""The file of ``foredraft scale`` and the commands that start replicas, as far as they go without ray."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli import main
from foredraft.cli.choices import ModelChoice
from foredraft.cli.config import read_config
from foredraft.core.errors import OptionError
from foredraft.scale.options import ScaleOptions, deployment
from foredraft.serve.options import ServeOptions

KINDS = {"model": ModelChoice, "server": ServeOptions, "scale": ScaleOptions}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"


def read(folder: Path, text: str) -> dict[str, Any]:
    path = folder / "deploy.yaml"
    path.write_text(text)
    return deployment(read_config(path), KINDS)


def test_the_example_of_the_page(tmp_path: Path):
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    found = read(tmp_path, example)
    assert found["model"].drafter.startswith("eagle3:") and found["server"].host == "0.0.0.0"
    assert found["scale"].autoscaling["max_replicas"] == 8 and found["scale"].actor["num_gpus"] == 1


def test_what_is_missing_has_its_default(tmp_path: Path):
    assert read(tmp_path, "") == {"model": ModelChoice(), "server": ServeOptions(), "scale": ScaleOptions()}
    found = read(tmp_path, "model: {model_option: revision=v2}\nserver:\nscale: {load_bound: 2, address: null}\n")
    assert found["model"].model_option == ("revision=v2",) and found["server"] == ServeOptions()
    assert found["scale"] == ScaleOptions(load_bound=2.0) and type(found["scale"].load_bound) is float


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("models: {}", "Unknown section 'models'. Did you mean model?"),
        ("scale: {replica: 2}", "Unknown option of scale 'replica'. Did you mean replicas?"),
        ("server: {port: eight}", "server.port must be a whole number, not 'eight'."),
        ("server: {prefix_cache: 1}", "server.prefix_cache must be true or false, not 1."),
        ("model: {drafter: 3}", "model.drafter must be a text, not 3."),
        ("scale: {replicas: 2.5}", "scale.replicas must be a whole number"),
        ("scale: {replicas: true}", "scale.replicas must be a whole number"),
        ("scale: {replicas: 0}", "replicas must be 1 or more, not 0."),
        ("scale: {load_bound: 0.5}", "load_bound must be 1.0 or more, not 0.5."),
        ("scale: {actor: 2}", "scale.actor must be a mapping, not an int."),
        ("scale: {replicas: 2, autoscaling: {max_replicas: 4}}", "Give replicas or autoscaling, not both."),
        ("server: {api_key: [1]}", "server.api_key must be a text, not 1."),
        ("- 1", "must be a mapping, not a list."),
        ("a: [", "is not valid YAML"),
    ],
)
def test_a_wrong_file_gives_one_sentence(text: str, sentence: str, tmp_path: Path):
    with pytest.raises(OptionError, match=sentence):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["scale", "missing.yaml"], "Cannot read missing.yaml"),
        (["serve", "--replicas", "0"], "replicas must be 1 or more"),
        (["serve", "--replicas", "2"], "pip install 'foredraft[scale]'"),
        (["serve", "--address", "auto"], "pip install 'foredraft[scale]'"),
        (["batch", __file__, "out", "--ray"], "pip install 'foredraft[scale]'"),
        (["batch", __file__, "out", "--actors", "2"], "--actors and --address need --ray."),
        (["batch", __file__, "out", "--ray", "--actors", "-1"], "--actors must be 1 or more."),
    ],
)
def test_the_commands_refuse_in_one_sentence(
    command: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("foredraft.scale.actors", "foredraft.scale.cluster", "foredraft.scale.replicas"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert main(command) == 2
    found = capsys.readouterr().err
    assert sentence in " ".join(found.split()) and found.count("\n") == 1
