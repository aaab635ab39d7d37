"""Shared parts of figures: width, wrapped names, and small multiples with one method per panel."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from foredraft.bench.report.plots import FAINT, canvas, color

WIDTH = 4.3
"""Inches; small enough that text stays legible on a phone."""
Points = Sequence[tuple[float, float]]


class Panel(NamedTuple):
    """A figure, and its label among those of its kind; empty if it is the only one."""

    label: str
    figure: Any


def wrapped(name: str, width: int = 16, lines: int = 3) -> str:
    """Wrap a long name after punctuation; the rest is cut off."""
    found = [""]
    for part in re.findall(r"[^\s:,_/]*[\s:,_/]*", name):
        if len(found[-1]) + len(part.rstrip()) > width and found[-1]:
            found.append("")
        found[-1] += part
    if len(found) > lines:
        found = [*found[: lines - 1], found[lines - 1].rstrip(" :,_/") + "…"]
    return "\n".join(each if len(each) <= width + 2 else each[: width + 1] + "…" for each in found)


def pitch(names: Iterable[str], least: float) -> float:
    """Row height in inches that fits these labels."""
    return max([least, *(0.06 + 0.145 * (1 + name.count("\n")) for name in names)])


def grid(count: int, height: float, columns: int = 3) -> tuple[Any, list[Any]]:
    """A figure and the axes of ``count`` small panels with common scales; ``height``: inches per row."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure, axes = canvas(WIDTH, height * rows + 0.45, columns, rows, sharex=True, sharey=True, squeeze=False)
    flat = list(axes.flat)
    for each in flat:
        each.tick_params(labelsize=8, length=2)
    for number in range(count, len(flat)):
        flat[number].set_visible(False)
        flat[number - columns].tick_params(labelbottom=True)
    return figure, flat[:count]


def multiples(lines: Mapping[str, Points], height: float = 1.12) -> tuple[Any, list[Any]]:
    """One panel per line, highlighted, with all other lines in grey."""
    figure, axes = grid(len(lines), height)
    for own, panel in zip(lines, axes, strict=True):
        for name, points in lines.items():
            if name != own:
                panel.plot(*zip(*points, strict=True), color=FAINT, linewidth=0.7, alpha=0.45)
        panel.plot(*zip(*lines[own], strict=True), color=color(0), marker="o", clip_on=False, zorder=3)
        panel.set_title(wrapped(own), fontsize=8)
    return figure, axes


def legend(figure: Any, handles: Sequence[Any], names: Sequence[str], columns: int = 3) -> None:
    """Add a legend above the axes."""
    figure.legend(
        handles,
        list(names),
        loc="outside upper left",
        ncols=min(columns, len(names)),
        fontsize=8.5,
        handlelength=1.2,
        handletextpad=0.5,
        columnspacing=1.2,
        borderaxespad=0.1,
    )


def ticks(values: Sequence[float]) -> list[str]:
    """Short number labels: 1, 0.5, 16, 1.5k, 2M."""
    return [_short(value) for value in values]


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
