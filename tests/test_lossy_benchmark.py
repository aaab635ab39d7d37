"""benchmarks/experiments/lossy.py on a few tokens: cells, going on, parts, scores, and the table."""

import json
import math
from pathlib import Path

import pytest

import foredraft
from benchmarks.experiments import early_exit, lossy
from benchmarks.kit.reading import read
from benchmarks.tools import held_out

TASKS = ("sums", "talk")
SUMS = ["What is 2 + 3?", "What is 7 - 4?"]


@pytest.fixture
def prompts(tmp_path: Path) -> list[str]:
    sums, talk = tmp_path / "sums.jsonl", tmp_path / "talk.jsonl"
    rows = [{"turns": [text], "reference": [f"so\n#### {n}"]} for text, n in zip(SUMS, (5, 3), strict=True)]
    sums.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    talk.write_text(json.dumps({"turns": ["Hello!"], "reference": ["Hi, 7 times"]}) + "\n", encoding="utf-8")
    return [str(sums), str(talk)]


def test_numbers_of_answers(prompts: list[str]):
    texts = {"18": 18, "costs $1,250.50.": 1250.5, "-3 then 4": 4, "\\boxed{-7}": -7, "no number": None}
    assert {text: early_exit.last_number(text) for text in texts} == texts
    found = lossy.questions([Path(path) for path in prompts], 5)
    assert [(each.task, each.answer) for each in found] == [("sums", 5.0), ("sums", 3.0), ("talk", None)]


def test_scores_are_the_targets():
    """transformers' sums are those of ``Generator.score``, for texts of different lengths in one batch."""
    texts = [([5, 9, 2], [7, 7, 8, 300]), ([4] * 9, [11]), ([3], [900, 2])]
    found = lossy.Scorer("sample", "cpu", 2)(texts, 0.5)
    with foredraft.load("sample", "none", dtype="float32") as plain:
        for (prompt, output), own in zip(texts, found, strict=True):
            scores = plain.score([*prompt, *output], top=1)[len(prompt) :]
            assert own["logp_1"] == pytest.approx(sum(each.logprob for each in scores), abs=1e-3)
            assert own["best"] == sum(each.token in each.top for each in scores)
        ((prompt, (token,)), own) = texts[1], found[1]
        law = plain.score([*prompt, token], top=plain.engine.target.vocab_size)[-1].top
        whole = math.log(sum(math.exp(2 * value) for value in law.values()))
        assert own["logp"] == pytest.approx(2 * law[token] - whole, abs=1e-3)
    assert lossy.Scorer("sample", "cpu", 2)(texts, 0.0)[0]["logp"] is None


