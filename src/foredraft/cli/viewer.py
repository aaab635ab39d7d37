"""``foredraft viewer``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from foredraft.cli.console import starting
from foredraft.core.errors import DataError
from foredraft.files.read import json_object, read_text

EXAMPLES = ('foredraft generate --raw "def fibonacci(n):" --record run.jsonl', "foredraft viewer run.jsonl")
_HTML = "Write the page to this file; default: RUN with the suffix .html."
_FIELDS = {"model", "drafter", "lossless", "prompt", "finish_reason", "stats", "pieces", "steps"}


def command(
    *,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="File of generate --record.", show_default=False)],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help=_HTML, show_default=False)] = None,
) -> None:
    """Show the trace of a request: its text, and the draft tree of every step.

    Writes one self-contained HTML page and prints its path.
    """
    with starting():
        from foredraft.files.outputs import output_file
        from foredraft.files.write import write_text
        from foredraft.serve.page import page

    if html is not None:
        with output_file(html, "viewer"):
            pass
    records = _records(run)
    path = html or run.with_suffix(".html")
    with output_file(path, "viewer"):
        write_text(path, page(records))
    typer.echo(path)


def _records(run: Path) -> list[dict[str, Any]]:
    try:
        records = [json_object(line, str(run)) for line in read_text(run, "the record").split("\n") if line.strip()]
    except DataError as error:
        if not run.is_file():
            raise
        raise _other(run) from error
    if not records or not all(each.keys() >= _FIELDS for each in records):
        raise _other(run)
    return records


def _other(run: Path) -> DataError:
    return DataError(f"{str(run)!r} is no record of a request: make one with foredraft generate --record FILE.")
