"""Theory curves over alpha (expected tokens, speed-up, best length) with measured points.

After figures 2 to 4 of Leviathan, Kalman and Matias (arXiv:2211.17192). Filled marks are measured; hollow marks of the
same colour are the theory's prediction from the run's alpha and c; a line connects the two.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from foredraft.bench.report.plots import FAINT, INK, canvas, color, styled
from foredraft.bench.report.theory_points import Point, settings
from foredraft.core.theory import best_length, expected_tokens, speed_up

LENGTHS = (1, 2, 3, 5, 7, 10)
COSTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
ALPHAS = [step / 400 for step in range(401)]
_SMALL = 8
_SHAPES = "osD^vPX*"


class _Curve(NamedTuple):
    """Values over ``ALPHAS``."""

    name: str
    values: list[float]
    highlight: bool = False


class _Diagram(NamedTuple):
    """Curves within limits, and the measured and the predicted value of each point."""

    title: str
    curves: list[_Curve]
    marks: list[tuple[float, float]]
    low: float
    top: float


@styled()
def theory_figure(
    alpha: float | None = None,
    cost: float | None = None,
    points: Sequence[Point] = (),
    width: float = 11.0,
    height: float = 3.8,
) -> Any:
    """Three diagrams over alpha: expected tokens for k in ``LENGTHS``, the speed-up, and the best k for ``COSTS``.

    The speed-up is for the given cost with k in ``LENGTHS`` and the best k, or for ``COSTS`` at the best k. With alpha
    and cost, the theory's values there are marked. Points of the best k are at the measured k.

    Raises:
        OptionError: matplotlib is not installed, or alpha or cost out of range.
    """
    figure, axes = canvas(width, height, 3)
    stars: Sequence[float | None] = (None, None, None)
    if alpha is not None and cost is not None:
        best = best_length(alpha, cost)
        stars = (expected_tokens(alpha, best.length), best.speed_up, float(best.length))
    axes[1].set_yscale("log")
    axes[1].axhline(1.0, color=INK, linewidth=0.8, label="plain")
    diagrams = (_tokens(points), _speed(cost, points), _length(cost, points))
    for panel, diagram, star in zip(axes, diagrams, stars, strict=True):
        _draw(panel, diagram._replace(top=max(diagram.top, 1.1 * (star or 0.0))), points)
        if star is not None:
            panel.plot([alpha, alpha], [panel.get_ylim()[0], star], ":", color=INK, linewidth=0.9, label="alpha")
            panel.plot([alpha], [star], "*", color=INK, markersize=9, clip_on=False, zorder=4, label="best")
    _key(figure, axes[0], points)
    return figure


def _tokens(points: Sequence[Point]) -> _Diagram:
    curves = [_Curve(f"k = {k}", [expected_tokens(a, k) for a in ALPHAS]) for k in LENGTHS]
    curves.append(_Curve("k = ∞", [1.0 / (1.0 - a) if a < 1.0 else math.inf for a in ALPHAS], highlight=True))
    marks = [(point.tokens, point.predicted_tokens) for point in points]
    top = max(4.0, 1.4 * max(map(max, marks))) if marks else 11.5
    return _Diagram("Expected tokens per step", curves, marks, 1.0, top)


def _speed(cost: float | None, points: Sequence[Point]) -> _Diagram:
    if cost is None:
        title = "Speed-up at the best k"
        curves = [_Curve(f"c = {c:g}", [best_length(a, c).speed_up for a in ALPHAS]) for c in COSTS]
    else:
        title = f"Speed-up with c = {cost:g}"
        curves = [_Curve(f"k = {k}", [speed_up(a, k, cost) for a in ALPHAS]) for k in LENGTHS]
        curves.append(_Curve("best k", [best_length(a, cost).speed_up for a in ALPHAS], highlight=True))
    marks = [(point.speed_up, point.predicted_speed_up) for point in points]
    if marks:
        return _Diagram(
            title, curves, marks, min(0.8, 0.9 * min(map(min, marks))), max(3.0, 1.6 * max(map(max, marks)))
        )
    return _Diagram(title, curves, marks, 0.5, 1.1 * max(2.0, *(curve.values[-1] for curve in curves)))


def _length(cost: float | None, points: Sequence[Point]) -> _Diagram:
    costs = sorted({*COSTS} if cost is None else {*COSTS, cost})
    best = {c: [float(best_length(a, c).length) for a in ALPHAS] for c in costs}
    curves = [_Curve(f"c = {c:g}", values, highlight=c == cost) for c, values in best.items()]
    marks = [(point.length, float(point.best.length)) for point in points]
    return _Diagram("Best length k", curves, marks, 0.0, max([12.0, *(1.1 * max(pair) for pair in marks)]))


def _draw(axes: Any, diagram: _Diagram, points: Sequence[Point]) -> None:
    """Draw the curves up to the top, each with its name at its end, at the side or above, and the points.

    With points the curves are grey, because colours then distinguish arms.
    """
    title, curves, marks, low, top = diagram
    width, height = _size(axes)
    longest = max((len(curve.name) for curve in curves if curve.values[-1] > top), default=0)
    room = 1.0 - min(5.0 * longest / height, 0.5)  # the curves' share of the height, below their names
    axes.set(xlim=(0.0, 1.0), ylim=(low, top), title=title, xlabel="alpha, the acceptance rate")
    scale = axes.transScale + axes.transLimits  # of data, to shares of the width and height
    _set_ticks(axes, low, top)
    axes.set_ylim(low, scale.inverted().transform((0.0, 1.0 / room))[1])
    heads: list[tuple[float, str, str]] = []
    sides: list[tuple[float, str, str]] = []
    for number, curve in enumerate(curves):
        ink = INK if curve.highlight else FAINT if points else color(number)
        style = {"linestyle": "--" if curve.highlight else "-", "linewidth": 1.0 if points else 1.6}
        kept = [value if value <= top else math.nan for value in curve.values]
        axes.plot(ALPHAS, kept, color=ink, label=curve.name, **style)
        if curve.values[-1] > top:
            heads.append(
                (max(a for a, value in zip(ALPHAS, curve.values, strict=True) if value <= top), curve.name, ink)
            )
        else:
            sides.append((scale.transform((1.0, curve.values[-1]))[1], curve.name, ink))
    style = {"transform": axes.transAxes, "fontsize": _SMALL}
    for x, name, ink in _spread(heads, 1.25 * _SMALL / width, 1.0):
        axes.text(x, room + 2.0 / height, name, rotation=90, ha="center", va="bottom", color=ink, **style)
    for y, name, ink in _spread(sides, 1.25 * _SMALL / height, room):
        axes.text(1.015, y, name, va="center", color=ink, **style)
    _mark(axes, points, marks)


def _set_ticks(axes: Any, low: float, top: float) -> None:
    log = axes.get_yscale() == "log"
    between = (0.7, 1.5) if top / max(low, 0.01) < 12 else ()
    places = [0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, *between] if log else axes.get_yticks()
    ticks = sorted(tick for tick in places if low <= tick <= top and (log or float(tick).is_integer()))
    axes.set_yticks(ticks, [f"{tick:g}x" if log else f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _size(axes: Any) -> tuple[float, float]:
    """Approximate width and height in points (the layout is not final yet)."""
    box, figure = axes.get_position(), axes.figure
    return 72 * box.width * figure.get_figwidth(), 72 * box.height * figure.get_figheight()


def _spread(labels: Sequence[tuple[float, str, str]], gap: float, high: float) -> list[tuple[float, str, str]]:
    """Sorted labels, their positions moved apart to at least ``gap``, none above ``high``."""
    order = sorted(labels, key=lambda label: label[0])
    up, down = [place for place, *_ in order], [place for place, *_ in order]
    for i in range(1, len(order)):
        up[i] = max(up[i], up[i - 1] + gap)
        down[-1 - i] = min(down[-1 - i], down[-i] - gap)
    last = len(order) - 1
    moved = [min((a + b) / 2, high - gap * (last - i)) for i, (a, b) in enumerate(zip(up, down, strict=True))]
    return [(place, name, ink) for place, (_, name, ink) in zip(moved, order, strict=True)]


def _mark(axes: Any, points: Sequence[Point], marks: Sequence[tuple[float, float]]) -> None:
    """Draw points: one colour per arm, one shape per setting, measured values filled."""
    for point, (measured, theory), (ink, shape) in zip(points, marks, _looks(points), strict=True):
        thin = {"color": ink, "linewidth": 0.9}
        mark = {"color": ink, "marker": shape, "linestyle": "none", "clip_on": False, "zorder": 3}
        axes.plot([point.least_alpha, point.most_alpha], [measured] * 2, label="bounds", **thin)
        axes.plot([point.alpha] * 2, [measured, theory], label="gap", **thin)
        axes.plot([point.alpha], [theory], markerfacecolor="none", markersize=6, label="theory", **mark)
        axes.plot([point.alpha], [measured], markersize=4.5, label="measured", **mark)


def _looks(points: Sequence[Point]) -> list[tuple[str, str]]:
    """Colour and shape of each point."""
    arms, kinds = list(dict.fromkeys(point.arm for point in points)), list(dict.fromkeys(settings(points)))
    return [
        (color(arms.index(point.arm)), _SHAPES[kinds.index(kind) % len(_SHAPES)])
        for point, kind in zip(points, settings(points), strict=True)
    ]


def _key(figure: Any, axes: Any, points: Sequence[Point]) -> None:
    """Add a legend below the figure (enlarging it): arms by colour, settings by shape, measured or theory."""
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
    columns = max(1, min(len(entries), int(figure.get_figwidth() / (0.45 + 0.072 * max(map(len, entries))))))
    figure.set_figheight(figure.get_figheight() + 0.17 * math.ceil(len(entries) / columns))
    figure.legend(handles, list(entries), loc="outside lower center", ncols=columns, fontsize=_SMALL)
