"""A tiny model that speaks with the bundled tokenizer, and ways to run the command line on it."""

import io
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cli_cases import BUNDLED, NAN_AFTER, PROMPT, Ended, Run

import foredraft
import processes
import tiny
from foredraft.cli import main


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "FOREDRAFT_DEBUG", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line in this process; ``stdin`` is a pipe with that text."""

    def run(*arguments: str | Path, stdin: str = "") -> Ended:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        return Ended(status, *capsys.readouterr())

    return run


@pytest.fixture
def environment(plain_environment: None, tmp_path: Path) -> dict[str, str]:
    """For commands in a process of their own."""
    return {
        **processes.environment(),
        "TERM": "xterm-256color",
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "PROMPT_TOOLKIT_NO_CPR": "1",
    }


def save_model(folder: Path, **changes: object) -> Path:
    """A random Llama with the vocabulary, the tokenizer and the chat template of the bundled model."""
    model = tiny.build("llama", vocab_size=8192, max_position_embeddings=4096, tie_word_embeddings=False, **changes)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BUNDLED / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("cli") / "tiny")


@pytest.fixture(scope="session")
def plain(model: Path) -> Iterator[foredraft.Generator]:
    """The library on the tiny model, without drafts: what the command line must say, too."""
    generator = foredraft.load(str(model), "none", device="cpu")
    yield generator
    generator.close()


@pytest.fixture(scope="session")
def broken_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, but reading the token that it says seventh after ``PROMPT`` gives NaN."""
    generator = foredraft.load(str(model), None, device="cpu")
    tokens = generator.generate(PROMPT, max_new_tokens=NAN_AFTER).tokens
    assert len(set(tokens)) == NAN_AFTER and not set(tokens) & set(generator.encode(PROMPT))
    loaded = generator.engine.target.model
    generator.close()
    folder = tmp_path_factory.mktemp("cli") / "broken"
    shutil.copytree(model, folder)
    with torch.no_grad():
        loaded.get_input_embeddings().weight[tokens[-1]] = float("nan")
    loaded.save_pretrained(folder)
    return folder
