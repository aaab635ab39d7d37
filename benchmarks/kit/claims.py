"""Claims of docs/results.md: a sentence from the runs, and the picture that shows it.

A claim's numbers are computed from the same runs as its picture. Each picture has its own dark background, so that it
looks the same on light and dark pages, and its values as a description.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.kit.pictures import described, grounded
from foredraft.bench.report import plots

WIDTH = 7.2


class Row(NamedTuple):
    """A line of a picture: its name, its value, other values around it, and whether it is highlighted."""

    name: str
    value: float
    spread: Sequence[float] = ()
    ours: bool = True


class Claim(NamedTuple):
    """What a picture shows, as a sentence; its values as text; where they are from; and how it is drawn."""

    sentence: str
    facts: str
    made: str
    draw: Callable[[], Any]


def named_rows(axes: Any, names: Sequence[str], most: float, line: float | None) -> None:
    """Dress axes of bars, the first on top: names on the left, no scale, a dashed line.

    Args:
        most: the largest value.
    """
    if line is not None:
        axes.axvline(line, color=plots.INK, linewidth=0.8, linestyle=(0, (3, 3)))
    axes.set_xlim(0, 1.12 * most)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="both", length=0)
    axes.xaxis.set_visible(False)
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)


def rows_figure(title: str, rows: Sequence[Row], label: Callable[[float], str], line: float | None = None) -> Any:
    """Bars from above, with a dot for each value of the spread."""
    figure, axes = plots.canvas(WIDTH, 0.7 + 0.27 * len(rows))
    most = max([row.value for row in rows] + [value for row in rows for value in row.spread])
    for place, row in enumerate(rows):
        axes.barh(place, row.value, height=0.62, color=plots.color(0) if row.ours else plots.FAINT)
        axes.plot(row.spread, [place] * len(row.spread), "o", color=plots.color(1), markersize=3, zorder=3)
        inside = bool(row.spread)  # beside the bar it would look like the value of a dot
        axes.annotate(
            label(row.value),
            (0 if inside else row.value, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color="white" if inside else plots.INK,
        )
    axes.set_title(title)
    named_rows(axes, [row.name for row in rows], most, line)
    return figure


def points_figure(title: str, points: Sequence[tuple[float, float]], across: str, up: str) -> Any:
    """Points and the diagonal on which both values are equal."""
    figure, axes = plots.canvas(4.6, 3.4)
    low, high = 0.9 * min(map(min, points)), 1.05 * max(map(max, points))
    axes.plot((low, high), (low, high), **plots.DASHED)
    axes.plot(*zip(*points, strict=True), "o", color=plots.color(0), markersize=4, alpha=0.8)
    axes.set_title(title)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    return figure


def facts_of(rows: Sequence[Row], form: str) -> str:
    return ", ".join(f"{row.name} {row.value:{form}}" for row in rows)


def description(claim: Claim) -> str:
    return f"{claim.sentence}\n{claim.facts}\n{claim.made}."


@plots.styled()
def drawn(claim: Claim) -> str:
    """A picture on its own ground, with its claim and values as description, as SVG."""
    figure = claim.draw()
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    text = plots.themed_svg(figure, claim.sentence)
    text = re.sub(
        r'(id="|#)[A-Za-z0-9-]{40,}-', r"\1", text
    )  # a sentence is a long prefix, and no other picture is near
    return described(grounded(text), "", description(claim)).rstrip() + "\n"


def block(name: str, claim: Claim) -> str:
    """Claim and picture, as Markdown."""
    alt = claim.sentence.split(":")[0].rstrip(".").replace("[", "(").replace("]", ")")
    return f"**{claim.sentence}**\n\n![{alt}](figures/results_{name}.svg)\n\n<sub>{claim.made}.</sub>"
