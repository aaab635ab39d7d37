"""``foredraft theory``."""

import json
from typing import Annotated, NamedTuple

import typer
from rich.table import Table

from foredraft.cli.console import output

_LONGEST = 64
_SHOWN = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)


class Row(NamedTuple):
    """What a draft length brings."""

    length: int
    expected_tokens: float
    speed_up: float
    operations_factor: float


def command(
    alpha: Annotated[float, typer.Option(help="Chance that a drafted token is accepted.")],
    cost: Annotated[float, typer.Option(help="Time of a draft step in steps of the target.")],
    operations: Annotated[
        float | None,
        typer.Option(help="The same ratio in arithmetic; by default the cost.", show_default=False),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(help="Show this many drafted tokens, and the best number.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What speculation can gain, from an acceptance rate and a cost.

    For a chain of k drafted tokens, each accepted with the same chance (Leviathan et al., arXiv:2211.17192).
    """
    from foredraft.core import theory

    work = cost if operations is None else operations

    def row(k: int) -> Row:
        tokens, gain = theory.expected_tokens(alpha, k), theory.speed_up(alpha, k, cost)
        return Row(k, tokens, gain, theory.operations_factor(alpha, k, work))

    best = theory.best_length(alpha, cost, _LONGEST)
    rows = [row(k) for k in _lengths(best.length, length)]
    if as_json:
        found = {"alpha": alpha, "cost": cost, "operations_cost": work, "pays": best.length > 0}
        found |= {"best": best._asdict(), "rows": [each._asdict() for each in rows]}
        typer.echo(json.dumps(found))
        return
    console = output()
    console.print(_table(rows, best.length))
    console.print(_sentence(alpha, cost, best.length, best.speed_up), soft_wrap=True)


def _lengths(best: int, asked: int | None) -> list[int]:
    """The lengths to show: the one asked for, or some on both sides of the best; always the best."""
    if asked is not None:
        return sorted({asked, best})
    reach = min(max(8, best + best // 2), _LONGEST)
    near = {best - 1, best + 1} if best else set()
    return sorted({best} | {k for k in {*_SHOWN, *near} if 1 <= k <= reach})


def _table(rows: list[Row], best: int) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("drafted", "tokens a step", "speed-up", "operations"):
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


def _sentence(alpha: float, cost: float, best: int, gain: float) -> str:
    if best == 0:
        return f"Nothing pays: with alpha {alpha:g} and cost {cost:g} plain decoding is the fastest."
    if best == _LONGEST:
        return f"The longer the better: {best} drafted tokens give {gain:.2f}x, and more would give more."
    return f"Best: {best} drafted token{'s' if best != 1 else ''} a step, {gain:.2f}x as fast as plain decoding."
