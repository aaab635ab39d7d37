"""The three figures of the theory, and what a run says in its letters."""

import builtins
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from bench_cases import write_lines

from foredraft.bench.measure.records import Run, RunFile
from foredraft.bench.measure.steps import predicted_tokens, rate
from foredraft.bench.report import theory_curves as curves
from foredraft.bench.report.plots import save
from foredraft.bench.report.theory_curves import ALPHAS, COSTS, LENGTHS
from foredraft.bench.report.theory_points import Point, settings, theory_points
from foredraft.cli import main
from foredraft.core.errors import DataError, OptionError
from foredraft.core.theory import best_length, expected_tokens, speed_up

PLAIN = {"seconds": 22.0, "prefill_seconds": 2.0, "verify_seconds": 19.0}
"""Of a hundred tokens: 0.2 seconds a forward."""


def plain(prompt: str = "1", **given: Any) -> Run:
    counts = {"tokens": 100, "decoded": 100, "forwards": 100}
    return Run(**{"arm": "none", "task": "qa", "prompts": (prompt,), **counts, **PLAIN, **given})


def drafting(steps: Sequence[tuple[int, int]], prompt: str = "1", arm: str = "eagle3", **given: Any) -> Run:
    """A run of (drafted, accepted) in each step: 0.02 seconds a drafted level, 0.25 a forward, 2 before them."""
    draft, verify = 0.02 * sum(length for length, _ in steps), 0.25 * len(steps)
    counts = {
        "tokens": len(steps) + sum(accepted for _, accepted in steps),
        "forwards": len(steps),
        "drafted_by_depth": at_least([length for length, _ in steps]),
        "accepted_by_depth": at_least([accepted for _, accepted in steps]),
        "draft_seconds": draft,
        "verify_seconds": verify,
        "seconds": 2.0 + draft + verify,
        "prefill_seconds": 2.0,
    }
    counts["decoded"] = counts["tokens"]
    return Run(**{"arm": arm, "task": "qa", "prompts": (prompt,), **counts, **given})


