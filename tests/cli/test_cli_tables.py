"""The commands that run no model of the user's."""

import importlib
import json
import shlex
from dataclasses import fields
from importlib.metadata import EntryPoint, EntryPoints

import pytest
from cli_cases import Run

from foredraft.bench.report.plots import SUFFIXES
from foredraft.cli import COMMANDS, GROUP, PACKAGED, build, completion_names as names
from foredraft.compose.spec import find
from foredraft.core.options import describe_options, read_options
from foredraft.core.theory import best_length
from foredraft.core.verify import RULES
from foredraft.drafters import METHODS
from foredraft.heads.formats import FORMATS
from foredraft.train.drafts.run import DRAFTS
from foredraft.train.heads.recipes import RECIPES


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_what_the_command_says(run: Run, name: str):
    assert build(name).help.splitlines()[0] == COMMANDS[name]
    ended = run(name, "--help")
    assert ended.status == 0 and COMMANDS[name].split(":")[0] in ended.out
    assert COMMANDS[name].split(":")[0] in run("--help").out


def points(monkeypatch: pytest.MonkeyPatch, *found: EntryPoint) -> None:
    monkeypatch.setattr("foredraft.cli.entry_points", lambda **wanted: EntryPoints(found).select(**wanted))


@pytest.mark.parametrize(("package", "name"), [(package, name) for package in PACKAGED for name in PACKAGED[package]])
def test_a_command_of_a_missing_package_says_what_to_install(
    run: Run, monkeypatch: pytest.MonkeyPatch, package: str, name: str
):
    points(monkeypatch)
    assert f"pip install {package}" in run(name, "--replicas", "2").refusal
    assert PACKAGED[package][name] in run("--help").out


def test_a_package_adds_a_command(run: Run, monkeypatch: pytest.MonkeyPatch):
    points(monkeypatch, EntryPoint("guess", "foredraft.cli.theory", GROUP), EntryPoint("other", "absent", "elsewhere"))
    given = ("--alpha", ".8", "--cost", ".1")
    assert run("guess", *given).out == run("theory", *given).out != ""
    assert "No such command 'other'." in run("other").refusal


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_help_text(name: str):
    assert [each.name for each in build(name).params if not each.help or each.help.startswith("None")] == []


def test_methods_as_json(run: Run):
    found = json.loads(run("methods", "--json").out)
    assert [each["name"] for each in found] == list(METHODS)
    draft = next(each for each in found if each["name"] == "draft_model")
    assert draft["laws"] == ["chain", "without_replacement", "fixed"]
    assert draft["lossless"] is True and draft["options"]["num_assistant_tokens"] == 8
    assert set(draft) == {"name", "what", "laws", "lossless", "needs", "paper", "options"}


def test_names_to_complete_are_those_of_the_tables():
    assert names.FORMATS == FORMATS
    assert names.HEADS == tuple(RECIPES) and names.MODELS == tuple(DRAFTS)
    assert names.methods("") == list(METHODS)
    assert names.VERIFIERS == tuple(RULES)
    assert tuple(f".{name}" for name in names.FIGURES) == SUFFIXES


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_examples_of_the_help_are_command_lines(run: Run, name: str):
    file = importlib.import_module(f"foredraft.cli.{name}".rstrip("."))
    text = " ".join(run(*([name] if name else []), "--help").out.split())
    assert len(file.EXAMPLES) in (2, 3, 4)
    for line in file.EXAMPLES:
        assert line in text
        words = shlex.split(line.partition(" < ")[0].replace("torchrun --nproc-per-node 8 -m ", ""))
        assert words[0] == "foredraft" and name in ("", words[1], "tune", "skip", "viewer", "quantize", "answers"), (
            "the last four show what goes with them"
        )
        build(words[1]).make_context(words[1], words[2:], resilient_parsing=True)  # an unknown option raises


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_explained_in_the_words_that_are_typed(run: Run, name: str):
    ended = run("methods", name)
    assert ended.status == 0 and METHODS[name].needs in " ".join(ended.out.split())
    kind = find(name)[1]
    for each in describe_options(kind):
        assert len(each.meaning) > 10, f"{name} does not document {each.name}"
        assert each.default != "None", f"{name} does not say what happens without {each.name}: metadata unset"
        assert each.name in ended.out and each.default in ended.out
        default = next(field.default for field in fields(kind) if field.name == each.name)
        if default not in (None, ()):
            assert read_options(kind, name, {each.name: each.default}) == kind()


def test_defaults_of_methods_are_written_as_they_are_typed(run: Run):
    assert "widths  default: 7x5x3x1" in run("methods", "cape").out
    assert "background  default: yes" in run("methods", "online").out
    assert "assistant_early_exit  required" in run("methods", "early_exit").out
    assert "nodes  default: by cost" in run("methods", "sequoia").out
    assert "online:[draft_model:PATH]" in run("methods", "online").out, "square brackets are no markup"
    found = json.loads(run("methods", "draft_model", "--json").out)
    assert found["options"]["sinks"] == 4 and "first" in found["meanings"]["sinks"]
    assert "num_assistant_tokens" in found["meanings"], "those of a base class, too"


def test_an_unknown_method_is_one_sentence(run: Run):
    assert "Did you mean eagle" in run("methods", "eagle4").refusal


@pytest.mark.parametrize("width", [60, 100, 160])
def test_methods_fit_the_screen(run: Run, monkeypatch: pytest.MonkeyPatch, width: int):
    monkeypatch.setenv("COLUMNS", str(width))
    ended = run("methods")
    assert ended.status == 0 and "\x1b" not in ended.out
    assert max(map(len, ended.out.splitlines())) <= width
    for name, method in METHODS.items():
        assert name in ended.out
        assert all(law.value in ended.out for law in method.laws)


def test_theory_marks_the_best_length(run: Run):
    ended = run("theory", "--alpha", ".8", "--cost", ".05")
    assert ended.status == 0
    marked = [line for line in ended.out.splitlines() if "<- best" in line]
    assert [line.split() for line in marked] == [["8", "4.33", "3.09x", "2.17x", "<-", "best"]]
    assert "Best: 8 drafted tokens per step, 3.09x plain" in ended.out


def test_theory_as_json(run: Run):
    found = json.loads(run("theory", "--alpha", ".7", "--cost", ".1", "--json").out)
    best = best_length(0.7, 0.1)
    assert found["best"] == best._asdict() and found["pays"] is True
    rows = {row["length"]: row for row in found["rows"]}
    assert best.length in rows and list(rows) == sorted(rows)
    assert rows[2]["expected_tokens"] == pytest.approx(1 + 0.7 + 0.49)


def test_theory_says_when_nothing_pays_and_when_more_would_pay(run: Run):
    ended = run("theory", "--alpha", ".3", "--cost", ".4")
    assert "No gain" in ended.out and "plain decoding" in ended.out
    assert json.loads(run("theory", "--alpha", ".3", "--cost", ".4", "--json").out)["pays"] is False
    assert "longer drafts give more" in run("theory", "--alpha", ".9", "--cost", "0").out
