"""What type checkers tell a user: scripts that are right pass, and each mistake is found."""

import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import fields
from importlib.resources import files
from pathlib import Path

import pytest

from foredraft.core.sampling.params import SamplingOptions, SamplingParams
from foredraft.engine.beam.search import BeamKeywords, BeamOptions

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"
SCRIPTS = [HERE / "typed" / "good.py", HERE / "typed" / "bad.py"]
TORCH = """
class Tensor: ...
class device:
    def __init__(self, type: str) -> None: ...
class dtype: ...
float16: dtype
def tensor(data: object) -> Tensor: ...
def __getattr__(name: str) -> object: ...
"""


def test_the_package_says_that_it_is_typed():
    assert (files("foredraft") / "py.typed").is_file()


def test_the_keywords_for_type_checkers_are_those_that_are_taken():
    assert SamplingOptions.__annotations__.keys() == {field.name for field in fields(SamplingParams)}
    beams = {field.name for field in fields(BeamOptions)} - {"params"}
    assert beams <= BeamKeywords.__annotations__.keys()
    for name in BeamKeywords.__annotations__.keys() - beams:
        BeamOptions.from_options({name: getattr(SamplingParams(), name)})
        assert BeamKeywords.__annotations__[name] == SamplingOptions.__annotations__[name]


def marked() -> set[tuple[str, int]]:
    """The lines of the scripts that must be errors."""
    return {
        (script.name, number)
        for script in SCRIPTS
        for number, line in enumerate(script.read_text("utf-8").splitlines(), start=1)
        if line.endswith("# error")
    }


def checked(tool: str, *arguments: str, folder: Path) -> str:
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed: pip install 'foredraft[dev]'")
    command = [sys.executable, "-m", tool, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, (
        f"{tool} should find errors and nothing worse: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    )
    return done.stdout


@pytest.mark.slow
def test_pyright_finds_each_mistake_and_no_other(tmp_path: Path):
    for script in SCRIPTS:
        shutil.copy(script, tmp_path)
    settings = {"extraPaths": [str(SOURCE)], "pythonVersion": "3.10"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    output = checked("pyright", "--outputjson", "--pythonpath", sys.executable, folder=tmp_path)
    errors = [each for each in json.loads(output)["generalDiagnostics"] if each["severity"] == "error"]
    found = {(Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in errors}
    assert found == marked(), [(each["range"]["start"]["line"] + 1, each["message"]) for each in errors]


@pytest.mark.slow
def test_mypy_finds_each_mistake_and_no_other(tmp_path: Path):
    """torch is a stub here, since mypy would read all of it."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.pyi").write_text(TORCH)
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nmypy_path = {tmp_path}:{SOURCE}\npython_version = 3.10\nfollow_imports = silent\n"
        "cache_dir = /dev/null\n[mypy-torch]\nfollow_imports = silent\n"
        "[mypy-torch.*,transformers.*,jaxtyping.*,safetensors.*,rich.*]\nfollow_imports = skip\n"
    )
    output = checked("mypy", "--no-error-summary", *map(str, SCRIPTS), folder=tmp_path)
    lines = [line.split(":", 3) for line in output.splitlines() if ": error:" in line]
    found = {(Path(line[0]).name, int(line[1])) for line in lines}
    assert found == marked(), output
