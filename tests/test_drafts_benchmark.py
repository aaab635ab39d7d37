"""benchmarks/experiments/drafts.py: what is computed from laws and ranks, and the tables of its cells."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.experiments import drafts
from benchmarks.kit.experiment import missing

ORIGIN = {
    "commit": "0" * 40,
    "device": "a processor",
    "threads": 1,
    "torch": "2",
    "transformers": "5",
    "date": "2026-01-01",
}


def test_multi_step_sampling_accepts_as_often_as_its_simulation():
    source = torch.Generator().manual_seed(0)
    p, one, other = torch.rand(3, 1, 6, generator=source).softmax(-1).pow(4)
    p, one, other = (each / each.sum() for each in (p, one, other))
    sums = drafts.multi_step(p, [one, other])
    samples, accepted, law = 40_000, [], p.expand(40_000, 6).clone()
    missed = torch.ones(samples, dtype=torch.bool)
    for choice in range(4):
        q = (one, other)[choice % 2]
        token = torch.multinomial(q[0], samples, replacement=True, generator=source)
        ratio = law.gather(1, token[:, None])[:, 0] / q[0, token]
        missed &= torch.rand(samples, generator=source) >= ratio
        rest = (law - q).clamp(min=0)
        law = rest / rest.sum(1, keepdim=True)
        accepted.append(1 - float(missed.float().mean()))
    assert sums[:4] == pytest.approx(accepted, abs=0.01)


def test_a_rank_is_the_number_of_tokens_that_are_preferred():
    logits = torch.arange(20.0).expand(3, 20)
    assert drafts.ranked(logits, torch.tensor([19, 17, 3])) == "029"


def test_drafts_choose_in_turn():
    texts = [{"a": "0123", "b": "3210"}]
    assert [drafts._share(texts, ["a"], k) for k in (1, 2, 4)] == [1, 2, 4]
    assert [drafts._share(texts, ["a", "b"], k) for k in (1, 2, 3, 4)] == [1, 2, 3, 4]


def written(path: Path, cells: list[dict[str, Any]]) -> Path:
    commands = [f"python benchmarks/drafts.py {part} " for part in ("hits", "trees", "shapes", "cascades")]
    lessons = {"alone/2": {"tokens": 4096}, "boosted/2": {"tokens": 4096, "learns": 0.25}}
    origins = [{"kind": "provenance", **ORIGIN, "command": command, "lessons": lessons} for command in commands]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*origins, *cells]))
    return path


ABOUT = {"target": "sample", "start": "sample-draft", "temperature": 0.0}


def test_a_finished_cell_is_not_measured_again(tmp_path: Path):
    cell = {"family": "alone", "models": 2, "nodes": 12, "expansion": "2x1x1", "rule": None, "texts": [[8, 4, 9]]}
    path = written(tmp_path / "cells.jsonl", [{"kind": "trees", **ABOUT, **cell, "round": 1}])
    args = drafts.EXPERIMENT.parser(None).parse_args(["--parts", "trees", "--rounds", "2", "--out", str(path)])
    every = drafts.cells(args)
    (left_out,) = [each for each in every if each not in missing(every, args)]
    assert (left_out["family"], left_out["expansion"], left_out["rule"]) == ("alone", "2x1x1", None)
    assert (left_out["temperature"], left_out["round"]) == (0.0, 1) and len(every) > 50


def test_the_best_expansion_of_merged_trees_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tree = {"kind": "trees", **ABOUT, "family": "alone", "models": 1, "nodes": 12, "rule": None}
    cells = [
        {**tree, "round": 0, "expansion": "3x1", "texts": [[8, 4, 9]]},
        {**tree, "round": 0, "expansion": "2x1", "texts": [[8, 2, 9]]},
        {**tree, "round": 1, "expansion": "2x1", "texts": [[8, 2, 9]]},
    ]
    monkeypatch.setattr(drafts, "FILE", written(tmp_path / "cells.jsonl", cells))
    text = drafts.specinfer()
    assert "| 12 nodes: 1 draft | 4.00 (4.00 to 4.00), 2x1 |" in text
    assert "were distilled on 4,096 tokens, of which 25% count for the boosted ones after the first." in text


def test_trees_are_compared_on_the_same_prompts():
    """Boosted drafts take 1.25 times the forwards, each family with its best expansion."""
    tree = {"kind": "trees", **ABOUT, "models": 2, "nodes": 12, "rule": None}
    lengths = {("alone", "2x1", 0): 4, ("alone", "2x1", 1): 8, ("alone", "1x1", 0): 80, ("alone", "1x1", 1): 80}
    lengths |= {("boosted", "2x1", 1): 10, ("boosted", "2x1", 0): 5}
    cells = [
        {**tree, "family": family, "expansion": expansion, "round": number, "texts": [[80, forwards, 0]]}
        for (family, expansion, number), forwards in lengths.items()
    ]
    assert drafts._gains(cells)[2:] == ["| 12 nodes: 2 drafts, boosted / each by itself | 0.80 (0.80 to 0.80) |"]
    assert drafts._gains(cells[:4]) == []


def test_lessons_are_those_of_finished_models(tmp_path: Path):
    for name, validation in (("alone/2", {}), ("boosted/2", {"learns": 0.25})):
        (tmp_path / name / "draft").mkdir(parents=True)
        origin = {"validation": {"agreement": 0.5}, **validation}
        (tmp_path / name / "draft" / "provenance.json").write_text(json.dumps(origin))
        (tmp_path / name / "log.jsonl").write_text('{"tokens": 10}\n{"tokens": 20}\n{"resumed": 1}\n')
    (tmp_path / "alone" / "3").mkdir()
    own = {"tokens": 20, "agreement": 0.5}
    assert drafts.lessons(tmp_path) == {"alone/2": own, "boosted/2": {**own, "learns": 0.25}}


def test_both_families_begin_with_one_draft():
    """Two choices of one draft hit both tokens here; one of each hits one, with the second of its own family."""
    text = {"boosted/1": "01", "alone/2": "19", "alone/3": "99", "boosted/2": "90", "boosted/3": "99"}
    cell = {"temperature": 0.0, "tokens": 2, "ranks": [text]}
    rows = [line.split(" | ")[1:3] for line in drafts._hit_rates([cell], "")[2:]]
    assert rows == [["0.500", "1.000"], *[["0.500", "0.500"]] * 2, *[["0.500", "1.000"]] * 2]


def test_throughput_is_acceptance_over_the_time_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    about = {"kind": "shapes", **ABOUT}
    size = {"layers": 2, "hidden": 64, "parameters": 10**6, "validation": {"agreement": 0.5}}
    cells = [
        {**about, "latency": "target", "forward_nodes": 3, "milliseconds": 8.0},
        {**about, "latency": "wide", "forward_nodes": 1, "milliseconds": 1.0, **size},
        {**about, "shape": "wide", "length": 2, "round": 0, "texts": [[20, 10, 20, 0.1]]},
        {**about, "shape": "plain", "length": 0, "round": 0, "texts": [[20, 20, 0, 0.2]]},
    ]
    monkeypatch.setattr(drafts, "FILE", written(tmp_path / "cells.jsonl", cells))
    text = "\n".join(drafts.shape_tables())
    assert (
        "| 1.00 | 2.00 (2.00 to 2.00) | 200 | 200 | 2.00 (2.00 to 2.00) |" in text
        and "Plain decoding: 100 tokens/s" in text
    )


def test_the_cost_of_a_cascade_is_that_of_its_forwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cell = {"kind": "cascades", **ABOUT, "round": 0}
    cells = [
        {**cell, "arm": "plain", "texts": [[30, 30, 0, 0.6]], "calls": {"1000": 31}},
        {**cell, "arm": "plain", "round": 1, "texts": [[30, 30, 0, 9.0]], "calls": {"1000": 31}},
        {**cell, "arm": "vertical", "texts": [[30, 10, 40, 0.4]], "calls": {"1000": 11, "500": 10}},
    ]
    monkeypatch.setattr(drafts, "FILE", written(tmp_path / "cells.jsonl", cells))
    assert "| greedy: vertical | 3.00 (3.00 to 3.00) | 33 | 2.00 | 1.50 | 1 |" in drafts.cascade_table()
