"""``foredraft answers``."""

import json
from pathlib import Path

import pytest
from cli_cases import Run

import foredraft
from foredraft.cli.choices import ModelChoice
from foredraft.cli.exit_status import Terminated
from foredraft.train.data.sources import read_sources
from native import needs_compiler


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


@needs_compiler
def test_answers_of_quantised_weights(run: Run, tmp_path: Path):
    (tmp_path / "texts.jsonl").write_text('{"text": "def add(a, b):"}\n{"text": "Once upon a time"}\n')
    given = ("--data", tmp_path / "texts.jsonl", "--max-new-tokens", 8, "--temperature", 0, "--weights", "int4")
    assert run("answers", tmp_path / "answers", *given).status == 0
    with foredraft.load("sample", "none", weights="int4") as quantised:
        for sample in read_sources([str(tmp_path / "answers")]):
            ids = sample.ids or []
            said = quantised.generate(ids[: sample.prompt_length], max_new_tokens=8).tokens
            assert said == ids[sample.prompt_length :]


def test_an_interruption_says_what_is_kept(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "texts.jsonl").write_text('{"text": "def add(a, b):"}\n{"text": "Once upon a time"}\n')
    given = ("--data", tmp_path / "texts.jsonl", "--max-new-tokens", 8, "--temperature", 0)
    with monkeypatch.context() as patch:
        patch.setattr(
            "foredraft.train.data.answers._AnswerProgress.update", lambda *given: (_ for _ in ()).throw(Terminated)
        )
        ended = run("answers", tmp_path / "answers", *given)
    said = "foredraft: Interrupted after 0 of 2 answers; the same command continues from there."
    assert (ended.status, ended.err.splitlines()[-1]) == (143, said)
    assert (tmp_path / "answers" / "T0.jsonl.unfinished").exists()
    assert run("answers", tmp_path / "answers", *given).status == 0
    assert not list((tmp_path / "answers").glob("*.unfinished"))


@pytest.mark.parametrize("file", ["T0.jsonl", "T1.jsonl.unfinished", ".prompts.jsonl"])
def test_an_interruption_while_loading_tells_of_earlier_answers(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
):
    def interrupted(*args: object, **given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ModelChoice, "load", interrupted)
    out = tmp_path / "out"
    ended = run("answers", str(out), "--own-prompts", "2")
    assert ended.err.endswith("foredraft: Interrupted before an answer was begun; the same command starts over.\n")
    out.mkdir()
    (out / file).write_text("{}\n")
    ended = run("answers", str(out), "--own-prompts", "2")
    assert ended.err.endswith(f"foredraft: Interrupted; the same command continues from what {out} holds.\n")


def test_refusals(run: Run, tmp_path: Path):
    assert "There is nothing to answer: give --own-prompts" in run("answers", tmp_path / "answers").refusal
    assert run("answers", tmp_path / "answers", "--own-prompts", 2, "--temperature", -1).refusal
    assert "not found" in run("answers", tmp_path / "answers", "--data", tmp_path / "none.jsonl").sentence
    assert not (tmp_path / "answers").exists()
