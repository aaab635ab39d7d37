"""Answers as Spec-Bench's evaluation/speed.py and equal.py read them."""

import json
from pathlib import Path
from typing import Any

import pytest

from foredraft.bench.measure.records import OutputRecord, Run
from foredraft.bench.measure.spec_bench import write_answers
from foredraft.core.errors import DataError, OptionError


def run(name: str = "81", turn: int = 0, text: str = "So be it.", **given: Any) -> Run:
    """Six tokens in three forwards of 3, 2 and 1, in two seconds."""
    usual: dict[str, Any] = {"arm": "eagle3", "task": "mt_bench", "category": "writing", "model": "sample"}
    counts = {"tokens": 6, "forwards": 3, "accepted_by_depth": (2, 1), "seconds": 2.0, "prefill_seconds": 0.5}
    said = (OutputRecord(name, 3, 6, "abc", (1, 2, 3, 4, 5, 6), text),)
    return Run(prompts=(name,), turn=turn, **{**usual, **counts, "outputs": said, **given})


def rows(path: Path) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def speed(path: Path, task: str = "overall") -> tuple[list[float], list[int]]:
    """Tokens a second and accepted lengths, by the rules of its ``speed``."""
    data = [row for row in rows(path) if task in ("overall", row["category"])]
    speeds, accepted = [], []
    for row in data:
        speeds.append(sum(row["choices"][0]["new_tokens"]) / sum(row["choices"][0]["wall_time"]))
        accepted.extend(row["choices"][0]["accept_lengths"])
    return speeds, accepted


def test_two_turns_of_a_question_are_one_line(tmp_path: Path):
    later = run(turn=1, text="Well.", tokens=2, forwards=2, accepted_by_depth=(), seconds=1.0)
    (path,) = write_answers([later, run()], tmp_path / "new" / "folder")
    (row,) = rows(path)
    choice = row["choices"][0]
    assert choice["turns"] == ["So be it.", "Well."] and str(choice["turns"]) == "['So be it.', 'Well.']"
    assert (choice["new_tokens"], choice["wall_time"], choice["decoding_steps"]) == ([6, 2], [2.0, 1.0], [3, 2])
    assert choice["accept_lengths"] == [3, 2, 1, 1, 1] and choice["index"] == 0
    assert (row["question_id"], row["category"], row["model_id"]) == (81, "writing", path.stem)
    assert speed(path) == ([8 / 3.0], [3, 2, 1, 1, 1])


def test_its_tasks_are_told_apart_by_category(tmp_path: Path):
    runs = [run("1", category="translation", seconds=1.0), run("2", category="qa"), run("3", category="", task="rag")]
    (path,) = write_answers(runs, tmp_path)
    assert speed(path, "translation") == ([6.0], [3, 2, 1]) and speed(path, "qa")[0] == [3.0]
    assert speed(path, "rag")[0] == [3.0], "without a category the task is one"
    assert len(speed(path)[0]) == 3


def test_each_arm_model_and_temperature_has_a_file(tmp_path: Path):
    runs = [run(), run(arm="none"), run(temperature=1.0), run(model="org/name"), run("82")]
    paths = write_answers(runs, tmp_path)
    assert [path.name for path in paths] == [
        "sample-eagle3-temperature-0.0.jsonl",
        "sample-none-temperature-0.0.jsonl",
        "sample-eagle3-temperature-1.0.jsonl",
        "org-name-eagle3-temperature-0.0.jsonl",
    ]
    assert [len(rows(path)) for path in paths] == [2, 1, 1, 1] and sorted(tmp_path.iterdir()) == sorted(paths)


def test_equal_texts_are_equal_for_it_whatever_is_in_them(tmp_path: Path):
    odd = "a\u2028b\nc 'd' \"e\" \u00e9\U0001f600"
    texts = [run(arm=arm, text=odd) for arm in ("none", "eagle3")] + [run(arm="medusa", text=odd + " ")]
    first, second, third = (str(rows(path)[0]["choices"][0]["turns"]) for path in write_answers(texts, tmp_path))
    assert first == second == str([odd]) and third != first


def test_questions_of_the_same_number_in_two_tasks_stay_apart(tmp_path: Path):
    (path,) = write_answers([run("1", task="a"), run("1", task="b", text="Other.")], tmp_path)
    assert [row["choices"][0]["turns"] for row in rows(path)] == [["So be it."], ["Other."]]


def test_batches_errors_and_repeats_are_left_out(tmp_path: Path):
    said = run().outputs
    runs = [
        run(),
        run("82", repeat=1),
        run("83", error="broken", outputs=(), tokens=0),
        Run("eagle3", "mt_bench", ("84", "85"), batch=2, outputs=said * 2, tokens=12, model="sample"),
        Run("eagle3", "mt_bench", ("86",), batch=2, outputs=said, tokens=6, model="sample"),
    ]
    (path,) = write_answers(runs, tmp_path)
    assert [row["question_id"] for row in rows(path)] == [81]
    assert write_answers([], tmp_path / "none") == [] and write_answers(runs[2:], tmp_path / "none") == []


def test_a_question_whose_first_turn_failed_is_left_out(tmp_path: Path):
    failed = run("82", error="broken", outputs=(), tokens=0)
    (path,) = write_answers([run(), failed, run("82", turn=1), run("81", turn=2)], tmp_path)
    assert [(row["question_id"], len(row["choices"][0]["turns"])) for row in rows(path)] == [(81, 1)]


def test_names_that_are_no_numbers_stay_names(tmp_path: Path):
    (path,) = write_answers([run("HumanEval/3"), run("07")], tmp_path)
    assert [row["question_id"] for row in rows(path)] == ["HumanEval/3", 7]


def test_runs_without_texts_are_refused_and_an_empty_answer_is_none(tmp_path: Path):
    bare = run(outputs=(OutputRecord("81", 3, 6, "abc"),))
    with pytest.raises(OptionError, match="The runs have no outputs"):
        write_answers([run("80"), bare], tmp_path / "answers")
    assert not (tmp_path / "answers").exists()
    special = run(outputs=(OutputRecord("81", 3, 2, "abc", (7, 0)),), tokens=2)  # nothing but special tokens
    (path,) = write_answers([special], tmp_path / "answers")
    assert rows(path)[0]["choices"][0]["turns"] == [""]


def test_a_folder_that_cannot_be_is_a_sentence(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"^Cannot write answers to .*file: Not a directory\.$"):
        write_answers([run()], tmp_path / "file")