def at_least(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(sum(size > depth for size in sizes) for depth in range(max(sizes, default=0)))


def drawn(alpha: float, lengths: Sequence[int], count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Steps whose drafts have a length by chance, and whose tokens are accepted with that chance each."""
    dice = random.Random(seed)
    steps = []
    for _ in range(count):
        length = accepted = dice.choice(lengths)
        for depth in range(length):
            if dice.random() >= alpha:
                accepted = depth
                break
        steps.append((length, accepted))
    return steps


def judged(steps: Sequence[tuple[int, int]]) -> int:
    """Drafted tokens whose parent was accepted, counted step by step."""
    return sum(min(accepted + 1, length) for length, accepted in steps)


def rate_of(steps: Sequence[tuple[int, int]]) -> Any:
    return rate(at_least([length for length, _ in steps]), at_least([accepted for _, accepted in steps]))


def test_the_rate_of_drafts_of_one_length_is_the_count_of_judged_tokens():
    steps = [(3, 0), (3, 3), (3, 1), (3, 3), (3, 2), (0, 0)]
    # judged: 1 + 3 + 2 + 3 + 3 = 12, of which 9 were accepted; a step without a draft judges nothing
    assert rate_of(steps) == (0.75, 0.75, 0.75)
    assert rate((4, 4), (0, 0)) == (0.0, 0.0, 0.0) and rate((4,), ()) == (0.0, 0.0, 0.0)
    assert rate((4, 4), (4, 4)) == (1.0, 1.0, 1.0)
    with pytest.raises(DataError, match="Nothing was drafted"):
        rate((), ())


def test_the_rate_of_drafts_of_two_lengths_by_hand():
    # ten drafts of one token or more, four of two: of 6 accepted parents 6 * 4 / 10 = 2.4 had a child to judge;
    # in truth 3 at least if 3 were accepted, and 4 at most, since there are no more
    assert rate((10, 4), (6, 3)) == (9 / 13, 9 / 14, 9 / 13)
    assert rate((10, 4), (6, 1)) == pytest.approx((7 / 12.4, 7 / 14, 7 / 11))


@pytest.mark.parametrize("lengths", [(1,), (5,), (0, 10), (2, 3, 9)])
@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_the_rate_that_steps_were_drawn_with_comes_back(alpha: float, lengths: tuple[int, ...]):
    assert rate_of(drawn(alpha, lengths, 20_000)).alpha == pytest.approx(alpha, abs=0.01)


def test_the_true_rate_lies_within_the_bounds_whatever_the_lengths_depend_on():
    dice = random.Random(0)
    for _ in range(200):
        lengths = [dice.randint(0, 5) for _ in range(dice.randint(0, 11))] + [dice.randint(1, 5)]
        steps = [(length, dice.randint(0, length)) for length in lengths]
        found = rate_of(steps)
        assert found.least - 1e-12 <= sum(accepted for _, accepted in steps) / judged(steps) <= found.most + 1e-12
        assert 0.0 <= found.least <= found.alpha + 1e-12 <= found.most + 2e-12 <= 1.0 + 3e-12


def test_a_prediction_is_equation_1_averaged_over_the_lengths():
    mixed = (expected_tokens(0.7, 2) + 2 * expected_tokens(0.7, 4) + expected_tokens(0.7, 0)) / 4
    assert predicted_tokens(0.7, at_least([2, 4, 4, 0]), 4) == pytest.approx(mixed)
    assert predicted_tokens(1.0, (1, 1, 1), 1) == 4.0


def test_a_point_by_hand():
    first = drafting([(3, 0), (3, 3), (3, 1), (3, 3), (3, 2), (0, 0)])  # 15 tokens in 1.8 seconds
    twice = [drafting([(3, 3)] * 4, "2"), drafting([(3, 0)] * 4, "3", task="code")]
    bases = [plain("1"), plain("2", seconds=42.0), plain("3", task="code")]  # 5, 2.5 and 5 tokens a second
    (point,) = theory_points(RunFile(runs=[*bases, first, *twice, drafting([(3, 0)], "4")]))
    assert (point.arm, point.temperature, point.batch, point.pairs) == ("eagle3", 0.0, 1, 3)
    assert point.alpha == pytest.approx((9 + 12) / (12 + 12 + 4))  # the run without a pair is not counted
    assert point.length == pytest.approx((15 + 12 + 12) / 14)
    assert point.cost == pytest.approx(0.02 / (80.0 / 300)) and point.verify == pytest.approx(0.25 / (80.0 / 300))
    assert point.tokens == pytest.approx((15 + 16 + 4) / 14)
    assert point.predicted_tokens == pytest.approx((13 * expected_tokens(point.alpha, 3) + 1) / 14)
    speeds = sorted([15 / 1.8 / 5, 16 / 1.24 / 2.5, 4 / 1.24 / 5])
    assert point.speed_up == pytest.approx(speeds[1])
    assert point.predicted_speed_up == pytest.approx(point.predicted_tokens / (1 + point.cost * point.length))
    assert point.best == best_length(point.alpha, point.cost)


def test_a_run_that_is_as_the_theory_wants_it_lies_on_the_theory():
    steps = drawn(0.7, [4], 20_000)
    spent = len(steps) * 0.2 * (1 + 4 * 0.1)
    run = drafting(steps, draft_seconds=len(steps) * 0.2 * 4 * 0.1, seconds=2.0 + spent)
    (point,) = theory_points(RunFile(runs=[plain(), run]))
    assert point.cost == pytest.approx(0.1) and point.length == 4
    assert point.tokens == pytest.approx(expected_tokens(0.7, 4), rel=0.01)
    assert point.speed_up == pytest.approx(speed_up(0.7, 4, 0.1), rel=0.01)
    assert point.predicted_speed_up == pytest.approx(point.speed_up, rel=0.01)


def test_tasks_are_pooled_and_temperatures_batches_and_models_are_not():
    runs = []
    for model, temperature, task in product("ab", (0.0, 1.0), ("qa", "code")):
        given: dict[str, Any] = {"model": model, "temperature": temperature, "task": task}
        runs += [plain(**given), drafting([(2, 1)], **given)]
    points = theory_points(RunFile(runs=runs))
    found = [(point.model, point.temperature, point.pairs) for point in points]
    assert found == [("a", 0.0, 2), ("a", 1.0, 2), ("b", 0.0, 2), ("b", 1.0, 2)]
    assert settings(points) == ["T=0, a", "T=1, a", "T=0, b", "T=1, b"] and settings(points[:1]) == [""]


@pytest.mark.parametrize(
    "runs, sentence",
    [
        ([plain()], "This file has no drafting arm"),
        ([plain(), drafting([(0, 0)])], "This file has no drafting arm"),
        ([plain(), replace(drafting([(3, 1)]), verify_seconds=0.0)], "This file has no drafting arm"),
        ([drafting([(3, 1)])], "This file has no plain decoding"),
        ([plain(error="out of memory"), drafting([(3, 1)])], "This file has no plain decoding"),
        ([plain(), drafting([(3, 1)], "2")], "No drafting run of eagle3 (temperature 0, batch 1) has a plain"),
    ],
)
def test_a_run_that_cannot_be_laid_over_says_why(runs: list[Run], sentence: str):
    with pytest.raises(DataError) as error:
        theory_points(RunFile(runs=runs))
    assert str(error.value).startswith(sentence)


def some_points() -> list[Point]:
    runs = [plain(), plain(temperature=1.0)]
    for temperature in (0.0, 1.0):
        for arm, alpha, lengths in (("eagle3", 0.8, (6,)), ("prompt_lookup", 0.3, (0, 10)), ("medusa", 0.5, (3, 4))):
            runs.append(drafting(drawn(alpha, lengths, 200), arm=arm, temperature=temperature))
    return theory_points(RunFile(runs=runs))


def values(axes: Any, name: str) -> list[float]:
    """What a line of that name was drawn with, read back."""
    (line,) = [line for line in axes.get_lines() if line.get_label() == name]
    assert list(line.get_xdata()) == ALPHAS
    return [float(value) for value in line.get_ydata()]


def same_where_drawn(found: Sequence[float], law: Callable[[float], float], top: float) -> None:
    """Equal to the law, and cut off where it is above the top."""
    for alpha, value in zip(ALPHAS, found, strict=True):
        true = law(alpha)
        assert value == pytest.approx(true) if true <= top else value != value
    assert sum(value == value for value in found) > 200


def test_the_curves_are_the_closed_forms():
    left, middle, right = curves.theory_figure(0.8, 0.05).axes
    for k in LENGTHS:
        same_where_drawn(values(left, f"k = {k}"), lambda a, k=k: sum(a**i for i in range(k + 1)), 11.5)
        same_where_drawn(values(middle, f"k = {k}"), lambda a, k=k: speed_up(a, k, 0.05), 99)
    same_where_drawn(values(left, "k = ∞"), lambda a: 1 / (1 - a) if a < 1 else 99, 11.5)
    same_where_drawn(values(middle, "best k"), lambda a: max(speed_up(a, k, 0.05) for k in range(65)), 99)
    for c in COSTS:
        same_where_drawn(values(right, f"c = {c:g}"), lambda a, c=c: best_length(a, c).length, 12)
    best = best_length(0.8, 0.05)
    for axes, value in ((left, expected_tokens(0.8, best.length)), (middle, best.speed_up), (right, best.length)):
        (star,) = [line for line in axes.get_lines() if line.get_label() == "best"]
        assert (*star.get_xdata(), *star.get_ydata()) == (0.8, pytest.approx(value))


def test_without_a_cost_the_speed_up_is_that_of_several():
    left, middle, _ = curves.theory_figure().axes
    for c in COSTS:
        same_where_drawn(values(middle, f"c = {c:g}"), lambda a, c=c: best_length(a, c).speed_up, 99)
    assert values(left, "k = 3")[200] == 1.875
    *_, right = curves.theory_figure(cost=0.3).axes
    same_where_drawn(values(right, "c = 0.3"), lambda a: best_length(a, 0.3).length, 12)


def test_points_stand_where_they_were_measured_and_predicted():
    points = some_points()
    figure = curves.theory_figure(points=points)
    wanted = [
        [(each.tokens, each.predicted_tokens) for each in points],
        [(each.speed_up, each.predicted_speed_up) for each in points],
        [(each.length, each.best.length) for each in points],
    ]
    for axes, pairs in zip(figure.axes, wanted, strict=True):
        for index, name in enumerate(("measured", "theory")):
            marks = [line for line in axes.get_lines() if line.get_label() == name]
            drawn_at = [(mark.get_xdata()[0], mark.get_ydata()[0]) for mark in marks]
            assert drawn_at == [(point.alpha, pair[index]) for point, pair in zip(points, pairs, strict=True)]
            assert all(mark.get_ydata()[0] <= axes.get_ylim()[1] for mark in marks)
    (key,) = figure.legends
    names = ["eagle3", "prompt_lookup", "medusa", "T=0", "T=1", "measured", "in theory"]
    assert [text.get_text() for text in key.get_texts()] == names


def file_of(folder: Path, runs: Sequence[Run]) -> Path:
    return write_lines(folder / "run.jsonl", [run.line() for run in runs])


def theory(*arguments: str | Path) -> int:
    return main(["theory", *map(str, arguments)])


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_the_command_draws(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "sub" / f"theory{suffix}"
    assert theory("--alpha", ".8", "--cost", ".05", "--plot", path) == 0
    assert path.stat().st_size > 5000 and "<- best" in (said := capsys.readouterr().out) and path.name in said
    if suffix == ".svg":
        assert "Expected tokens per step" in path.read_text("utf-8") and "Best length k" in path.read_text("utf-8")


def test_the_command_lays_a_run_over_the_theory(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = [plain(), drafting([(3, 0), (3, 3), (3, 1), (3, 3), (3, 2)]), drafting([(2, 1)] * 5, arm="[odd]$x_1$")]
    path = file_of(tmp_path, runs)
    assert theory("--run", path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["arm", "eagle3", "[odd]$x_1$"]
    assert lines[1].split()[1:6] == ["0.750", "3.0", "5", "0.100", "1.25"]
    assert lines[1].split()[6:8] == ["2.80", f"({expected_tokens(0.75, 3):.2f})"]
    assert theory("--run", path, "--json", "--plot", tmp_path / "a.svg") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"points", "plot"} and len(found["points"]) == 2
    assert found["points"][0]["alpha"] == 0.75 and found["points"][0]["best"]["length"] == 5
    drawing = (tmp_path / "a.svg").read_text("utf-8")
    assert "eagle3" in drawing and "prompt_lookup" not in drawing
    assert theory("--run", path, "--alpha", ".8", "--cost", ".05", "--json") == 0
    assert {"points", "alpha", "best", "rows"} <= set(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ([], "Missing option '--alpha'. (See foredraft theory --help.)"),
        (["--alpha", ".8"], "Missing option '--cost'. (See foredraft theory --help.)"),
        (["--cost", ".8", "--plot", "a.svg"], "Missing option '--alpha'. (See foredraft theory"),
        (["--alpha", ".8", "--cost", ".1", "--plot", "a.gif"], "Unknown figure format a.gif: use one of .svg, .png"),
        (["--alpha", "1.8", "--cost", ".1", "--plot", "a.svg"], "alpha must be a probability"),
        (["--run", "RUN", "--alpha", ".8"], "Give both --alpha and --cost"),
        (["--run", "RUN"], "This file has no plain decoding"),
        (["--run", "no.jsonl"], "Cannot read the run file no.jsonl"),
    ],
)
def test_the_command_refuses_in_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = file_of(tmp_path, [drafting([(3, 1)])])
    assert theory(*(path if each == "RUN" else each for each in arguments)) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"foredraft: {sentence}") and said.err.count("\n") == 1 and not said.out


def test_without_matplotlib_only_plots_are_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    true_import = builtins.__import__

    def absent(name: str, *rest: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return true_import(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(OptionError, match="Plots need matplotlib"):
        save(curves.theory_figure(), tmp_path / "a.svg")
    assert theory("--alpha", ".8", "--cost", ".05", "--plot", tmp_path / "a.svg") == 2
    assert "pip install 'foredraft[bench]'" in capsys.readouterr().err
    assert theory("--run", file_of(tmp_path, [plain(), drafting([(3, 1)])])) == 0
