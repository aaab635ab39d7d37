"""benchmarks/engines.py with the arms that need no peer: both run the same model, and missing peers are told."""

import importlib
import sys
from pathlib import Path

import pytest

import foredraft

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
MODEL = Path(foredraft.__path__[0]) / "models" / "sample-16m"


def test_two_engines_in_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    monkeypatch.syspath_prepend(BENCHMARKS)
    out = tmp_path / "engines.jsonl"
    words = ["engines.py", "--model", str(MODEL), "--prompt-files", str(tmp_path / "none"), "--out", str(out)]
    words += ["--tokens", "6", "--prompts", "1", "--scored", "40", "--only", "transformers float32*", "*float32 plain*"]
    monkeypatch.setattr(sys, "argv", words)
    importlib.import_module("engines").main()
    lines = importlib.import_module("reading").read(out)
    runs = {(run["arm"], run["task"]): run for run in lines["run"]}
    assert len(runs) == len(lines["run"]) == 12
    for task in ("edit", "code"):
        ours, theirs = runs["foredraft float32 plain", task], runs["transformers float32 plain", task]
        assert ours["output"] == theirs["output"] and len(ours["output"]) == 6
        assert 0 < ours["first_seconds"] < ours["seconds"] and 0 < theirs["first_seconds"] < theirs["seconds"]
    ours, theirs = (next(line for line in lines["quality"] if line["arm"].startswith(name)) for name in ("f", "t"))
    assert ours["kl"] < 1e-6 and ours["perplexity"] == pytest.approx(theirs["perplexity"], rel=1e-4)
    told = capsys.readouterr().out
    assert "Skipped llama.cpp: install" in told and "Skipped OpenVINO" in told
    assert told.count("| foredraft float32 plain | 1 |") == 2


def test_a_shape_with_random_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    shape = {**sizes, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setitem(importlib.import_module("write_gguf").SHAPES, "tiny", shape)
    out = tmp_path / "shapes.jsonl"
    words = ["engines.py", "--model", str(MODEL), "--prompt-files", str(tmp_path / "none"), "--out", str(out)]
    words += ["--shape", "tiny", "--tokens", "6", "--prompts", "1", "--only", "foredraft * plain @1"]
    monkeypatch.setattr(sys, "argv", words)
    importlib.import_module("engines").main()
    lines = importlib.import_module("reading").read(out)
    assert {run["arm"] for run in lines["run"]} == {"foredraft tiny-Q4_0 plain"} and "quality" not in lines
    assert lines["provenance"][0]["gguf"] == ["random.tiny-Q4_0.gguf"]
    assert len({tuple(run["output"]) for run in lines["run"]}) > 1
    theirs = [{**run, "arm": "llama.cpp tiny-Q4_0 plain", "seconds": 2 * run["seconds"]} for run in lines["run"]]
    theirs = [{**run, "first_seconds": 2 * run["first_seconds"]} for run in theirs]
    row = importlib.import_module("engine_tables").shapes({"run": lines["run"] + theirs}).splitlines()[2]
    assert row.startswith("| tiny-Q4_0 | 1 |") and row.endswith("| 2.00 | 2.00 |")
