"""The file of ``foredraft scale``, and the commands as far as they go without a cluster."""

import re
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli import PACKAGED, build, main
from foredraft.cli.choices import ModelChoice
from foredraft.cli.config import read_config
from foredraft.core.errors import OptionError
from foredraft.serve.options import ServeOptions
from foredraft_scale.options import ScaleOptions, deployment

KINDS = {"model": ModelChoice, "server": ServeOptions, "scale": ScaleOptions}
PAGE = Path(__file__).resolve().parents[3] / "docs" / "scaling.md"


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


@pytest.mark.parametrize("name", PACKAGED["foredraft-scale"])
def test_the_list_says_what_the_command_says(name: str, capsys: pytest.CaptureFixture[str]):
    built = build(name)
    assert built.help.splitlines()[0] == PACKAGED["foredraft-scale"][name]
    assert [each.name for each in built.params if not each.help] == []
    assert main([name, "--help"]) == 0 and f"foredraft {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["scale", "missing.yaml"], "Cannot read missing.yaml"),
        (["replicas", "--replicas", "0"], "replicas must be 1 or more"),
        (["replicas", "--tensor-parallel", "2"], "A replica runs in one process: leave out --tensor-parallel"),
        (["actors", __file__, "out", "--actors", "-1"], "--actors must be 1 or more."),
        (["actors", __file__, "out", "--default-max-tokens", "0"], "--default-max-tokens must be 1 or more."),
        (["actors", __file__, "out", "--tensor-parallel", "2"], "An actor runs in one process"),
    ],
)
def test_the_commands_refuse_in_one_sentence(command: list[str], sentence: str, capsys: pytest.CaptureFixture[str]):
    assert main(command) == 2
    found = capsys.readouterr().err
    assert sentence in " ".join(found.split()) and found.count("\n") == 1
