"""Figures of training runs: loss, and acceptance length."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from foredraft.bench.measure.summary import Summary
from foredraft.bench.report.panels import WIDTH, Panel, Points, legend, ticks
from foredraft.bench.report.plots import INK, canvas, color, styled

_SMOOTH = 30
"""The running mean's window is the number of points divided by this."""


def losses(summary: Summary) -> Iterator[Panel]:
    """Loss by tokens trained on, per run: of training steps, and on held-out samples."""
    for run, lines in summary.file.training_runs.items():
        steps = [(float(line["tokens"]), float(line["loss"])) for line in lines if "loss" in line]
        held = validated(lines, "loss")
        resumed = [float(line["tokens"]) for line in lines if "resumed" in line]
        if steps:
            yield Panel(run, _losses(steps, held, resumed))


@styled
def _losses(steps: Points, held: Points, resumed: Sequence[float]) -> Any:
    figure, axes = canvas(WIDTH, 2.9)
    lines = axes.plot(*zip(*steps, strict=True), color=color(0), linewidth=0.8, alpha=0.4)
    lines += axes.plot(*zip(*smoothed(steps), strict=True), color=color(0))
    names = ["steps", "running mean"]
    if held:
        lines += axes.plot(*zip(*held, strict=True), color=color(1), marker="o")
        names.append("held-out samples")
    borders = [axes.axvline(tokens, color=INK, linewidth=0.8, linestyle=(0, (4, 2)), zorder=1) for tokens in resumed]
    if borders:
        lines.append(borders[0])
        names.append("resumed")
    values = [loss for _, loss in (*steps, *held)]
    if 0 < 10 * min(values) < max(values):
        axes.set_yscale("log")
    axes.locator_params(axis="x", nbins=7)
    places = [place for place in axes.get_xticks() if 0 <= place <= 1.02 * max(tokens for tokens, _ in steps)]
    axes.set_xticks(places, ticks(places))
    axes.set(xlim=(0, None), xlabel="tokens trained on", ylabel="loss")
    legend(figure, lines, names, columns=4)
    return figure


def validated(lines: Iterable[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """A validation metric by tokens trained on."""
    found = ((line["tokens"], line["validation"].get(name)) for line in lines if "validation" in line)
    return [(float(tokens), float(value)) for tokens, value in found if value is not None and tokens > 0]


def smoothed(points: Points) -> list[tuple[float, float]]:
    """The running mean over the last thirtieth of the points."""
    size = max(1, len(points) // _SMOOTH)
    sums = [0.0, *itertools.accumulate(value for _, value in points)]
    return [
        (place, (sums[end] - sums[max(0, end - size)]) / min(size, end))
        for end, (place, _) in enumerate(points, start=1)
    ]


def lengths(summary: Summary) -> Iterator[Panel]:
    """Acceptance length on held-out samples by tokens trained on, one line per run."""
    runs = {run: validated(lines, "acceptance_length") for run, lines in summary.file.training_runs.items()}
    runs = {run: points for run, points in runs.items() if points}
    if runs:
        yield Panel("", _lengths(runs))


@styled
def _lengths(runs: Mapping[str, Points]) -> Any:
    figure, axes = canvas(WIDTH, 2.8 + 0.16 * (-(-len(runs) // 3)))
    lines = []
    for number, points in enumerate(runs.values()):
        lines += axes.plot(*zip(*points, strict=True), color=color(number), marker="o")
    low, high = (pick(tokens for points in runs.values() for tokens, _ in points) for pick in (min, max))
    axes.set_xscale("log", base=2)
    marks = [low]
    while marks[-1] * 1.9 < high:
        marks.append(marks[-1] * 2)
    marks = marks[:: -(-len(marks) // 7)]
    axes.set_xticks(marks, ticks(marks))
    axes.minorticks_off()
    axes.set(xlabel="tokens trained on", ylabel="tokens per forward, held-out")
    legend(figure, lines, list(runs))
    return figure
