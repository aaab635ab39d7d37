"""``foredraft serve --config``, and the name that a server gives its model."""

import re
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Run

from foredraft.cli import serve
from foredraft.cli.choices import ModelChoice
from foredraft.serve.options import ServeOptions

YAML = """\
model: org/some-model
no-prefix-cache: true
exact: false
max_queue: 7
request-timeout: 30
stall-seconds:          # null: the default
served-model-name: [big, "7"]
api-key: 1234           # one of a list, and a number as it would be typed
model-option: revision=v2
weights: int4
kv_cache_dtype: int8
"""
TOML = """\
model = "org/some-model"
no-prefix-cache = true
exact = false
max_queue = 7
request-timeout = 30
served-model-name = ["big", "7"]
api-key = 1234
model-option = "revision=v2"
weights = "int4"
kv_cache_dtype = "int8"
"""
Asked = tuple[ModelChoice, ServeOptions]


@pytest.fixture
def asked(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """What a command line asks for."""
    found: list[Asked] = []
    monkeypatch.setattr(serve, "run_server", lambda *given: found.append(given))

    def asked(text: str, *arguments: str, name: str = "serve.yaml") -> Asked:
        path = tmp_path / name
        path.write_text(text)
        said = run("serve", *arguments, "--config", path)
        assert said.status == 0, said.err
        return found.pop()

    return asked


@pytest.mark.parametrize(("name", "text"), [("serve.yaml", YAML), ("serve.toml", TOML), ("serve.conf", YAML)])
def test_a_file_says_what_the_command_line_says(asked: Any, name: str, text: str):
    choice, server = asked(text, name=name)
    assert choice == ModelChoice(
        model="org/some-model", model_option=("revision=v2",), weights="int4", kv_cache_dtype="int8"
    )
    assert server == ServeOptions(
        prefix_cache=False, max_queue=7, request_timeout=30.0, served_model_name=("big", "7"), api_key=("1234",)
    )


def test_the_command_line_wins(asked: Any):
    line = ("--max-queue", "9", "-m", "other", "--served-model-name", "mine", "--exact")
    choice, server = asked(YAML, *line)
    assert (choice.model, choice.exact, choice.model_option) == ("other", True, ("revision=v2",))
    assert (server.max_queue, server.served_model_name, server.prefix_cache) == (9, ("mine",), False)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("prefix_cache: false", "serve.yaml: 'prefix-cache'. Did you mean no-prefix-cache? Known: api-key,"),
        ("config: other.yaml", "'config'"),
        ("1: 2", "'1'. Known:"),
        ("max-queue: 7\nmax_queue: 8", "has the option max-queue twice."),
        ("port: eight", "--port"),
        ("port: 80.5", "--port"),
        ("port: true", "port takes a value, not true or false."),
        ("port: [1]", "port must be a single value, not a list."),
        ("model: {path: x}", "model must be a single value, not a dict."),
        ("exact: yes please", "exact must be true or false."),
        ("api-key: [a, {}]", "api-key must be a single value, not a dict."),
        ("max-queue: -1", "max_queue must be 0 or more, not -1."),
        ("- 1", "must be a mapping, not a list."),
        ("a: [", "is not valid YAML"),
    ],
)
def test_a_wrong_file_gives_one_sentence(run: Run, tmp_path: Path, text: str, sentence: str):
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    assert sentence in run("serve", "--config", path).refusal


def test_the_example_of_the_page(asked: Any):
    page = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
    (example,) = re.findall(r"```yaml\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    choice, server = asked(example)
    assert choice == ModelChoice(model="/models/llama-3.1-8b", drafter="eagle3:/models/head")
    assert server == ServeOptions(served_model_name=("llama", "llama-3.1-8b"), max_queue=100, prefix_cache=False)


def test_files_that_are_no_files(run: Run, tmp_path: Path):
    assert "Cannot read absent.yaml: No such file" in run("serve", "--config", "absent.yaml").refusal
    for name, content in (("a.toml", b"a = ["), ("a.yaml", b"\xff"), ("b.yaml", b"[" * 100_000)):
        (tmp_path / name).write_bytes(content)
        reason = "is nested too deep" if name == "b.yaml" else "is not valid"
        assert f"{name} {reason}" in run("serve", "--config", tmp_path / name).refusal


def test_clients_see_no_folders(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch):
    for path, name in (("org/Some-Model", "Some-Model"), ("a/b/", "b"), ("sample", "sample"), ("/", "/")):
        assert ModelChoice(model=path).name == name
    names: list[tuple[str, ...]] = []

    class Recorder:
        uninterruptible = False

        def __init__(self, generator: Any, given: tuple[str, ...], options: ServeOptions) -> None:
            names.append(given)

        def run(self) -> None:
            pass

    monkeypatch.setattr("foredraft.serve.server.Server", Recorder)
    assert run("serve", "-m", model, "-d", "none", "--port", "0").status == 0
    assert run("serve", "-m", model, "-d", "none", "--port", "0", "--served-model-name", "x").status == 0
    assert names == [(model.name,), ("x",)]
