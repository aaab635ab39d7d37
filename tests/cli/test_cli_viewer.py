"""The trace of a request, and the page that shows it."""

import json
from pathlib import Path

import pytest
from cli_cases import PROMPT, Run


def test_a_recorded_request_is_shown(run: Run, model: Path, tmp_path: Path):
    file = tmp_path / "run.jsonl"
    options = ("-m", model, "-d", f"draft_model:{model}", "--max-new-tokens", "12", "--record", file)
    plain = run("generate", *options[:-2], PROMPT).out
    assert run("generate", *options, PROMPT).out == plain
    (line,) = file.read_text().splitlines()
    record = json.loads(line)
    assert record["prompt"] == PROMPT and "".join(piece["text"] for piece in record["pieces"]) == plain[:-1]
    assert sum(len(step["emitted"]) for step in record["steps"]) >= 12 > len(record["steps"])
    assert json.loads(run("generate", *options, "--json", PROMPT).out)["text"] == plain[:-1]
    assert json.loads(file.read_text())["pieces"]
    ended = run("viewer", file)
    assert ended.out == f"{tmp_path / 'run.html'}\n"
    assert json.dumps(record["steps"][0]["tokens"]) in (tmp_path / "run.html").read_text()


@pytest.mark.parametrize("content", [None, "", "{}", "no json"])
def test_what_is_no_record_is_an_error(run: Run, tmp_path: Path, content: str | None):
    file = tmp_path / "run.jsonl"
    if content is not None:
        file.write_text(content)
    assert ("no record of a request" if content is not None else "Cannot read") in run("viewer", file).refusal


def test_a_place_that_cannot_be_written_is_an_error(run: Run, model: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    ended = run("generate", "-m", model, "--max-new-tokens", "2", "--record", tmp_path / "file" / "x", PROMPT)
    assert "Cannot write" in ended.sentence
