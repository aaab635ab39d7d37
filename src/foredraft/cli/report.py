"""``foredraft report``."""

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from foredraft.cli import completion_names as names
from foredraft.cli.console import busy, errors, output, starting
from foredraft.core.errors import DataError, OptionError

if TYPE_CHECKING:
    from foredraft.bench.measure.summary import Setting, Summary
    from foredraft.bench.report import tables

_RUNS = "Files of foredraft bench, or log.jsonl of training runs."
_HTML = "Write all tables and figures to one self-contained page."
_FIGURES = "Write each figure to a file in this folder."
_FORMAT = "With --figures: svg (default), png or pdf."
_BASELINE = "The arm that counts as 1.00x; default: none (plain decoding)."
_FULL = "Add quartiles, speed with prefill, tokens per second and errors."


EXAMPLES = ("foredraft report run.jsonl --html report.html", "foredraft report run.jsonl --figures out --format pdf")


def command(
    *,
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help=_RUNS, show_default=False)],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help=_HTML, show_default=False)] = None,
    figures: Annotated[Path | None, typer.Option(metavar="FOLDER", help=_FIGURES, show_default=False)] = None,
    suffix: Annotated[
        str | None,
        typer.Option("--format", metavar="NAME", help=_FORMAT, autocompletion=names.figures, show_default=False),
    ] = None,
    baseline: Annotated[str | None, typer.Option(metavar="ARM", help=_BASELINE, show_default=False)] = None,
    full: Annotated[bool, typer.Option("--full", metavar="", help=_FULL)] = False,
    markdown: Annotated[bool, typer.Option("--markdown", metavar="", help="Print the tables as Markdown.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print one JSON object with all numbers.")
    ] = False,
) -> None:
    """Show benchmark results as tables, figures or an HTML page.

    Prints speed-up and acceptance length by method and task. Arms are compared within a file, never across files.
    --html and --figures need matplotlib (pip install 'foredraft[bench]'); they list missing figures and the reasons.
    """
    with starting():
        from foredraft.bench.measure.records import read_runs
        from foredraft.bench.measure.summary import summarise
        from foredraft.bench.report import tables

    _check(suffix, html, figures, markdown and as_json)
    files = [read_runs(path) for path in runs]
    summary = summarise(files, baseline)
    if not any((summary.file.runs, summary.file.costs, summary.file.watched, summary.file.training)):
        raise DataError(f"{', '.join(map(str, runs))}: no measurements found; run foredraft bench first.")
    written: list[str] = []
    if html is not None or figures is not None:
        with busy("Drawing figures"):
            written = _write(summary, html, figures, suffix or "svg")
    if as_json:
        typer.echo(json.dumps(to_json(summary)))
    elif markdown:
        typer.echo(tables.markdown(summary, complete=full), nl=False)
    else:
        show(summary, output(), full)
    for sentence in written:
        errors().print(sentence, soft_wrap=True, markup=False)


def _check(suffix: str | None, html: Path | None, figures: Path | None, both: bool) -> None:
    from foredraft.bench.report.plots import SUFFIXES
    from foredraft.files.outputs import output_file
    from foredraft.files.write import check_writable_folder

    known = [each.removeprefix(".") for each in SUFFIXES]
    if suffix is not None and suffix not in known:
        raise OptionError(f"Unknown --format {suffix!r}. Known: {', '.join(known)}.")
    if suffix is not None and figures is None:
        raise OptionError("--format needs --figures FOLDER.")
    if both:
        raise OptionError("Use --markdown or --json, not both.")
    if html is not None:
        with output_file(html, "report"):
            pass
    if figures is not None:
        check_writable_folder(figures)


