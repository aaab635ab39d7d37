"""scripts/reproduce: what is finished stays, what fails is continued, what is missing is named."""

import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from test_docs import benchmark


@pytest.fixture
def reproduce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With two parts of its own, in a folder of its own."""
    module: Any = benchmark("reproduce")
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "STATE", tmp_path / "build")
    monkeypatch.setattr(module, "filled_in", lambda inputs: None)
    note = "import os, sys; open(sys.argv[1], 'a').write('x'); sys.exit(os.path.exists(f'{sys.argv[1]} fails'))"
    first, second = ([sys.executable, "-c", note, name] for name in ("one", "two"))
    parts = {
        "both": module.Part("two commands", 1.0, ("both.jsonl",), lambda inputs: (), lambda inputs: [first, second]),
        "far": module.Part("needs a folder", 1.0, (), lambda inputs: (inputs.models,), lambda inputs: [first]),
    }
    monkeypatch.setattr(module, "PARTS", parts)
    return module


def inputs(module: Any, **changed: Any) -> Any:
    nowhere = Path("nowhere")
    return module.Inputs(*4 * (nowhere,), "hub", *2 * (nowhere,), None, [])._replace(**changed)


def noted(module: Any, name: str) -> int:
    path = module.ROOT / name
    return len(path.read_text()) if path.exists() else 0


def test_what_is_finished_stays_and_what_failed_is_continued(reproduce: ModuleType, capfd: pytest.CaptureFixture[str]):
    module: Any = reproduce
    old = module.ROOT / "benchmarks" / "results" / "both.jsonl"
    old.write_text("old")
    fails = module.ROOT / "two fails"
    fails.touch()
    assert not module.make(["both"], inputs(module), again=False, dry=False)
    assert "both: exit status 1. The same command continues." in capfd.readouterr().err
    assert not old.exists() and (module.STATE / "before" / "both.jsonl").read_text() == "old"
    old.write_text("of the first command")
    fails.unlink()
    assert module.make(["both"], inputs(module), again=False, dry=True) and noted(module, "two") == 1
    assert module.make(["both"], inputs(module), again=False, dry=False)
    assert (noted(module, "one"), noted(module, "two")) == (1, 2), "only what failed ran again"
    assert old.read_text() == "of the first command", "a continued part keeps its results"
    assert "finished" in module.listed(inputs(module))


def test_again_runs_all_of_it(reproduce: ModuleType):
    module: Any = reproduce
    module.make(["both"], inputs(module), again=False, dry=False)
    module.make(["both"], inputs(module), again=True, dry=False)
    assert noted(module, "one") == 2


def test_what_is_missing_is_named(reproduce: ModuleType, capsys: pytest.CaptureFixture[str]):
    module: Any = reproduce
    assert not module.make(["far"], inputs(module), again=False, dry=False)
    assert "far: skipped, since there is no nowhere" in capsys.readouterr().err
    assert "needs nowhere" in module.listed(inputs(module)) and noted(module, "one") == 0


def test_every_part_names_paths_and_commands():
    for part in benchmark("reproduce").PARTS.values():
        given = inputs(benchmark("reproduce"))
        assert all(isinstance(path, Path) for path in part.needs(given))
        assert all(isinstance(word, str) for command in part.commands(given) for word in command)


def test_a_readers_model_and_prompts_leave_our_results_alone():
    module: Any = benchmark("reproduce")
    (command,) = module.real(inputs(module, own_model="mine", own_prompts=["a.jsonl", "b.jsonl"]))
    text = " ".join(map(str, command))
    assert "--model mine" in text and "--prompts a.jsonl b.jsonl" in text and "--eagle3" not in text
    assert f"--out {module.OWN_RESULTS}" in text and "benchmarks/results" not in text
    (ours,) = module.real(inputs(module))
    assert "--out" not in ours and "--eagle3" in ours


def test_universals_pairs_have_the_draft_that_was_trained_for_them():
    module: Any = benchmark("reproduce")
    answers, train, pairs = module.universal(inputs(module))
    options = {command[3]: dict(itertools.pairwise(command)) for command in (answers, train)}
    assert options["train"]["--data"] == answers[4] and options["train"]["-m"] == options["answers"]["-m"]
    given = dict(itertools.pairwise(pairs))
    assert Path(given["--trained"]) == Path(options["train"]["--out"]) / "draft"
    assert given["--smollm2"] == options["train"]["-m"]
