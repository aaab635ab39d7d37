"""The only module that imports matplotlib: figures in one style, as themed SVG for pages or as files for papers.

Everything drawn in ``INK`` becomes ``currentColor`` in a page's SVG, so figures work on light and dark pages; the
series' colours are readable on both.
"""

import functools
import html
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foredraft.core.errors import OptionError

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


def color(number: int) -> str:
    """The colour of a series."""
    return COLORS[number % len(COLORS)]


def styled(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Run a drawing function in our style, which texts and legends take when they are made.

    Raises:
        OptionError: matplotlib is not installed.
    """

    @functools.wraps(draw)
    def run(*given: Any, **options: Any) -> Any:
        with _style():
            return draw(*given, **options)

    return run


def canvas(width: float, height: float, columns: int = 1, rows: int = 1, **options: Any) -> tuple[Any, Any]:
    """A matplotlib figure, size in inches, and its axes (an array for several columns or rows).

    Raises:
        OptionError: matplotlib is not installed.
    """
    with _style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots(rows, columns, **options)


def save(figure: Any, path: Path) -> None:
    """Write a figure, black on white, in the format of the path's suffix.

    Raises:
        OptionError: the suffix is not one of ``SUFFIXES``.
    """
    if path.suffix not in SUFFIXES:
        raise OptionError(f"Unknown figure format {path.name}: use one of {', '.join(SUFFIXES)}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}[path.suffix]
    _print(figure, path, dated)


def themed_svg(figure: Any, name: str) -> str:
    """A figure as a transparent ``<svg>`` element in the page's text colour; ``name`` prefixes its ids, which must be
    unique on the page, and is its label for screen readers."""
    buffer = io.BytesIO()
    _print(figure, buffer, {"Date": None, "Creator": None}, format="svg", transparent=True)
    text = buffer.getvalue().decode("utf-8")
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    prefix = re.sub(r"\W+", "-", name)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{prefix}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(name)}" ', 1)


def _style() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise OptionError("Plots need matplotlib: pip install 'foredraft[bench]'.") from None
    return matplotlib.rc_context(_STYLE)


def _print(figure: Any, target: Any, metadata: dict[str, Any], **options: Any) -> None:
    with _style():
        figure.savefig(target, metadata=metadata, dpi=200, **options)
