"""``foredraft theory``."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.markup import escape
from rich.table import Table

from foredraft.cli.console import output, starting
from foredraft.core.errors import OptionError

if TYPE_CHECKING:
    from foredraft.bench.report.theory_points import Point
    from foredraft.core.theory import BestLength

_LONGEST = 64
_SHOWN = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)


class TheoryRow(NamedTuple):
    """The prediction for one draft length."""

    length: int
    expected_tokens: float
    speed_up: float
    operations_factor: float


class TheoryPrediction(NamedTuple):
    """The given acceptance rate and cost, the best length for them, and a row per shown length."""

    alpha: float
    cost: float
    pays: bool
    best: "BestLength"
    rows: list[TheoryRow]


_ALPHA = "Acceptance rate of drafted tokens; required without --run."
_COST = "Time of a draft step / time of a target step; required without --run."
_RUN = "Benchmark file to compare with the theory."
_PLOT = "Plot tokens, speed-up and best length to this file (.svg, .png, .pdf)."
EXAMPLES = ("foredraft theory --alpha .8 --cost .05", "foredraft theory --run bench.jsonl --plot theory.svg")


def command(
    ctx: typer.Context,
    *,
    alpha: Annotated[float | None, typer.Option(metavar="FLOAT", help=_ALPHA)] = None,
    cost: Annotated[float | None, typer.Option(metavar="FLOAT", help=_COST)] = None,
    run: Annotated[Path | None, typer.Option(metavar="FILE", help=_RUN)] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help=_PLOT)] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object.")] = False,
) -> None:
    """Estimate the speed-up from acceptance rate and draft cost.

    The formulas assume a chain of k drafted tokens, each accepted with the same probability (Leviathan et al.,
    arXiv:2211.17192). With --run, both are taken from the file for each arm, and predictions are compared with
    measured speed-ups.
    """
    with starting():
        from foredraft.bench.measure.records import read_runs
        from foredraft.bench.report.theory_points import theory_points
        from foredraft.files.outputs import output_file

    for name, value in (("alpha", alpha), ("cost", cost)):
        if run is None and value is None:
            ctx.fail(f"Missing option '--{name}'.")
    found = None
    if alpha is not None and cost is not None:
        found = _predict(alpha, cost)
    elif {alpha, cost} != {None}:
        raise OptionError("Give both --alpha and --cost, or only --run.")
    if plot is not None:
        with output_file(plot, "theory"):
            pass
    points = [] if run is None else theory_points(read_runs(run))
    if plot is not None:
        from foredraft.bench.report.plots import save
        from foredraft.bench.report.theory_curves import theory_figure

        with output_file(plot, "theory"):
            save(theory_figure(alpha, cost, points), plot, "theory")
    if as_json:
        shown: dict[str, Any] = {}
        if found is not None:
            rows = [row._asdict() for row in found.rows]
            shown = found._asdict() | {"best": found.best._asdict(), "rows": rows}
        if run is not None:
            shown["points"] = [point._asdict() | {"best": point.best._asdict()} for point in points]
        typer.echo(json.dumps(shown if plot is None else shown | {"plot": str(plot)}))
        return
    console = output()
    if found is not None:
        console.print(_table(found))
        console.print(_sentence(found), soft_wrap=True)
    if points:
        console.print(_arms(points))
        console.print(_READING, soft_wrap=True)
    if plot is not None:
        console.print(f"Figures: {plot}", soft_wrap=True, markup=False)


def _predict(alpha: float, cost: float) -> TheoryPrediction:
    """The best length, and lengths on both sides of it."""
    from foredraft.core.theory import best_length, expected_tokens, operations_factor, speed_up

    best = best_length(alpha, cost, _LONGEST)
    last = min(max(8, best.length + best.length // 2), _LONGEST)
    near = {best.length - 1, best.length + 1} if best.length else set()
    shown = {best.length, *(k for k in {*_SHOWN, *near} if 1 <= k <= last)}
    rows = [
        TheoryRow(k, expected_tokens(alpha, k), speed_up(alpha, k, cost), operations_factor(alpha, k, cost))
        for k in sorted(shown)
    ]
    return TheoryPrediction(alpha, cost, best.length > 0, best, rows)


def _table(found: TheoryPrediction) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("drafted", "tokens/step", "speed-up", "operations"):
        table.add_column(name, justify="right")
    table.add_column("")
    mark = "<- best" if found.pays else "<- plain decoding"
    for length, tokens, gain, operations in found.rows:
        style, note = ("bold green", mark) if length == found.best.length else ("", "")
        table.add_row(str(length), f"{tokens:.2f}", f"{gain:.2f}x", f"{operations:.2f}x", note, style=style)
    return table


def _sentence(found: TheoryPrediction) -> str:
    length, gain = found.best
    if not found.pays:
        return f"No gain: with alpha {found.alpha:g} and cost {found.cost:g} plain decoding is fastest."
    if length == _LONGEST:
        return f"Longer is better: {length} drafted tokens give {gain:.2f}x, and longer drafts give more."
    return f"Best: {length} drafted token{'s' if length != 1 else ''} per step, {gain:.2f}x plain decoding."


_READING = (
    "In brackets: the prediction from the arm's alpha, k and c. alpha: accepted / verified tokens (levels, for trees); "
    "k: drafted levels per step; c: time to draft a level; verify: time of the target's forward; both in units of a "
    "plain step. The theory assumes verify = 1."
)


_COLUMNS = {
    "alpha": "{.alpha:.3f}",
    "k": "{.length:.1f}",
    "best k": "{.best.length}",
    "c": "{.cost:.3f}",
    "verify": "{.verify:.2f}",
    "tokens/step": "{0.tokens:.2f} ({0.predicted_tokens:.2f})",
    "speed-up": "{0.speed_up:.2f}x ({0.predicted_speed_up:.2f}x)",
}


def _arms(points: "list[Point]") -> Table:
    from foredraft.bench.report.theory_points import settings

    table = Table(box=None, pad_edge=False)
    table.add_column("arm", overflow="fold")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for setting, point in zip(settings(points), points, strict=True):
        name = escape(f"{point.arm} {setting}".strip())
        table.add_row(name, *(form.format(point) for form in _COLUMNS.values()))
    return table
