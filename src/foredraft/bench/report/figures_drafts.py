"""Figures of drafts: acceptance by depth, by position in the tree, and by confidence."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from foredraft.bench.measure.records import Run, Watched
from foredraft.bench.measure.steps import by_depth
from foredraft.bench.measure.summary import Spread, Summary, grouped, spread, temperature_label
from foredraft.bench.report import plots
from foredraft.bench.report.plots import Panel, Points, color
from foredraft.bench.report.tables import label

FEW = 10
"""Fewest steps for a share to be drawn."""
JUDGED, PROMPTS = 3, 3
"""Fewest judged nodes per prompt, and fewest prompts, for a position to be drawn."""
_PLACES = 24


def depths(summary: Summary) -> Iterator[Panel]:
    """Share of the steps with a draft of each depth whose accepted path reached it; one small panel per method."""
    for where, runs in grouped(summary.file.runs, lambda run: (run.model, run.temperature)).items():
        every = {arm: _shares(own) for arm, own in grouped(runs, lambda run: run.arm).items()}
        lines = {arm: points for arm, points in every.items() if points}
        if lines:
            yield Panel(label(*where), _depths(lines), plots.left_out(every, {*lines, summary.baseline}))


def _shares(runs: list[Run]) -> list[tuple[float, float]]:
    found = enumerate(by_depth(runs), start=1)
    return [(float(depth), accepted / reached) for depth, (accepted, reached) in found if reached >= FEW]


def _depths(lines: Mapping[str, Points]) -> Any:
    figure, axes = plots.multiples(lines, "depth of the draft", "accepted")
    deepest = max(depth for points in lines.values() for depth, _ in points)
    top = math.ceil(5 * max(share for points in lines.values() for _, share in points)) / 5
    for panel in axes:
        panel.set(ylim=(0, top), xlim=(0.5, deepest + 0.5))
        panel.set_yticks([0, top / 2, top], ["0", f"{50 * top:g}%", f"{100 * top:g}%"])
        panel.locator_params(axis="x", integer=True, nbins=5)
    return figure


def positions(summary: Summary) -> Iterator[Panel]:
    """EAGLE-2's figure 5: the accepted share at each position in the tree, with its spread over prompts."""
    watched = [each for each in summary.file.watched if each.places]
    for (model, arm), own in grouped(watched, lambda each: (each.model, each.arm)).items():
        coldest = min(each.temperature for each in own)
        places = by_place(each for each in own if each.temperature == coldest)
        if places:
            yield Panel(label(model, coldest, arm), _positions(places))


def by_place(watched: Iterable[Watched]) -> dict[str, Spread]:
    """Accepted share given an accepted parent, over prompts, for the positions judged most, in level order."""
    judged = ((place, of, part) for each in watched for place, (of, part) in each.places.items() if of >= JUDGED)
    groups = grouped(judged, lambda each: each[0])
    enough = [place for place, found in groups.items() if len(found) >= PROMPTS]
    most = sorted(enough, key=lambda place: -sum(of for _, of, _ in groups[place]))[:_PLACES]
    order = sorted(most, key=lambda place: (place.count("-"), [int(rank) for rank in place.split("-")]))
    found = {place: spread([part / of for _, of, part in groups[place]]) for place in order}
    return {place: each for place, each in found.items() if each is not None}


def _positions(places: Mapping[str, Spread]) -> Any:
    order = list(places)[::-1]
    figure, axes = plots.lanes(0.75, 0.17, order, size=8)
    dots: dict[str, Any] = {}
    for row, place in reversed([*enumerate(order)]):
        middle, low, high, _ = places[place]
        depth = place.count("-") + 1
        axes.plot([low, high], [row, row], color=color(depth - 1), linewidth=4.5, alpha=0.4, solid_capstyle="butt")
        dots[f"depth {depth}"] = axes.plot([middle], [row], "o", color=color(depth - 1), markersize=4)[0]
    axes.grid(axis="y", visible=True)
    axes.set(xlim=(-0.02, 1.02), xlabel="accepted, given its parent")
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    plots.legend(figure, dots.values(), dots, columns=5)
    return figure


def calibration(summary: Summary) -> Iterator[Panel]:
    """EAGLE-2's figure 6: accepted share by the draft's confidence; one small panel per method."""
    watched = [each for each in summary.file.watched if each.confidence]
    for model, own in grouped(watched, lambda each: each.model).items():
        arms = grouped(own, lambda each: each.arm)
        every = [each.arm for each in summary.file.watched if each.model == model]
        yield Panel(model, _calibration(arms), plots.left_out(every, arms))


def by_confidence(watched: Iterable[Watched], bins: int = 10) -> list[tuple[float, float, int]]:
    """Mean confidence, accepted share and number of nodes, for each non-empty bin."""
    table = [[0.0, 0.0, 0.0] for _ in range(bins)]
    for each in watched:
        for hundredth, (of, part) in each.confidence.items():
            entry = table[min(int(hundredth), 99) * bins // 100]
            entry[0] += of * min((int(hundredth) + 0.5) / 100, 1.0)
            entry[1] += part
            entry[2] += of
    return [(total / of, part / of, int(of)) for total, part, of in table if of]


def _calibration(arms: Mapping[str, list[Watched]]) -> Any:
    height = 1.95 if len(arms) > 1 else 3.2
    figure, axes = plots.grid(len(arms), height, "confidence given the parent", "accepted")
    temperatures = sorted({each.temperature for own in arms.values() for each in own})
    drawn: dict[float, Any] = {}
    for panel, (arm, own) in zip(axes, arms.items(), strict=True):
        panel.plot([0, 1], [0, 1], **plots.DASHED)
        for temperature, watched in grouped(own, lambda each: each.temperature).items():
            ink = color(temperatures.index(temperature))
            xs, ys, counts = zip(*by_confidence(watched), strict=True)
            sizes = [4 + 26 * count / max(counts) for count in counts]
            panel.plot(xs, ys, color=ink, linewidth=1.2)
            drawn[temperature] = panel.scatter(xs, ys, s=sizes, color=ink, linewidths=0, clip_on=False)
        panel.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
        panel.set_xticks([0, 0.5, 1], ["0", ".5", "1"])
        panel.set_yticks([0, 0.5, 1], ["0", "50%", "100%"])
        panel.grid(axis="x", color=plots.FAINT, visible=True)
        panel.set_title(plots.wrapped(arm), fontsize=8.5)
    if len(temperatures) > 1:
        plots.legend(figure, [drawn[each] for each in temperatures], [temperature_label(each) for each in temperatures])
    return figure
