"""benchmarks/experiments/shared_noise.py on a few tokens: cells, going on after an interruption, and the table."""

import json
from pathlib import Path

import pytest

from benchmarks.experiments import shared_noise


def test_a_finished_cell_is_not_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    out = tmp_path / "cells.jsonl"
    pair = shared_noise.Pair("chain", "draft_model:{draft},num_assistant_tokens=2", "block")
    monkeypatch.setattr(shared_noise, "PAIRS", (pair,))
    few = ["--texts", "2", "--new-tokens", "6", "--temperatures", "1", "--out", str(out)]
    for rounds in ("1", "2"):
        shared_noise.EXPERIMENT.run([*few, "--rounds", rounds])
    cells = [line for line in map(json.loads, out.read_text("utf-8").splitlines()) if line["kind"] == "cell"]
    assert [(cell["rule"], cell["round"]) for cell in cells] == [
        (rule, number) for number in (0, 1) for rule in ("block", shared_noise.SHARED)
    ]
    assert all([tokens for tokens, _ in cell["texts"]] == [6, 6] and cell["nodes"] == 2 for cell in cells)
    assert [cell["differ"] for cell in cells if cell["rule"] == shared_noise.SHARED] == [0, 0]
    text = shared_noise.table(out)
    rules = (shared_noise.SHARED, "block")
    both = [[pair for cell in cells if cell["rule"] == rule for pair in cell["texts"]] for rule in rules]
    assert f"{sum(t for t, _ in both[0]) / sum(f for _, f in both[0]):.2f} / " in text
    assert "| chain, 2, block |" in text and "0 of the 4 texts" in text
    middle, low, high = shared_noise.ratio(*both)
    said = f"{middle:.2f} at T = 1 (1 cells; interval above 1: {low > 1:d}, below: {high < 1:d})"
    assert said in shared_noise.sentence(out)


def test_the_interval_of_a_ratio_is_of_pairs():
    """Prompts differ by a factor of ten, but the ratio of each is the same."""
    drawn = [(96, forwards) for forwards in (10, 20, 50, 100)]
    shared = [(96, 2 * forwards) for _, forwards in drawn]
    assert shared_noise.ratio(shared, drawn) == pytest.approx((0.5, 0.5, 0.5))
