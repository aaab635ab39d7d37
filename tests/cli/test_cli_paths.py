"""Where commands write: folders that are missing are made."""

from pathlib import Path

import pytest
from cli_cases import PROMPT, Run

RECORD = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 2}}\n'
SHORT = ("--count", "1", "--max-new-tokens", "12", "--min-new-tokens", "12")
TUNE = ("-d", "draft_model:MODEL,assistant_confidence_threshold=0.0", *SHORT, "--verify", "1", "--batch-size", "1")
COMMANDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "generate": (("--max-new-tokens", "2", "--record", "new/a/run.jsonl", PROMPT), ("new/a/run.jsonl",)),
    "batch": (("requests.jsonl", "new/a/answers.jsonl"), ("new/a/answers.jsonl",)),
    "bench": (
        ("-d", "none", *SHORT, "--out", "new/a/bench.jsonl", "--spec-bench", "new/b/answers"),
        ("new/a/bench.jsonl", "new/b/answers/tiny-none-temperature-0.0.jsonl"),
    ),
    "tune": ((*TUNE, "--out", "new/a/tuned.json"), ("new/a/tuned.json",)),
    "skip": ((*SHORT, "--longest", "1", "--trials", "2", "--out", "new/a/skips.json"), ("new/a/skips.json",)),
}
"""Commands with a model: the arguments, and what they write."""


@pytest.mark.parametrize("command", COMMANDS)
def test_missing_folders_are_made(run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requests.jsonl").write_text(RECORD)
    arguments, written = COMMANDS[command]
    ended = run(command, "-m", model, *(word.replace("MODEL", str(model)) for word in arguments))
    assert ended.status == 0, ended.err
    assert all((tmp_path / name).stat().st_size for name in written)


def test_missing_folders_of_other_commands_are_made(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert run("generate", "-m", model, "--max-new-tokens", "2", "--record", "run.jsonl", PROMPT).status == 0
    assert run("viewer", "run.jsonl", "--html", "new/a/run.html").status == 0
    assert run("bench", "-m", model, "-d", "none", "-d", "prompt_lookup", *SHORT, "--out", "bench.jsonl").status == 0
    assert run("report", "bench.jsonl", "--html", "new/b/page.html", "--figures", "new/c/figures").status == 0
    assert run("theory", "--alpha", "0.5", "--cost", "0.1", "--plot", "new/d/theory.svg").status == 0
    assert run("export", "sample-eagle3", "--to", "sglang", "--out", "new/e/head").status == 0
    written = {path.relative_to(tmp_path).as_posix() for path in (tmp_path / "new").rglob("*.*")}
    assert {"new/a/run.html", "new/b/page.html", "new/d/theory.svg", "new/e/head/config.json"} < written
    assert any(name.startswith("new/c/figures/") for name in written)
