"""``foredraft theory``."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.markup import escape
from rich.table import Table

from foredraft.cli.console import output
from foredraft.core.errors import OptionError

if TYPE_CHECKING:
    from foredraft.bench.report.theory_points import Point
    from foredraft.core.theory import BestLength

_LONGEST = 64
_SHOWN = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)


class Row(NamedTuple):
    """The prediction for one draft length."""

    length: int
    expected_tokens: float
    speed_up: float
    operations_factor: float


_ALPHA = "Acceptance rate of drafted tokens; required without --run."
_COST = "Time of a draft step / time of a target step; required without --run."
_OPERATIONS = "The same ratio in operations; default: --cost."
_LENGTH = "Show only this draft length and the best one."
_RUN = "Benchmark file to compare with the theory."
_PLOT = "Plot tokens, speed-up and best length to this file (.svg, .png, .pdf)."
EXAMPLES = ("foredraft theory --alpha .8 --cost .05", "foredraft theory --run bench.jsonl --plot theory.svg")


def command(
    ctx: typer.Context,
    *,
    alpha: Annotated[float | None, typer.Option(metavar="FLOAT", help=_ALPHA)] = None,
    cost: Annotated[float | None, typer.Option(metavar="FLOAT", help=_COST)] = None,
    operations: Annotated[float | None, typer.Option(metavar="FLOAT", help=_OPERATIONS)] = None,
    length: Annotated[int | None, typer.Option(metavar="INT", help=_LENGTH)] = None,
    run: Annotated[Path | None, typer.Option(metavar="FILE", help=_RUN)] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help=_PLOT)] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object.")] = False,
) -> None:
    """Estimate the speed-up from acceptance rate and draft cost.

    The formulas assume a chain of k drafted tokens, each accepted with the same probability (Leviathan et al.,
    arXiv:2211.17192). With --run, both are taken from the file for each arm, and predictions are compared with
    measured speed-ups.
    """
    from foredraft.bench.measure.records import read_runs
    from foredraft.bench.report.theory_points import theory_points

    for name, value in (("alpha", alpha), ("cost", cost)):
        if run is None and value is None:
            ctx.fail(f"Missing option '--{name}'.")
    given = None if alpha is None or cost is None else Rates(alpha, cost, cost if operations is None else operations)
    if given is None and {alpha, cost, operations, length} != {None}:
        raise OptionError("Give both --alpha and --cost, or only --run.")
    table = None if given is None else _predict(given, length)
    points = [] if run is None else theory_points(read_runs(run))
    if plot is not None:
        from foredraft.bench.report.plots import save
        from foredraft.bench.report.theory_curves import theory_figure

        save(theory_figure(alpha, cost, points), plot)
    if as_json:
        found: dict[str, Any] = {} if table is None else table.as_dict()
        if run is not None:
            found["points"] = [point._asdict() | {"best": point.best._asdict()} for point in points]
        typer.echo(json.dumps(found if plot is None else {**found, "plot": str(plot)}))
        return
    _show(table, points)
    if plot is not None:
        output().print(f"Figures: {plot}", soft_wrap=True, markup=False)


class Rates(NamedTuple):
    """The given acceptance rate and costs."""

    alpha: float
    cost: float
    operations: float


class Prediction(NamedTuple):
    """The theory's prediction: the best length, and a row per shown length."""

    given: Rates
    best: "BestLength"
    rows: list[Row]

    def as_dict(self) -> dict[str, Any]:
        alpha, cost, operations = self.given
        found = {"alpha": alpha, "cost": cost, "operations_cost": operations, "pays": self.best.length > 0}
        return found | {"best": self.best._asdict(), "rows": [each._asdict() for each in self.rows]}


def _predict(given: Rates, length: int | None) -> Prediction:
    from foredraft.core import theory

    alpha, cost, operations = given

    def row(k: int) -> Row:
        tokens, gain = theory.expected_tokens(alpha, k), theory.speed_up(alpha, k, cost)
        return Row(k, tokens, gain, theory.operations_factor(alpha, k, operations))

    best = theory.best_length(alpha, cost, _LONGEST)
    return Prediction(given, best, [row(k) for k in _lengths(best.length, length)])


def _show(table: Prediction | None, points: "list[Point]") -> None:
    console = output()
    if table is not None:
        console.print(_table(table.rows, table.best.length))
        console.print(_sentence(table.given, table.best), soft_wrap=True)
    if points:
        console.print(_arms(points))
        console.print(_READING, soft_wrap=True)


def _lengths(best: int, asked: int | None) -> list[int]:
    """The lengths to show: the best, and the requested one or some on both sides of the best."""
    if asked is not None:
        return sorted({asked, best})
    reach = min(max(8, best + best // 2), _LONGEST)
    near = {best - 1, best + 1} if best else set()
    return sorted({best} | {k for k in {*_SHOWN, *near} if 1 <= k <= reach})


def _table(rows: list[Row], best: int) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("drafted", "tokens/step", "speed-up", "operations"):
        table.add_column(name, justify="right")
    table.add_column("")
    for each in rows:
        marked = each.length == best
        table.add_row(
            str(each.length),
            f"{each.expected_tokens:.2f}",
            f"{each.speed_up:.2f}x",
            f"{each.operations_factor:.2f}x",
            ("<- best" if best else "<- plain decoding") if marked else "",
            style="bold green" if marked else "",
        )
    return table


def _sentence(given: Rates, best: "BestLength") -> str:
    length, gain = best
    if length == 0:
        return f"No gain: with alpha {given.alpha:g} and cost {given.cost:g} plain decoding is fastest."
    if length == _LONGEST:
        return f"Longer is better: {length} drafted tokens give {gain:.2f}x, and longer drafts give more."
    return f"Best: {length} drafted token{'s' if length != 1 else ''} per step, {gain:.2f}x plain decoding."


_READING = (
    "In brackets: the prediction from the arm's alpha, k and c. alpha: accepted / verified tokens (levels, for trees); "
    "k: drafted levels per step; c: time to draft a level; verify: time of the target's forward; both in units of a "
    "plain step. The theory assumes verify = 1."
)


def _arms(points: "list[Point]") -> Table:
    from foredraft.bench.report.theory_points import settings

    table = Table(box=None, pad_edge=False)
    table.add_column("arm", overflow="fold")
    for name in ("alpha", "k", "best k", "c", "verify", "tokens/step", "speed-up"):
        table.add_column(name, justify="right")
    for setting, each in zip(settings(points), points, strict=True):
        table.add_row(
            escape(f"{each.arm} {setting}".strip()),
            f"{each.alpha:.3f}",
            f"{each.length:.1f}",
            str(each.best.length),
            f"{each.cost:.3f}",
            f"{each.verify:.2f}",
            f"{each.tokens:.2f} ({each.predicted_tokens:.2f})",
            f"{each.speed_up:.2f}x ({each.predicted_speed_up:.2f}x)",
        )
    return table
