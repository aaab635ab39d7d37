"""The only module that imports matplotlib: parts and style of figures, as themed SVG for pages or as files for papers.

Everything drawn in ``INK`` becomes ``currentColor`` in a page's SVG, so figures work on light and dark pages; the
series' colours are readable on both.
"""

import contextlib
import html
import io
import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from foredraft.core.errors import OptionError
from foredraft.files.write import atomic_write

INK, FAINT = "#010203", "#7f8790"
"""The page's text colour, and a neutral colour for grids and background lines."""
COLORS = ("#2f7fd6", "#e0752d", "#2a9d6f", "#b065c9", "#c2a010", "#d4526e", "#1fa3b8", "#8c7a5b", "#6f7bd1", "#7d9b2f")
"""Colours of the series, used cyclically."""
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "foredraft",
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": FAINT,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "lines.markersize": 3.5,
    "lines.linewidth": 1.6,
}
SUFFIXES = (".svg", ".png", ".pdf")
WIDTH = 4.3
"""Inches of a report's figure; small enough that text stays legible on a phone."""
DASHED: Any = {"color": INK, "linewidth": 0.9, "linestyle": (0, (4, 2))}
"""Style of reference lines."""
Points = Sequence[tuple[float, float]]


class Panel(NamedTuple):
    """A figure, its label among those of its kind, empty if it is the only one, and the arms that it cannot show."""

    label: str
    figure: Any
    left_out: tuple[str, ...] = ()


def left_out(arms: Iterable[str], shown: Container[str | None]) -> tuple[str, ...]:
    """The arms that a figure does not show."""
    return tuple(arm for arm in dict.fromkeys(arms) if arm not in shown)


def color(number: int) -> str:
    return COLORS[number % len(COLORS)]


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Draw in our style, as a context or a decorator; ``canvas`` must be called inside one.

    Raises:
        OptionError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise OptionError("Plots need matplotlib: pip install 'foredraft[bench]'.") from None
    with matplotlib.rc_context(_STYLE):
        yield


def canvas(width: float, height: float, columns: int = 1, rows: int = 1, **options: Any) -> tuple[Any, Any]:
    """A matplotlib figure, size in inches, and its axes (an array for several columns or rows)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def grid(count: int, height: float, xlabel: str, ylabel: str) -> tuple[Any, list[Any]]:
    """A figure and the axes of ``count`` small panels with common scales; ``height``: inches per row."""
    columns = min(3, count)
    rows = -(-count // columns)
    figure, axes = canvas(WIDTH, height * rows + 0.45, columns, rows, sharex=True, sharey=True, squeeze=False)
    flat = list(axes.flat)
    for each in flat:
        each.tick_params(labelsize=8, length=2)
    for number in range(count, len(flat)):
        flat[number].set_visible(False)
        flat[number - columns].tick_params(labelbottom=True)
    figure.supxlabel(xlabel, fontsize=9)
    figure.supylabel(ylabel, fontsize=9)
    return figure, flat[:count]


def multiples(lines: Mapping[str, Points], xlabel: str, ylabel: str) -> tuple[Any, list[Any]]:
    """One panel per line, highlighted, with all other lines in grey."""
    figure, axes = grid(len(lines), 1.12, xlabel, ylabel)
    for own, panel in zip(lines, axes, strict=True):
        for name, points in lines.items():
            if name != own:
                panel.plot(*zip(*points, strict=True), color=FAINT, linewidth=0.7, alpha=0.45)
        panel.plot(*zip(*lines[own], strict=True), color=color(0), marker="o", clip_on=False, zorder=3)
        panel.set_title(wrapped(own), fontsize=8)
    return figure, axes


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


def lanes(height: float, least: float, names: Sequence[str], size: float = 8.5) -> tuple[Any, Any]:
    """A figure and axes with one named row per entry, bottom up; ``least``: inches per row, more if a name wraps."""
    pitch = max([least, *(0.205 + 0.145 * name.count("\n") for name in names if "\n" in name)])
    figure, axes = canvas(WIDTH, height + pitch * len(names))
    axes.set_yticks(range(len(names)), names, fontsize=size)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.set_ylim(-0.6, len(names) - 0.4)
    return figure, axes


def legend(figure: Any, handles: Iterable[Any], names: Iterable[str], columns: int = 3) -> None:
    """Add a legend above the axes."""
    spacing = {"handlelength": 1.2, "handletextpad": 0.5, "columnspacing": 1.2, "borderaxespad": 0.1}
    names = list(names)
    figure.legend(
        list(handles), names, loc="outside upper left", ncols=min(columns, len(names)), fontsize=8.5, **spacing
    )


def doublings(low: float, high: float) -> list[float]:
    """At most 8 ticks for a logarithmic axis, the first at ``low``."""
    count = math.floor(math.log2(high / low) + 1e-9) + 1
    return [low * 2**power for power in range(0, count, -(-count // 8))]


def log_ticks(axes: Any, places: Sequence[float], label: Callable[[float], str] = "{:g}".format) -> None:
    """Scale the x axis by powers of two, with ticks at these places alone."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [label(place) for place in places])
    axes.minorticks_off()


def short_number(value: float) -> str:
    """A tick's label: 1, 0.5, 16, 1.5k, 2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def save(figure: Any, path: Path, command: str | None = None) -> None:
    """Write a figure, black on white, in the format of the path's suffix.

    Args:
        command: that writes it, for the metadata; see ``files.outputs``.

    Raises:
        OptionError: the suffix is not one of ``SUFFIXES``.
        OSError: the file cannot be written.
    """
    if path.suffix not in SUFFIXES:
        raise OptionError(f"Unknown figure format {path.name}: use one of {', '.join(SUFFIXES)}.")
    about: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}[path.suffix]
    if command is not None:
        about |= {"Software" if path.suffix == ".png" else "Creator": f"foredraft {command}"}
    with styled():
        atomic_write(path, lambda file: figure.savefig(file, format=path.suffix[1:], metadata=about, dpi=200))


def themed_svg(figure: Any, name: str) -> str:
    """A figure as a transparent ``<svg>`` element in the page's text colour; ``name`` prefixes its ids, which must be
    unique on the page, and is its label for screen readers."""
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, metadata={"Date": None, "Creator": None}, format="svg", transparent=True)
    text = buffer.getvalue().decode("utf-8")
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    prefix = re.sub(r"\W+", "-", name)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{prefix}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(name)}" ', 1)