def test_a_finished_cell_is_not_run_again(prompts: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    out = tmp_path / "cells.jsonl"
    monkeypatch.setitem(lossy.RULES, "medusa", ("typical,epsilon=0.01",))
    monkeypatch.setitem(lossy.RULES, "blockwise", ("approximate,min_block=3",))
    few = ["--model", "sample", "--medusa", "sample-medusa", "--blockwise", "sample-medusa"]
    few += ["--prompts", *prompts, "--count", "2", "--new-tokens", "12", "--temperatures", "0", "1", "--out", str(out)]
    for part in ("1/3", "2/3", "1/1"):
        lossy.EXPERIMENT.run([*few, "--part", part])
    kinds = read(out)
    cells = {(cell["drafter"], cell["rule"], cell["temperature"]): cell["texts"] for cell in kinds["cell"]}
    assert len(cells) == len(kinds["cell"]) == 7, "typical acceptance is exact at temperature 0"
    plain = cells["medusa", "exact", 0.0]
    assert [text["task"] for text in plain] == ["sums", "sums", "talk"]
    assert [text["right"] is None for text in plain] == [False, False, True]
    assert all(text["best"] == text["tokens"] <= 12 and text["grams"] == max(0, text["tokens"] - 3) for text in plain)
    for heat in (0.0, 1.0):  # the exact rule gives plain decoding's texts, whatever drafts
        both = [[text["logp_1"] for text in cells[name, "exact", heat]] for name in ("medusa", "blockwise")]
        assert both[0] == pytest.approx(both[1], abs=1e-2)
    blocks = cells["blockwise", "approximate,min_block=3", 0.0]
    assert sum(text["tokens"] for text in blocks) > 2 * sum(text["forwards"] for text in blocks)
    assert sum(text["logp_1"] for text in blocks) < sum(text["logp_1"] for text in plain)

    page = lossy.table("blockwise", out)
    length = sum(text["tokens"] for text in blocks) / sum(text["forwards"] for text in blocks)
    assert f"| 0 | `approximate,min_block=3` | {length:.2f} (" in page
    assert "2 prompts of sums, 1 prompts of talk, 12 tokens at most, sample." in page
    assert lossy.table("medusa", tmp_path / "none.jsonl") == ""


def test_weights_of_the_engine_have_cells_and_a_table_of_their_own(
    prompts: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    out = tmp_path / "cells.jsonl"
    monkeypatch.setitem(lossy.RULES, "medusa", ())
    few = ["--model", "sample", "--medusa", "sample-medusa", "--prompts", *prompts, "--count", "2"]
    few += ["--new-tokens", "12", "--temperatures", "0", "--out", str(out)]
    for options in ([], ["--weights", "int8", "--rows", "2"], ["--weights", "int8"]):
        lossy.EXPERIMENT.run([*few, *options])
    lines = read(out)["cell"]
    assert [line["weights"] for line in lines] == ["float32", "int8"]
    old = {name: value for name, value in lines[0].items() if name != "weights"}
    of = lossy.LossyCell.of
    assert of(old) == of(lines[0]) != of(lines[1]), "older lines are in float32"
    first, second = lossy.table("medusa", out).split("Made by `python -m benchmarks lossy`.")[:2]
    assert "float32, torch" in first and "int8, torch" in second


def test_speeds_stand_beside_quality(prompts: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(lossy.RULES, "medusa", ("typical,epsilon=0.01", "typical,epsilon=0.09"))
    few = ["--model", "sample", "--medusa", "sample-medusa", "--prompts", *prompts, "--count", "2"]
    few += ["--new-tokens", "8", "--temperatures", "0", "1"]
    out, fast = tmp_path / "cells.jsonl", tmp_path / lossy.SPEEDS
    for part in ("1/2", "1/1"):
        lossy.SPEEDS_OF_RULES.run([*few, "--out", str(fast), "--part", part])
    lossy.EXPERIMENT.run([*few, "--out", str(out)])
    lines = read(fast)["speed"]
    assert sorted((line["temperature"], line["task"]) for line in lines) == [(t, n) for t in (0, 1) for n in TASKS]
    for line in lines:
        rules = ["exact", *(lossy.RULES["medusa"] if line["temperature"] else ())]
        arms = ["none", *(rule + size for rule in rules for size in ("", ", fixed size"))]
        asked = 2 if line["task"] == "sums" else 1
        assert [(run["arm"], run["prompt"]) for run in line["runs"]] == [(arm, n) for arm in arms for n in range(asked)]
        assert all(run["tokens"] == 8 and run["seconds"] > 0 for run in line["runs"])
        assert any(run["forwards"] < 8 for run in line["runs"] if "fixed" in run["arm"])
        for run in line["runs"]:  # twice as fast as plain decoding, and all others 4 times
            run["seconds"] = {"none": 4.0, "exact": 2.0}.get(run["arm"], 1.0)
    kept = [line for line in fast.read_text(encoding="utf-8").splitlines() if '"provenance"' in line]
    fast.write_text("\n".join([*kept, *map(json.dumps, lines)]) + "\n", encoding="utf-8")
    page = lossy.table("medusa", out)
    assert "| 0 | exact | 2.00 (2.00 to 2.00) | 4.00 (4.00 to 4.00) |" in page
    assert "| 1 | `typical,epsilon=0.09` | 4.00 (4.00 to 4.00) |" in page
    assert "Speed-up over plain decoding: 2 of sums, 1 of talk, 8 tokens each" in page


def test_held_out_answers_are_of_prompts_that_no_training_answer_has(tmp_path: Path):
    def row(prompt: int, answer: int) -> str:
        return json.dumps({"ids": [1, prompt, answer], "prompt_length": 2}) + "\n"

    files = [tmp_path / "T0.jsonl", tmp_path / "T1.jsonl"]
    files[0].write_text("".join(row(prompt, 10 + prompt) for prompt in (1, 2, 3, 4)), encoding="utf-8")
    files[1].write_text("".join(row(prompt, 20 + prompt) for prompt in (1, 2, 3, 9)), encoding="utf-8")
    held_out.split(files, tmp_path / "parts", 2)
    found = {
        file.stem: [json.loads(line)["ids"][2] for line in file.read_text("utf-8").splitlines()]
        for file in (tmp_path / "parts").iterdir()
    }
    assert found == {"train": [11, 14, 21, 29], "held_T0": [12, 13], "held_T1": [22, 23]}


def test_both_targets_score_held_out_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    answers = tmp_path / "held.jsonl"
    answers.write_text(json.dumps({"ids": [5, 9, 2, 7, 7, 8], "prompt_length": 3}) + "\n", encoding="utf-8")
    out = tmp_path / "out.jsonl"
    words = ["--model", "sample", "--medusa2", "sample", "--answers", str(answers), "--out", str(out)]
    for _ in range(2):
        lossy.EXPERIMENT.run(words)
    lines = read(out)["answers"]
    assert [(line["target"], line["file"], len(line["texts"])) for line in lines] == [
        ("original", "held", 1),
        ("medusa2", "held", 1),
    ]
    (own,) = lossy.Scorer("sample", "cpu", 1)([([5, 9, 2], [7, 7, 8])], 1.0)
    expected = {"tokens": 3, "logp_1": own["logp_1"], "best": own["best"]}
    assert lines[0]["texts"] == lines[1]["texts"] == [expected]
    shown = math.exp(-own["logp_1"] / 3)
    assert f"| Medusa-2's | {shown:.2f} ({shown:.2f} to {shown:.2f}) |" in lossy.answers_table(lines)[-1]
