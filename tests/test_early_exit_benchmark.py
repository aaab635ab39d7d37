"""benchmarks/experiments/early_exit.py on a few tokens: chains, quality, going on, the table."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

import foredraft
from benchmarks.experiments import early_exit
from benchmarks.kit.reading import read
from foredraft.drafters.layer_skip.config import SkipConfig, write_skip_config
from foredraft.model.loading.bundled import resolve

FOUND = {"tokens_a_step": 1.5, "length": 1, "cost": 0.7, "speed_by_weights": 0.88, "tokens": 90}


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A command in which the trained model is the original."""
    sums, held, skips = tmp_path / "sums.jsonl", tmp_path / "held.jsonl", tmp_path / "skips.json"
    rows = [{"turns": [f"What is {n} + 3?"], "reference": [f"so <<{n}+3>>\n#### {n + 3}"]} for n in (2, 7)]
    sums.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    held.write_text(json.dumps({"ids": [5, 9, 2, 7, 7], "prompt_length": 3}) + "\n", encoding="utf-8")
    write_skip_config(skips, SkipConfig("sample", 8, (5, 6), (5, 6, 7), FOUND))
    trained = tmp_path / "run" / "model"
    trained.mkdir(parents=True)
    for file in Path(resolve("sample")).iterdir():
        if file.is_file():
            (trained / file.name).symlink_to(file)
    (trained / "provenance.json").unlink(missing_ok=True)
    notes = {"command": "foredraft train early_exit", "device": "a processor", "commit": "0", "validation": {}}
    (trained / "provenance.json").write_text(json.dumps(notes), encoding="utf-8")
    line = {"step": 1, "tokens": 20_000, "seconds": 3.0}
    (trained.parent / "log.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    found = ["--model", "sample", "--trained", trained, "--prompts", sums, "--skips", skips, "--answers", held]
    found += ["--count", 2, "--new-tokens", 6, "--answer-tokens", 4, "--exits", 3, 8, "--chains", 2]
    return [*map(str, found), "--temperatures", "0", "--device", "cpu", "--out", str(tmp_path / "out.jsonl")]


def test_a_model_beside_itself(words: list[str], tmp_path: Path):
    early_exit.EXPERIMENT.run(words)
    out = tmp_path / "out.jsonl"
    kinds: dict[str, list[dict[str, Any]]] = read(out)
    original, whole, trained, _, skipping = kinds["arm"]
    assert [arm["model"] for arm in kinds["arm"]] == ["original", "original", "trained", "trained", "layer_skip"]
    assert original["tasks"] == trained["tasks"] and all(arm["same"] == 2 for arm in kinds["arm"])
    assert sum(original["tasks"]["sums"]["forwards"]) < sum(original["tasks"]["sums"]["tokens"]) == 12
    assert whole["tasks"]["sums"]["forwards"] == [2, 2], "all layers accept all: six tokens in two forwards"
    assert skipping["exit"] == "6 attentions and 5 MLPs" and original["cost"] < skipping["cost"] < 1
    held, sums = kinds["quality"]
    assert held["loss_original"] == held["loss_trained"] and held["equal"] == held["tokens"] == [2]
    assert sums["right_original"] == sums["right_trained"] and len(sums["tokens"]) == 2
    with foredraft.load("sample", "none", dtype="float32") as plain:
        scores = plain.score([5, 9, 2, 7, 7])[3:]
    assert held["loss_original"] == [pytest.approx(-sum(each.logprob for each in scores), abs=1e-3)]
    text, before = early_exit.table(out), out.read_text()
    assert f"| {math.exp(held['loss_original'][0] / 2):.2f} (" in text and "| 1.000 |" in text
    assert text.count("| 3 of 8 |") == 2 and "before and after `train early_exit`" in text
    assert "| 6 attentions and 5 MLPs of 8 layers |" in text and "0.02M tokens in 3 seconds" in text
    assert "that `foredraft skip` found: 1.50 tokens per step" in text and "so 0.88 of plain" in text
    early_exit.EXPERIMENT.run(words)
    assert out.read_text() == before, "what is there is not made again"


def test_chains_run_on_the_native_engine(words: list[str], tmp_path: Path):
    early_exit.EXPERIMENT.run([*words, "--weights", "int8", "--parts", "original", "layer_skip"])
    kinds = read(tmp_path / "out.jsonl")
    assert [arm["same"] for arm in kinds["arm"]] == [2, 2, 2] and kinds["provenance"][0]["weights"] == "int8"
    assert "int8 on" in early_exit.table(tmp_path / "out.jsonl")
