"""What the figures of a report share: their width, names that fit, and small panels of which each shows one method."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from foredraft.bench.report.plots import FAINT, canvas, color

WIDTH = 4.3
"""Inches: on a phone the smallest text is still read."""
Points = Sequence[tuple[float, float]]


class Panel(NamedTuple):
    """A figure, and what sets it apart from others of its kind; nothing where it is the only one."""

    label: str
    figure: Any


def wrapped(name: str, width: int = 16, lines: int = 3) -> str:
    """A long name in a few lines, parted behind its signs where that can be; the rest is cut off."""
    found = [""]
    for part in re.findall(r"[^\s:,_/]*[\s:,_/]*", name):
        if len(found[-1]) + len(part.rstrip()) > width and found[-1]:
            found.append("")
        found[-1] += part
    if len(found) > lines:
        found = [*found[: lines - 1], found[lines - 1].rstrip(" :,_/") + "…"]
    return "\n".join(each if len(each) <= width + 2 else each[: width + 1] + "…" for each in found)


def pitch(names: Iterable[str], least: float) -> float:
    """Inches of a row whose label is one of these."""
    return max([least, *(0.06 + 0.145 * (1 + name.count("\n")) for name in names)])


def grid(count: int, height: float, columns: int = 3) -> tuple[Any, list[Any]]:
    """A figure and the axes of so many small panels with common scales; ``height`` is that of one row."""
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
    """A panel for each line, which stands out in it; all the others lie behind it."""
    figure, axes = grid(len(lines), height)
    for own, panel in zip(lines, axes, strict=True):
        for name, points in lines.items():
            if name != own:
                panel.plot(*zip(*points, strict=True), color=FAINT, linewidth=0.7, alpha=0.45)
        panel.plot(*zip(*lines[own], strict=True), color=color(0), marker="o", clip_on=False, zorder=3)
        panel.set_title(wrapped(own), fontsize=8)
    return figure, axes


def legend(figure: Any, handles: Sequence[Any], names: Sequence[str], columns: int = 3) -> None:
    """Above the axes, where it covers nothing."""
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
    """Numbers as short as they may be: 1, 0.5, 16, 1.5k, 2M."""
    return [_short(value) for value in values]


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
