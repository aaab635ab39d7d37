"""The commands that run no model of the user's, and the demo."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cli_cases import PROMPT, Run

from foredraft.cli import COMMANDS, build
from foredraft.cli.demo import Contest
from foredraft.core.theory import best_length
from foredraft.drafters import METHODS


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_what_the_command_says(run: Run, name: str):
    assert build(name).help.splitlines()[0] == COMMANDS[name]
    ended = run(name, "--help")
    assert ended.status == 0 and COMMANDS[name].split(":")[0] in ended.out
    assert COMMANDS[name].split(":")[0] in run("--help").out


def test_methods_as_json(run: Run):
    found = json.loads(run("methods", "--json").out)
    assert [each["name"] for each in found] == list(METHODS)
    draft = next(each for each in found if each["name"] == "draft_model")
    assert {"law": "chain", "default_verifier": "block"} in draft["laws"]
    assert draft["lossless"] is True and draft["options"]["num_assistant_tokens"] == 8
    assert set(draft) == {"name", "what", "laws", "lossless", "needs", "paper", "options"}


@pytest.mark.parametrize("width", [60, 100, 160])
def test_methods_fit_the_screen(run: Run, monkeypatch: pytest.MonkeyPatch, width: int):
    monkeypatch.setenv("COLUMNS", str(width))
    ended = run("methods")
    assert ended.status == 0 and "\x1b" not in ended.out
    assert max(map(len, ended.out.splitlines())) <= width
    for name, method in METHODS.items():
        assert name in ended.out
        assert all(law.value in ended.out for law in method.laws)


def test_theory_marks_the_best_length(run: Run):
    ended = run("theory", "--alpha", ".8", "--cost", ".05")
    assert ended.status == 0
    marked = [line for line in ended.out.splitlines() if "<- best" in line]
    assert [line.split() for line in marked] == [["8", "4.33", "3.09x", "2.17x", "<-", "best"]]
    assert "Best: 8 drafted tokens a step, 3.09x as fast" in ended.out


def test_theory_as_json(run: Run):
    found = json.loads(run("theory", "--alpha", ".7", "--cost", ".1", "--length", "2", "--json").out)
    best = best_length(0.7, 0.1)
    assert found["best"] == best._asdict() and found["pays"] is True
    assert [row["length"] for row in found["rows"]] == [2, best.length]
    assert found["rows"][0]["expected_tokens"] == pytest.approx(1 + 0.7 + 0.49)


def test_theory_says_when_nothing_pays_and_when_more_would_pay(run: Run):
    ended = run("theory", "--alpha", ".3", "--cost", ".4")
    assert "Nothing pays" in ended.out and "plain decoding" in ended.out
    assert json.loads(run("theory", "--alpha", ".3", "--cost", ".4", "--json").out)["pays"] is False
    assert "more would give more" in run("theory", "--alpha", ".9", "--cost", "0").out


def test_the_demo_with_the_bundled_models(run: Run):
    ended = run("demo", "--max-new-tokens", "8", "--runs", "1")
    assert ended.status == 0, ended.err
    assert "same tokens: yes" in ended.out and "\x1b" not in ended.out
    for word in ("plain", "eagle3", "prompt_lookup", "tokens/s", "acceptance length", "speed-up"):
        assert word in ended.out


def test_the_demo_with_a_model_of_ones_own(run: Run, model: Path):
    ended = run("demo", "-m", model, "-d", f"draft_model:{model}", PROMPT, "--max-new-tokens", "8", "--runs", "2")
    assert ended.status == 0, ended.err
    assert "median of 2 runs" in " ".join(ended.out.split()) and "prompt_lookup" not in ended.out
    plain, fast = (ended.out.split(f"{name}:\n")[1].split("\n\n")[0] for name in ("plain", "draft_model"))
    assert plain == fast


def test_the_demo_fails_if_tokens_differ(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch):
    held = Contest.held
    monkeypatch.setattr(Contest, "held", lambda *arguments: replace(held(*arguments), same=False))
    ended = run("demo", "-m", model, "-d", "prompt_lookup", PROMPT, "--max-new-tokens", "4", "--runs", "1")
    assert ended.status == 1 and "same tokens: NO" in ended.out
    assert run("demo", "--runs", "0").status == 2
