"""``foredraft skip``: what it prints and writes, and that layer_skip drafts by it."""

import json
import signal
from pathlib import Path

import pytest
from cli_cases import PROMPT, Run

import foredraft
from foredraft.drafters.layer_skip.config import read_skip_config
from foredraft.engine.generator import Generator

SMALL = ("--count", "2", "--max-new-tokens", "12", "--min-new-tokens", "12", "--longest", "3", "--trials", "8")


def test_one_json_object_and_a_file_that_layer_skip_reads(
    run: Run, model: Path, plain: foredraft.Generator, tmp_path: Path
):
    out = tmp_path / "skips.json"
    ended = run("skip", "-m", model, *SMALL, "--out", out, "--json")
    assert ended.status == 0 and ended.err == ""
    found = json.loads(ended.out)
    written = read_skip_config(out)
    assert written.layers == plain.engine.target.layers and "/" not in written.model
    assert (list(written.attention), list(written.mlp)) == (found["skip_attention"], found["skip_mlp"])
    assert written.attention or written.mlp
    assert 1 <= found["length"] <= 3 and 1 <= found["tokens_a_step"] <= 4 and 0 < found["cost"] < 1
    assert written.facts["tokens"] == 24 and written.facts["provenance"]["command"].startswith("foredraft")
    said = run("generate", "-m", model, "-d", f"layer_skip:{out}", "--max-new-tokens", "9", "--json", "--raw", PROMPT)
    assert said.status == 0
    assert json.loads(said.out)["text"] == plain.generate(PROMPT, max_new_tokens=9).text
    before = out.with_name("skips.json.trials.jsonl").read_text()
    again = run("skip", "-m", model, *SMALL, "--out", out, "--json")
    assert json.loads(again.out) == found
    assert out.with_name("skips.json.trials.jsonl").read_text() == before, "everything was known"
    assert "another search" in run("skip", "-m", model, *SMALL, "--temperature", "0.7", "--out", out).refusal


def test_what_people_see(run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text(f"{PROMPT}\n---\nclass A:\n")
    ended = run("skip", "-m", model, *SMALL, "--prompts", "p.txt", "--temperature", "0.8")
    assert ended.status == 0 and ended.err == "", ended.err
    said = " ".join(ended.out.split())
    assert "skipped in layers" in said and "measured on 24 tokens" in said
    assert f"foredraft generate --model {model} --drafter layer_skip:skips.json,num_assistant_tokens=" in said


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_before_the_search_says_that_nothing_is_kept(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int
):
    monkeypatch.setattr(Generator, "batch", lambda *_: signal.raise_signal(number))
    ended = run("skip", "-m", model, *SMALL, "--out", tmp_path / "skips.json")
    assert ended.status == status
    assert ended.sentence == "Interrupted before a set was tried; the same command starts over."