def _write(summary: "Summary", html: Path | None, folder: Path | None, suffix: str) -> list[str]:
    """Write the page and the figures; returns sentences about what was written and what is missing."""
    from foredraft.bench.report.figures import draw_figures, left_out, missing_figures, write_figures
    from foredraft.bench.report.page import page
    from foredraft.files.outputs import output_file
    from foredraft.files.write import atomic_write_text

    found = draw_figures(summary)
    sentences = []
    try:
        if html is not None:
            with output_file(html, "report"):
                atomic_write_text(html, page(summary, found))
            sentences.append(f"Wrote {html} ({html.stat().st_size / 1e6:.1f} MB).")
        if folder is not None:
            sentences.append(f"Wrote {len(write_figures(found, folder, suffix))} figures to {folder}.")
    except OSError as error:
        raise OptionError(f"Cannot write {error.filename or html or folder}: {error.strerror}.") from None
    sentences += [f"Missing figure: {sentence}" for sentence in missing_figures(found, summary)]
    return sentences + [sentence for each in found for sentence in left_out(each)]


def to_json(summary: "Summary") -> dict[str, Any]:
    """All numbers in JSON types."""
    cells = []
    for key, cell in summary.cells.items():
        numbers = {each.name: getattr(cell, each.name) for each in fields(cell) if each.name != "key"}
        nested = {name: value._asdict() for name, value in numbers.items() if hasattr(value, "_asdict")}
        cells.append(key._asdict() | numbers | nested)
    means = [
        {**setting._asdict(), "arm": arm, **summary.mean(setting, arm)._asdict()}
        for setting in summary.settings
        for arm in summary.arms(setting)
    ]
    agreed = [{**setting._asdict(), **share._asdict()} for setting, share in summary.agreement.items()]
    return {
        "baseline": summary.baseline,
        "cells": cells,
        "means": means,
        "agreement": agreed,
        "training": summary.file.training_runs,
        "provenance": summary.file.provenance,
    }


def show(summary: "Summary", console: Console, full: bool) -> None:
    """Print the tables of every setting, and the numbers' provenance."""
    from foredraft.bench.report import tables

    trained = tables.training(summary)
    if not summary.settings and trained is None:
        console.print("These files have no runs; --html FILE shows their other measurements.", soft_wrap=True)
    for setting in summary.settings:
        console.print(Text(tables.heading(setting), style="bold"))
        console.print(_short(summary, setting, console.width))
        for sentence in tables.sentences(summary, setting):
            console.print(Text(sentence))
        for task in summary.tasks(setting) if full else ():
            console.print(Text(f"\n{task}", style="bold"))
            table = tables.full(summary, setting)
            rows = tuple(row[1:] for row in table.rows if row[0] == task)
            console.print(_grid(tables.Table(table.head[1:], rows)))
        console.print()
    if trained is not None:
        console.print(Text("Training", style="bold"))
        console.print(_grid(trained))
    for sentence in ([tables.reading(summary)] if summary.settings else []) + tables.origins(summary):
        console.print(Text(sentence, style="dim"))


def _short(summary: "Summary", setting: "Setting", width: int) -> Table:
    """Speed-up and length side by side, or stacked on a narrow screen."""
    from foredraft.bench.report import tables

    head, rows = tables.columns(summary, setting), tables.short(summary, setting)
    wide = 16 + sum(max(len(name), 12) + 2 for name in head) <= width
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0) if wide or len(head) < 7 else (0, 1, 0, 0))
    table.add_column("method", overflow="fold", min_width=12)
    for name in head:
        table.add_column(Text(name), justify="right", overflow="fold", min_width=5)
    for row in rows:
        cells = []
        for speed, length, best in row.entries:
            gap = (" / " if wide else "\n") if speed and length else ""
            cells.append(Text.assemble((speed, "bold green" if best else ""), gap, (length, "dim")))
        table.add_row(Text(row.arm), *cells, *map(Text, row.drafted))
    return table


def _grid(found: "tables.Table") -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for place, name in enumerate(found.head):
        longest = max(len(text) for text in (*name.split(), *(row[place] for row in found.rows)))
        if place < found.words:
            table.add_column(Text(name), overflow="fold", min_width=8)
        else:
            table.add_column(Text(name), justify="right", width=longest)
    for row in found.rows:
        table.add_row(*map(Text, row))
    return table
