"""Theory curves over alpha (expected tokens, speed-up, best length) with measured points.

After figures 2 to 4 of Leviathan, Kalman and Matias (arXiv:2211.17192). Filled marks are measured; hollow marks of the
same colour are the theory's prediction from the run's alpha and c; a line connects the two.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from foredraft.bench.report.plots import INK, canvas, color, styled
from foredraft.bench.report.theory_points import Point, settings
from foredraft.core.theory import best_length, expected_tokens, speed_up

LENGTHS = (1, 2, 3, 5, 7, 10)
COSTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
ALPHAS = [step / 400 for step in range(401)]
_SHAPES = "osD^vPX*"
_FACTORS = (0.1, 0.2, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0)
"""Ticks of the speed-up."""


class _Diagram(NamedTuple):
    """Curves over ``ALPHAS`` by name, within limits, and the measured and the predicted value of each point.

    ``highlight``: the name of the curve that is drawn dashed in the text's colour.
    """

    title: str
    curves: Mapping[str, list[float]]
    marks: list[tuple[float, float]]
    low: float
    top: float
    highlight: str = ""


@styled()
def theory_figure(alpha: float | None = None, cost: float | None = None, points: Sequence[Point] = ()) -> Any:
    """Three diagrams over alpha: expected tokens for k in ``LENGTHS``, the speed-up, and the best k for ``COSTS``.

    The speed-up is for the given cost with k in ``LENGTHS`` and the best k, or for ``COSTS`` at the best k. With alpha
    and cost, the theory's values there are marked. Points of the best k are at the measured k.

    Raises:
        OptionError: matplotlib is not installed, or alpha or cost out of range.
    """
    figure, axes = canvas(11.0, 3.8, 3)
    stars: Sequence[float | None] = (None, None, None)
    if alpha is not None and cost is not None:
        best = best_length(alpha, cost)
        stars = (expected_tokens(alpha, best.length), best.speed_up, float(best.length))
    diagrams = (_tokens(points), _speed(cost, points), _length(cost, points))
    for panel, diagram, star in zip(axes, diagrams, stars, strict=True):
        _draw(panel, diagram._replace(top=max(diagram.top, 1.1 * (star or 0.0))), points)
        if star is not None:
            panel.plot([alpha], [star], "*", color=INK, markersize=9, clip_on=False, zorder=4, label="best")
    axes[1].set_yscale("log")
    low, top = axes[1].get_ylim()
    ticks = [factor for factor in _FACTORS if low <= factor <= top]
    axes[1].set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes[1].minorticks_off()
    axes[1].axhline(1.0, color=INK, linewidth=0.8, label="plain")
    _key(figure, axes[0], points)
    return figure


def _tokens(points: Sequence[Point]) -> _Diagram:
    curves = {f"k = {k}": [expected_tokens(a, k) for a in ALPHAS] for k in LENGTHS}
    curves["k = ∞"] = [1.0 / (1.0 - a) if a < 1.0 else math.inf for a in ALPHAS]
    marks = [(point.tokens, point.predicted_tokens) for point in points]
    top = max(4.0, 1.4 * max(map(max, marks))) if marks else 11.5
    return _Diagram("Expected tokens per step", curves, marks, 1.0, top, "k = ∞")


def _speed(cost: float | None, points: Sequence[Point]) -> _Diagram:
    if cost is None:
        title = "Speed-up at the best k"
        curves = {f"c = {c:g}": [best_length(a, c).speed_up for a in ALPHAS] for c in COSTS}
    else:
        title = f"Speed-up with c = {cost:g}"
        curves = {f"k = {k}": [speed_up(a, k, cost) for a in ALPHAS] for k in LENGTHS}
        curves["best k"] = [best_length(a, cost).speed_up for a in ALPHAS]
    marks = [(point.speed_up, point.predicted_speed_up) for point in points]
    low, top = 0.5, 1.1 * max(2.0, *(values[-1] for values in curves.values()))
    if marks:
        low, top = min(0.8, 0.9 * min(map(min, marks))), max(3.0, 1.6 * max(map(max, marks)))
    return _Diagram(title, curves, marks, low, top, "best k")


def _length(cost: float | None, points: Sequence[Point]) -> _Diagram:
    costs = sorted({*COSTS} if cost is None else {*COSTS, cost})
    curves = {f"c = {c:g}": [float(best_length(a, c).length) for a in ALPHAS] for c in costs}
    marks = [(point.length, float(point.best.length)) for point in points]
    top = max([12.0, *(1.1 * max(pair) for pair in marks)])
    return _Diagram("Best length k", curves, marks, 0.0, top, "" if cost is None else f"c = {cost:g}")


def _draw(axes: Any, diagram: _Diagram, points: Sequence[Point]) -> None:
    """Draw the curves up to the top, faint if there are points, and the points."""
    for number, (name, values) in enumerate(diagram.curves.items()):
        highlight = name == diagram.highlight
        kept = [value if value <= diagram.top else math.nan for value in values]
        style = {"linestyle": "--" if highlight else "-", "alpha": 0.4 if points else 1.0}
        axes.plot(ALPHAS, kept, color=INK if highlight else color(number), label=name, **style)
    axes.legend(loc="upper left", fontsize=8)  # before the marks, which have a key of their own
    for point, (measured, theory), (ink, shape) in zip(points, diagram.marks, _looks(points), strict=True):
        thin = {"color": ink, "linewidth": 0.9}
        mark = {"color": ink, "marker": shape, "linestyle": "none", "clip_on": False, "zorder": 3}
        axes.plot([point.least_alpha, point.most_alpha], [measured] * 2, label="bounds", **thin)
        axes.plot([point.alpha] * 2, [measured, theory], label="gap", **thin)
        axes.plot([point.alpha], [theory], markerfacecolor="none", markersize=6, label="theory", **mark)
        axes.plot([point.alpha], [measured], markersize=4.5, label="measured", **mark)
    axes.set(xlim=(0.0, 1.0), ylim=(diagram.low, diagram.top), title=diagram.title, xlabel="alpha, the acceptance rate")


def _looks(points: Sequence[Point]) -> list[tuple[str, str]]:
    """Colour (by arm) and shape (by setting) of each point."""
    arms, kinds = list(dict.fromkeys(point.arm for point in points)), list(dict.fromkeys(settings(points)))
    return [
        (color(arms.index(point.arm)), _SHAPES[kinds.index(kind) % len(_SHAPES)])
        for point, kind in zip(points, settings(points), strict=True)
    ]


def _key(figure: Any, axes: Any, points: Sequence[Point]) -> None:
    """Add a legend below the figure: arms by colour, settings by shape, measured or theory."""
    if not points:
        return
    looks = list(zip(points, settings(points), _looks(points), strict=True))
    entries = {point.arm: (ink, ink, "o") for point, _, (ink, _) in looks}
    entries |= {kind: (INK, INK, shape) for _, kind, (_, shape) in looks if kind}
    entries |= {"measured": (INK, INK, "o"), "in theory": (INK, "none", "o")}
    handles = [
        axes.plot([], [], shape, color=ink, markerfacecolor=face, markersize=5)[0]
        for ink, face, shape in entries.values()
    ]
    figure.legend(handles, list(entries), loc="outside lower center", ncols=6, fontsize=8)
