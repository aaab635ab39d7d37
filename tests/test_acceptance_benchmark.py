"""benchmarks/experiments/acceptance.py on a few tokens: cells with their rules, going on, and the tables."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import foredraft
from benchmarks.experiments import acceptance
from foredraft.bench.check import draft_always
from foredraft.model.native.model import NativeLM
from native import needs_compiler

MODELS = Path(foredraft.__path__[0]) / "models"
HEADS = {"eagle1": "sample-eagle", "blockwise": "sample-medusa"}
METHODS = ("eagle1-chain", "blockwise", "prompt_lookup")


def run(folder: Path, *more: str) -> list[dict[str, Any]]:
    """Run the script on prompts of two tasks; the cells' lines of its results."""
    for task in ("gsm8k", "qa"):
        file = folder / acceptance.TASKS[task]
        file.parent.mkdir(parents=True, exist_ok=True)
        turns = [f"How much is {number} and 2? And {task}? Count: 1, 2, 3, 1, 2, 3, 1," for number in (1, 2)]
        file.write_text("".join(json.dumps({"question_id": each, "turns": [each]}) + "\n" for each in turns))
    out = folder / "acceptance.jsonl"
    words = ["--model", "sample", "--prompts", str(folder), "--out", str(out)]
    words += [word for name, path in HEADS.items() for word in (f"--{name}", str(MODELS / path))]
    words += ["--output-tokens", "6", "--temperatures", "0", "1", "--nodes", "4", *more]
    acceptance.EXPERIMENT.run(words)
    lines = map(json.loads, out.read_text("utf-8").splitlines())
    return [line for line in lines if line["kind"] == "cell"]


def test_every_arm_with_every_rule_writes_plain_decodings_texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    lines = run(tmp_path, "--tasks", "gsm8k", "--only", *METHODS)
    plain = {line["temperature"]: [text[3] for text in line["texts"]] for line in lines if line["method"] == "none"}
    rules: dict[str, set[str]] = {}
    for line in lines:
        assert len(line["texts"]) == 2 and line["task"] == "gsm8k"
        for tokens, forwards, reached, *_ in line["texts"]:
            assert tokens == 6 and 6 - sum(reached) <= forwards <= 6
        if line["rule"] in (acceptance.SHARED, acceptance.PICKED):
            assert [text[3] for text in line["texts"]] == plain[line["temperature"]], line
        else:
            assert line["temperature"] == 1 and all(len(text) == 3 for text in line["texts"])
        rules.setdefault(line["method"], set()).add(line["rule"])
        assert line["size"] in ("", "4", "heads") and line["nodes"] <= 4
    assert rules["eagle1-chain"] == {acceptance.SHARED, "traversal", "recursive", acceptance.PICKED}
    assert rules["blockwise"] == {acceptance.SHARED, "block", "token", acceptance.PICKED}
    assert rules["prompt_lookup"] == {acceptance.SHARED}

    again = run(tmp_path, "--tasks", "gsm8k", "qa", "--only", "prompt_lookup")
    added = again[len(lines) :]
    assert again[: len(lines)] == lines and {line["task"] for line in added} == {"qa"}
    assert [line["method"] for line in added] == ["none"] * 2 + ["prompt_lookup"] * 2
    text = acceptance.tables(tmp_path / "acceptance.jsonl")
    same = sum(len(line["texts"]) for line in again if line["method"] != "none" and len(line["texts"][0]) == 4)
    assert f"{same} of {same}." in text and "Acceptance on 2 prompts a task, 6 new tokens." in text
    assert "| EAGLE-1, chain: block over token verification | 1 | " in text
    assert "| blockwise: block over token verification | 1 | " in text


@pytest.mark.parametrize(
    ("rules", "title", "columns"),
    [
        ((), "Temperature 1, shared noise:", ["acceptance length"]),
        (("picked",), "Temperature 1, shared noise:", ["shared noise", "picked"]),
        (("block",), "Temperature 1 (by task: shared noise / ratio rule):", ["shared noise", "drawn, ratio rule"]),
    ],
)
def test_a_table_has_the_rules_that_were_run(rules: tuple[str, ...], title: str, columns: list[str]):
    texts = [acceptance.Run("", "qa", (), tokens=6, forwards=3, accepted_by_depth=(3,))] * 2
    results = acceptance.Results(nodes={("blockwise", "4"): 4})
    results.texts = {("blockwise", "4", rule, 1.0): {"qa": texts} for rule in (acceptance.SHARED, *rules)}
    found, table = acceptance.by_arm(results, 1.0)
    head, _, row = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
    assert found == title and head == ["method", "nodes", *columns, "by position", "qa"]
    assert len(row) == len(head) and row[-1] == ("2.00 / 2.00" if "block" in rules else "2.00")


