"""Figures of training runs: loss, and acceptance length."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from foredraft.bench.measure.summary import Summary
from foredraft.bench.report import plots
from foredraft.bench.report.plots import Panel, Points, color


def losses(summary: Summary) -> Iterator[Panel]:
    """Loss by tokens trained on, per run: of training steps, and on held-out samples."""
    for run, lines in summary.file.training_runs.items():
        steps = [(float(line["tokens"]), float(line["loss"])) for line in lines if "loss" in line]
        resumed = [float(line["tokens"]) for line in lines if "resumed" in line]
        if steps:
            yield Panel(run, _losses(steps, validated(lines, "loss"), resumed))


def _losses(steps: Points, held: Points, resumed: Iterable[float]) -> Any:
    figure, axes = plots.canvas(plots.WIDTH, 2.9)
    lines = {
        "steps": axes.plot(*zip(*steps, strict=True), color=color(0), linewidth=0.8, alpha=0.4)[0],
        "running mean": axes.plot(*zip(*smoothed(steps), strict=True), color=color(0))[0],
    }
    if held:
        lines["held-out samples"] = axes.plot(*zip(*held, strict=True), color=color(1), marker="o")[0]
    for tokens in resumed:
        lines["resumed"] = axes.axvline(tokens, zorder=1, **plots.DASHED)
    values = [loss for _, loss in (*steps, *held)]
    if 0 < 10 * min(values) < max(values):
        axes.set_yscale("log")
    axes.locator_params(axis="x", nbins=7)
    places = [place for place in axes.get_xticks() if 0 <= place <= 1.02 * max(tokens for tokens, _ in steps)]
    axes.set_xticks(places, [plots.short_number(place) for place in places])
    axes.set(xlim=(0, None), xlabel="tokens trained on", ylabel="loss")
    plots.legend(figure, lines.values(), lines, columns=4)
    return figure


def validated(lines: Iterable[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """A validation metric by tokens trained on."""
    found = ((line["tokens"], line["validation"].get(name)) for line in lines if "validation" in line)
    return [(float(tokens), float(value)) for tokens, value in found if value is not None and tokens > 0]


def smoothed(points: Points) -> list[tuple[float, float]]:
    """The running mean over the last thirtieth of the points."""
    size = max(1, len(points) // 30)
    sums = [0.0, *itertools.accumulate(value for _, value in points)]
    return [
        (place, (sums[end] - sums[max(0, end - size)]) / min(size, end))
        for end, (place, _) in enumerate(points, start=1)
    ]


def lengths(summary: Summary) -> Iterator[Panel]:
    """Acceptance length on held-out samples by tokens trained on, one line per run."""
    runs = {run: validated(lines, "acceptance_length") for run, lines in summary.file.training_runs.items()}
    runs = {run: points for run, points in runs.items() if points}
    if not runs:
        return
    figure, axes = plots.canvas(plots.WIDTH, 2.8 + 0.16 * (-(-len(runs) // 3)))
    lines = [
        axes.plot(*zip(*points, strict=True), color=color(number), marker="o")[0]
        for number, points in enumerate(runs.values())
    ]
    tokens = [tokens for points in runs.values() for tokens, _ in points]
    plots.log_ticks(axes, plots.doublings(min(tokens), max(tokens)), plots.short_number)
    axes.set(xlabel="tokens trained on", ylabel="tokens per forward, held-out")
    plots.legend(figure, lines, runs)
    yield Panel("", figure, plots.left_out(summary.file.training_runs, runs))
