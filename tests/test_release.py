"""What a release brings: its bill of materials, its citation, forms of issues, hooks and the image."""

import hashlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import foredraft

ROOT = Path(__file__).resolve().parent.parent
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


@pytest.fixture(scope="module")
def bom() -> ModuleType:
    pytest.importorskip("cyclonedx")
    spec = importlib.util.spec_from_file_location("bom", ROOT / "scripts" / "bom.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_bill_has_every_bundled_file_with_its_hash_and_licence(bom: ModuleType):
    components = {component.name: component for component in bom.bill(["serve"]).components}
    files = [path for path in bom.MODELS.rglob("*") if path.is_file() and path.parent != bom.MODELS]
    assert len(files) > 20
    for path in files:
        component = components[path.relative_to(bom.MODELS).as_posix()]
        assert [each.content for each in component.hashes] == [hashlib.sha256(path.read_bytes()).hexdigest()]
        assert [licence.id for licence in component.licenses] == ["Apache-2.0"]


def test_the_bill_has_the_training_data_and_all_packages(bom: ModuleType):
    bill = bom.bill(["serve"])
    data = bom.training_data()
    assert len(data) == 12 and all(row.licences for row in data)
    names = {component.name for component in bill.components}
    assert {row.sources for row in data} | {"torch", "transformers", "numpy", "fastapi", "xgrammar"} <= names
    assert "pytest" not in names and "fastapi" not in {each.name for each in bom.bill([]).components}
    assert [component.name for component in bill.components if not component.licenses] == []


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == foredraft.__version__ and citation["license"] == "Apache-2.0"


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_of_issues_ask_for_something(path: Path):
    form: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    assert {"name", "description", "body"} <= set(form)
    fields = [each for each in form["body"] if each["type"] != "markdown"]
    assert len({each["id"] for each in fields}) == len(fields)
    assert any(each.get("validations", {}).get("required") for each in fields)
    named = re.findall(r"docs/[\w/-]+\.md", path.read_text("utf-8"))
    assert [page for page in named if not (ROOT / page).exists()] == []


def test_there_are_forms_for_bugs_slow_drafters_and_new_ones():
    assert [path.stem for path in FORMS] == ["bug", "drafter", "slow"]


def test_hooks_call_the_scripts_of_the_house():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"][0]["hooks"]
    lint = (ROOT / "scripts" / "lint").read_text("utf-8")
    for hook in hooks:
        script, *words = hook["entry"].split()
        assert (ROOT / script).is_file()
        assert script != "scripts/lint" or f"        {words[0]})" in lint


def test_the_image_has_its_files_a_user_and_a_health_check():
    lines = (ROOT / "deploy" / "Dockerfile").read_text("utf-8").splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY") and "--from" not in line]
    assert all((ROOT / name).exists() for names in copied for name in names) and len(copied) == 3
    users = [line.split()[1] for line in lines if line.startswith("USER")]
    assert users[-1].isdigit() and int(users[-1]) > 0, "root runs the server"
    assert any(line.startswith("HEALTHCHECK") for line in lines)
    assert lines[-1].startswith("ENTRYPOINT [")


def test_the_first_install_line_of_the_readme_needs_no_index():
    install = (ROOT / "README.md").read_text("utf-8").partition("## Install")[2]
    assert re.search(r"```sh\npip install \.", install)


def test_ci_runs_the_two_commands_of_a_fresh_machine():
    """Those that the README names first, each once."""
    first = re.findall(
        r"```sh\n(.*?)```", (ROOT / "README.md").read_text("utf-8").partition("## Install")[2], re.DOTALL
    )[0]
    commands = [line.partition("#")[0].strip() for line in first.splitlines()]
    assert commands == ["make demo", "make test"]
    makefile, ci = ((ROOT / name).read_text("utf-8") for name in ("Makefile", ".ci/run"))
    for command in commands:
        assert re.search(rf"^{command.split()[1]}: .*## ", makefile, re.MULTILINE)
        assert len(re.findall(rf"^stage .*\b{command}$", ci, re.MULTILINE)) == 1
