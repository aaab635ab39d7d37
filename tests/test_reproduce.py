"""scripts/reproduce: what is finished stays, what fails is continued, what is missing is named."""

import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import reproduce as module_of_parts
from benchmarks.kit import catalog
from benchmarks.kit.experiment import Experiment, Inputs


@pytest.fixture
def reproduce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With two experiments of its own, in a folder of its own."""
    module: Any = module_of_parts
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "STATE", tmp_path / "build")
    monkeypatch.setattr(module, "filled_in", lambda name, inputs: None)
    note = "import os, sys; open(sys.argv[1], 'a').write('x'); sys.exit(os.path.exists(f'{sys.argv[1]} fails'))"
    first, second = ([sys.executable, "-c", note, name] for name in ("one", "two"))
    both = Experiment(name="both", question="two commands", hours=1.0, commands=lambda inputs: [first, second])
    far = Experiment(
        name="far", question="a folder", hours=1.0, needs=lambda i: (i.models,), commands=lambda i: [first], results=()
    )
    monkeypatch.setattr(module, "every", lambda: {"both": both, "far": far})
    return module


def inputs(**changed: Any) -> Inputs:
    nowhere = Path("nowhere")
    return Inputs(*4 * (nowhere,), "hub", *2 * (nowhere,), None, [], nowhere / "state")._replace(**changed)


def noted(module: Any, name: str) -> int:
    path = module.ROOT / name
    return len(path.read_text()) if path.exists() else 0


def test_what_is_finished_stays_and_what_failed_is_continued(reproduce: ModuleType, capfd: pytest.CaptureFixture[str]):
    module: Any = reproduce
    old = module.ROOT / "benchmarks" / "results" / "both.jsonl"
    old.write_text("old")
    fails = module.ROOT / "two fails"
    fails.touch()
    assert not module.make(["both"], inputs(), again=False, dry=False)
    assert "both: exit status 1. The same command continues." in capfd.readouterr().err
    assert not old.exists() and (module.STATE / "before" / "both.jsonl").read_text() == "old"
    old.write_text("of the first command")
    fails.unlink()
    assert module.make(["both"], inputs(), again=False, dry=True) and noted(module, "two") == 1
    assert module.make(["both"], inputs(), again=False, dry=False)
    assert (noted(module, "one"), noted(module, "two")) == (1, 2), "only what failed ran again"
    assert old.read_text() == "of the first command", "a continued part keeps its results"
    assert "finished" in module.listed(inputs())


def test_again_runs_all_of_it(reproduce: ModuleType):
    module: Any = reproduce
    module.make(["both"], inputs(), again=False, dry=False)
    module.make(["both"], inputs(), again=True, dry=False)
    assert noted(module, "one") == 2


def test_what_is_missing_is_named(reproduce: ModuleType, capsys: pytest.CaptureFixture[str]):
    module: Any = reproduce
    assert not module.make(["far"], inputs(), again=False, dry=False)
    assert "far: skipped, since there is no nowhere" in capsys.readouterr().err
    assert "needs nowhere" in module.listed(inputs()) and noted(module, "one") == 0


@pytest.mark.parametrize("name", [name for name, each in catalog.every().items() if each.hours])
def test_every_experiment_names_paths_and_commands(name: str):
    part = catalog.every()[name]
    assert all(isinstance(path, Path) for path in part.needs(inputs()))
    for _, dash, module, *words in part.reproduction(inputs()):
        assert all(isinstance(word, str) for word in words)
        if (dash, module) == ("-m", "benchmarks"):
            catalog.find(words[0])[1].parser(None).parse_args(words[1:])


def test_a_readers_model_and_prompts_leave_our_results_alone():
    real = catalog.every()["real"]
    (command,) = real.reproduction(inputs(own_model="mine", own_prompts=["a.jsonl", "b.jsonl"]))
    text = " ".join(map(str, command))
    assert "--model mine" in text and "--prompts a.jsonl b.jsonl" in text and "--eagle3" not in text
    assert "--out nowhere/state/own.jsonl" in text and "benchmarks/results" not in text
    (ours,) = real.reproduction(inputs())
    assert "--out" not in ours and "--eagle3" in ours


def test_universals_pairs_have_the_draft_that_was_trained_for_them():
    answers, train, pairs = catalog.every()["universal"].reproduction(inputs())
    options = {command[3]: dict(itertools.pairwise(command)) for command in (answers, train)}
    assert options["train"]["--data"] == answers[4] and options["train"]["-m"] == options["answers"]["-m"]
    given = dict(itertools.pairwise(pairs))
    assert Path(given["--trained"]) == Path(options["train"]["--out"]) / "draft"
    assert given["--smollm2"] == options["train"]["-m"]
