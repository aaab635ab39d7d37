"""``foredraft answers``."""

import json
from pathlib import Path

from cli_cases import Run

from foredraft.train.data.sources import read_sources


def test_answers_become_training_data(run: Run, tmp_path: Path):
    questions, benchmark = tmp_path / "questions.jsonl", tmp_path / "benchmark.txt"
    chats = [{"messages": [{"role": "user", "content": text}]} for text in ("Why?", "How?", "Where?")]
    questions.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    benchmark.write_text("How?\n---\nWho?\n")
    given = ("--data", questions, "--exclude", benchmark, "--own-prompts", 2, "--max-new-tokens", 5, "--temperature", 0)
    ended = run("answers", tmp_path / "answers", *given)
    assert ended.status == 0 and "1 overlap with benchmarks" in ended.err and "T0.jsonl" in ended.err
    samples = list(read_sources([str(tmp_path / "answers")]))
    assert len(samples) >= 2 and all(len(sample.ids or []) <= sample.prompt_length + 5 for sample in samples)
    before = (tmp_path / "answers" / "T0.jsonl").read_bytes()
    assert run("answers", tmp_path / "answers", *given).status == 0
    assert (tmp_path / "answers" / "T0.jsonl").read_bytes() == before


def test_refusals(run: Run, tmp_path: Path):
    assert "There is nothing to answer: give --own-prompts" in run("answers", tmp_path / "answers").refusal
    assert run("answers", tmp_path / "answers", "--own-prompts", 2, "--temperature", -1).refusal
    assert "not found" in run("answers", tmp_path / "answers", "--data", tmp_path / "none.jsonl").sentence
    assert not (tmp_path / "answers").exists()