@needs_compiler
def test_replays_are_what_would_be_decoded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    methods = (*METHODS, "sequoia", "--draft-model", str(MODELS / "draft-4m"))
    words = ("--tasks", "gsm8k", "--weights", "int8", "--only", *methods, "--output-tokens", "24", "--batch", "1")
    forwards, compute = [0], NativeLM.compute

    def counted(*given: Any) -> Any:
        forwards[-1] += 1
        return compute(*given)

    monkeypatch.setattr(NativeLM, "compute", counted)
    replayed = run(tmp_path / "replayed", *words)
    forwards.append(0)
    monkeypatch.setattr(acceptance.Bench, "_replayed", lambda bench, *given: bench._decoded(*given))
    assert run(tmp_path / "decoded", *words) == replayed
    assert any(sum(text[2]) for line in replayed for text in line["texts"])
    assert 0 < forwards[0] < forwards[1]


def test_what_matters_most_comes_first():
    found = acceptance.arms_of({"eagle3": "HEAD", "medusa": "OTHER"}, [0, 0.6, 1], [4, 60])
    places = {(cell.method, cell.size, cell.rule, cell.temperature): place for place, cell in enumerate(found)}
    order = [
        ("none", "", "shared noise", 0.6),
        ("eagle3", "4", "shared noise", 1),
        ("medusa", "4", "picked", 1),
        ("eagle3", "60", "shared noise", 0),
        ("eagle3", "60", "picked", 1),
        ("eagle3", "4", "shared noise", 0.6),
        ("medusa", "4", "traversal", 1),
        ("eagle3", "60", "traversal", 1),
    ]
    assert [places[each] for each in order] == sorted(places[each] for each in order)
    assert len(places) == len(found) and all(cell.size in ("", "4", "60") for cell in found)


def test_picked_drafts_are_those_of_greedy_rows():
    """They do not depend on the target's noise; with shared noise, drafts do."""
    with foredraft.load("sample", "eagle1", device="cpu", dtype="float32") as generator:
        drafter = generator.engine.drafter
        picked = acceptance.Picked(SimpleNamespace(needs=drafter.needs, propose=None))
        propose, same = drafter.propose, []

        def compared(view: Any, plan: Any) -> Any:
            picked._inner.propose = propose
            drafts = [each.tree.tokens for each in (propose(view.as_greedy(), plan), picked.propose(view, plan))]
            draft = propose(view, plan)
            same.append([tokens.equal(drafts[0]) for tokens in (drafts[1], draft.tree.tokens)])
            return draft

        drafter.propose = compared
        draft_always(generator)
        generator.generate("Once upon a time", max_new_tokens=20, temperature=1.0, seed=1)
    assert len(same) > 2 and all(each[0] for each in same) and not all(each[1] for each in same)


def test_a_gpu_that_is_too_small_gets_fewer_rows(monkeypatch: pytest.MonkeyPatch):
    bench, tried = acceptance.Bench(SimpleNamespace(gigabytes=1)), []

    def lines(cell: Any, tasks: Any, rows: int) -> list[Any]:
        tried.append(rows)
        if rows > 2:
            raise torch.OutOfMemoryError("too small")
        return ["line"]

    monkeypatch.setattr(bench, "_most", lambda cell: 12)
    monkeypatch.setattr(bench, "_lines", lines)
    assert bench.lines(None, ["qa"]) == ["line"] and tried == [12, 6, 3, 1]


def test_a_cell_that_fails_stops_no_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(acceptance, "_bench", [SimpleNamespace(lines=lambda cell, tasks: 1 / 0)])
    outcome = acceptance.run("cell", ["qa"], float("inf"))
    assert outcome.failed and "ZeroDivisionError" in outcome.about
    assert acceptance.run("cell", ["qa"], 0.0).about == "too late"


def test_an_interval_of_a_difference_is_of_pairs():
    """Prompts differ by a factor of ten, but one method takes half the other's forwards on each."""
    slow = [acceptance.Run("", "qa", (), tokens=96, forwards=forwards) for forwards in (12, 12, 12, 12)]
    fast = [replace(run, forwards=6) for run in slow]
    assert acceptance.difference(list(zip(fast, slow, strict=True))) == pytest.approx((8.0, 8.0, 8.0))
    varied = [replace(run, forwards=forwards) for run, forwards in zip(fast, (3, 6, 12, 24), strict=True)]
    middle, low, high = acceptance.difference(list(zip(varied, slow, strict=True)))
    assert middle == pytest.approx(384 / 45 - 8) and low < middle < high
