"""Theory curves over alpha (expected tokens, speed-up, best length) with measured points.

After figures 2 to 4 of Leviathan, Kalman and Matias (arXiv:2211.17192). Filled marks are measured; hollow marks of the
same colour are the theory's prediction from the run's alpha and c; a line connects the two.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from foredraft.bench.report.plots import FAINT, INK, canvas, color
from foredraft.bench.report.theory_points import Point, settings
from foredraft.core.theory import best_length, expected_tokens, speed_up

LENGTHS = (1, 2, 3, 5, 7, 10)
COSTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
LONGEST = 64
"""Longest draft of the best-length curves."""
ALPHAS = [step / 400 for step in range(401)]
_SMALL, _TITLE = 8, 10
_SHAPES = "osD^vPX*"


def tokens_figure(points: Sequence[Point] = (), width: float = 4.4, height: float = 3.6) -> Any:
    """Expected tokens per step over alpha, for k in ``LENGTHS`` and k = infinity.

    Raises:
        OptionError: matplotlib is not installed.
    """
    figure, axes = canvas(width, height)
    _draw_tokens(axes, points)
    _key(figure, axes, points)
    return figure


def speed_figure(
    cost: float | None = None, points: Sequence[Point] = (), width: float = 4.4, height: float = 3.6
) -> Any:
    """Speed-up over alpha: for the given cost with k in ``LENGTHS`` and the best k, or for ``COSTS`` at the best k.

    Raises:
        OptionError: matplotlib is not installed, or negative cost.
    """
    figure, axes = canvas(width, height)
    _draw_speed(axes, cost, points)
    _key(figure, axes, points)
    return figure


def length_figure(
    cost: float | None = None, points: Sequence[Point] = (), width: float = 4.4, height: float = 3.6
) -> Any:
    """The best k over alpha, for ``COSTS`` and the given cost; points are at the measured k.

    Raises:
        OptionError: matplotlib is not installed, or negative cost.
    """
    figure, axes = canvas(width, height)
    _draw_length(axes, cost, points)
    _key(figure, axes, points)
    return figure


def theory_figure(
    alpha: float | None = None,
    cost: float | None = None,
    points: Sequence[Point] = (),
    width: float = 11.0,
    height: float = 3.8,
) -> Any:
    """All three figures side by side; with alpha and cost, the theory's values there are marked.

    Raises:
        OptionError: matplotlib is not installed, or alpha or cost out of range.
    """
    figure, (left, middle, right) = canvas(width, height, 3)
    tokens = speed = length = None
    if alpha is not None and cost is not None:
        best = best_length(alpha, cost, LONGEST)
        tokens, speed, length = expected_tokens(alpha, best.length), best.speed_up, float(best.length)
    _draw_tokens(left, points, tokens)
    _draw_speed(middle, cost, points, speed)
    _draw_length(right, cost, points, length)
    for axes, value in ((left, tokens), (middle, speed), (right, length)):
        if value is not None:
            axes.plot([alpha, alpha], [axes.get_ylim()[0], value], ":", color=INK, linewidth=0.9, label="alpha")
            axes.plot([alpha], [value], "*", color=INK, markersize=9, clip_on=False, zorder=4, label="best")
    _key(figure, left, points)
    return figure


def _draw_tokens(axes: Any, points: Sequence[Point], at: float | None = None) -> None:
    curves = [_Curve(f"k = {k}", [expected_tokens(a, k) for a in ALPHAS]) for k in LENGTHS]
    curves.append(_Curve("k = ∞", [1.0 / (1.0 - a) if a < 1.0 else math.inf for a in ALPHAS], highlight=True))
    seen = [value for point in points for value in (point.tokens, point.predicted_tokens)]
    top = max(4.0, 1.4 * max(seen)) if seen else 11.5
    top = max(top, 1.1 * (at or 0.0))
    _draw(axes, "Expected tokens per step", curves, (1.0, top), points)
    _mark(axes, points, [(point.tokens, point.predicted_tokens) for point in points])


def _draw_speed(axes: Any, cost: float | None, points: Sequence[Point], at: float | None = None) -> None:
    if cost is None:
        title = "Speed-up at the best k"
        curves = [_Curve(f"c = {c:g}", [best_length(a, c, LONGEST).speed_up for a in ALPHAS]) for c in COSTS]
    else:
        title = f"Speed-up with c = {cost:g}"
        curves = [_Curve(f"k = {k}", [speed_up(a, k, cost) for a in ALPHAS]) for k in LENGTHS]
        curves.append(_Curve("best k", [best_length(a, cost, LONGEST).speed_up for a in ALPHAS], highlight=True))
    seen = [value for point in points for value in (point.speed_up, point.predicted_speed_up)]
    top = max(3.0, 1.6 * max(seen)) if seen else 1.1 * max(2.0, *(curve.values[-1] for curve in curves))
    top = max(top, 1.1 * (at or 0.0))
    axes.set_yscale("log")
    axes.axhline(1.0, color=INK, linewidth=0.8, label="plain")
    _draw(axes, title, curves, (min(0.8, 0.9 * min(seen)) if seen else 0.5, top), points)
    _mark(axes, points, [(point.speed_up, point.predicted_speed_up) for point in points])


def _draw_length(axes: Any, cost: float | None, points: Sequence[Point], at: float | None = None) -> None:
    costs = sorted({*COSTS} if cost is None else {*COSTS, cost})
    best = {c: [float(best_length(a, c, LONGEST).length) for a in ALPHAS] for c in costs}
    curves = [_Curve(f"c = {c:g}", values, highlight=c == cost) for c, values in best.items()]
    top = max([12.0, 1.1 * (at or 0.0), *(1.1 * max(point.length, point.best.length) for point in points)])
    _draw(axes, "Best length k", curves, (0.0, top), points, drawstyle="steps-mid")
    _mark(axes, points, [(point.length, float(point.best.length)) for point in points])


class _Curve(NamedTuple):
    """Values over ``ALPHAS``."""

    name: str
    values: list[float]
    highlight: bool = False


def _draw(
    axes: Any,
    title: str,
    curves: Sequence[_Curve],
    limits: tuple[float, float],
    points: Sequence[Point],
    **options: Any,
) -> None:
    """Draw curves up to ``limits``, each with its name at its end, at the side or above.

    With points the curves are grey, because colours then distinguish arms.
    """
    low, top = limits
    log = axes.get_yscale() == "log"
    share = _scaled(low, top, log)
    heads: list[tuple[float, int]] = []
    sides: list[tuple[float, int]] = []
    inks = [INK if curve.highlight else FAINT if points else color(number) for number, curve in enumerate(curves)]
    for number, (name, values, highlight) in enumerate(curves):
        kept = [value if value <= top else math.nan for value in values]
        style = {"linestyle": "--" if highlight else "-", "linewidth": 1.0 if points else 1.6, "label": name, **options}
        axes.plot(ALPHAS, kept, color=inks[number], **style)
        if values[-1] <= top:
            sides.append((share(values[-1]), number))
        else:
            heads.append((max(a for a, value in zip(ALPHAS, values, strict=True) if value <= top), number))
    wide, high = _size(axes)
    room = 1.0 / (1.0 - min(5.0 * max((len(curves[number].name) for _, number in heads), default=0) / high, 0.5))
    ticks = [tick for tick in _ticks(axes, low, top, log) if low <= tick <= top]
    axes.set_yticks(ticks, [f"{tick:g}x" if log else f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(low, low * (top / low) ** room if log else low + (top - low) * room)
    axes.set_xlim(0.0, 1.0)
    axes.set_title(title, loc="left", fontsize=_TITLE, color=INK)
    axes.set_xlabel("alpha, the acceptance rate")
    for place, number in _spread(heads, 1.25 * _SMALL / wide, 1.0):
        style = {"rotation": 90, "ha": "center", "va": "bottom", "color": inks[number], "fontsize": _SMALL}
        axes.text(place, 1.0 / room + 2.0 / high, curves[number].name, transform=axes.transAxes, **style)
    for place, number in _spread(sides, 1.25 * _SMALL / high * room, 1.0):
        style = {"va": "center", "color": inks[number], "fontsize": _SMALL}
        axes.text(1.015, place / room, curves[number].name, transform=axes.transAxes, **style)


def _scaled(low: float, top: float, log: bool) -> Callable[[float], float]:
    """Maps a value to its relative height between the limits, 0 to 1."""
    return lambda value: math.log(value / low) / math.log(top / low) if log else (value - low) / (top - low)


def _ticks(axes: Any, low: float, top: float, log: bool) -> Sequence[float]:
    if log:
        between = [0.7, 1.5] if top / low < 12 else []
        return sorted([0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, *between])
    axes.set_ylim(low, top)
    return [float(tick) for tick in axes.get_yticks() if float(tick).is_integer()]


def _size(axes: Any) -> tuple[float, float]:
    """Approximate width and height in points (the layout is not final yet)."""
    box, figure = axes.get_position(), axes.figure
    return 72 * box.width * figure.get_figwidth(), 72 * box.height * figure.get_figheight()


def _spread(places: Sequence[tuple[float, int]], gap: float, high: float) -> list[tuple[float, int]]:
    """Sorted positions, moved apart to at least ``gap``, none above ``high``."""
    order = sorted(places)
    up, down = [place for place, _ in order], [place for place, _ in order]
    for i in range(1, len(order)):
        up[i] = max(up[i], up[i - 1] + gap)
        down[-1 - i] = min(down[-1 - i], down[-i] - gap)
    moved = [(a + b) / 2 for a, b in zip(up, down, strict=True)]
    last = len(order) - 1
    return [(min(place, high - gap * (last - i)), order[i][1]) for i, place in enumerate(moved)]


def _mark(axes: Any, points: Sequence[Point], values: Sequence[tuple[float, float]]) -> None:
    """Draw points: one colour per arm, one shape per setting, measured values filled."""
    looks = _looks(points)
    for point, (measured, theory), (ink, shape) in zip(points, values, looks, strict=True):
        thin = {"color": ink, "linewidth": 0.9}
        mark = {"color": ink, "marker": shape, "linestyle": "none", "clip_on": False, "zorder": 3}
        axes.plot([point.least_alpha, point.most_alpha], [measured] * 2, label="bounds", **thin)
        axes.plot([point.alpha] * 2, [measured, theory], label="gap", **thin)
        axes.plot([point.alpha], [theory], markerfacecolor="none", markersize=6, label="theory", **mark)
        axes.plot([point.alpha], [measured], markersize=4.5, label="measured", **mark)


def _looks(points: Sequence[Point]) -> list[tuple[str, str]]:
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
    longest, width, height = max(map(len, entries)), figure.get_figwidth(), figure.get_figheight()
    columns = max(1, min(len(entries), int(width / (0.45 + 0.072 * longest))))
    figure.set_figheight(height + 0.17 * math.ceil(len(entries) / columns))
    style = {"fontsize": _SMALL, "labelcolor": INK, "frameon": False}
    figure.legend(handles, list(entries), loc="outside lower center", ncols=columns, **style)
