"""``foredraft viewer``."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from foredraft.core.errors import DataError

EXAMPLES = ('foredraft generate "def fibonacci(n):" --record run.jsonl', "foredraft viewer run.jsonl")
_HTML = "Write the page to this file; default: RUN with the suffix .html."
_FIELDS = {"model", "drafter", "lossless", "prompt", "finish_reason", "stats", "pieces", "steps"}


def command(
    *,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="File of generate --record.", show_default=False)],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help=_HTML, show_default=False)] = None,
) -> None:
    """Show a recorded request: its text, and the draft tree of every step.

    Writes one self-contained HTML page and prints its path.
    """
    from foredraft.files.write import check_writable, write_text
    from foredraft.serve.page import page

    path = html or run.with_suffix(".html")
    check_writable(path)
    write_text(path, page(_records(run)))
    typer.echo(path)


def _records(run: Path) -> list[dict[str, Any]]:
    try:
        records = [json.loads(line) for line in run.read_text("utf-8").splitlines()]
    except OSError as error:
        raise DataError(f"Cannot read {str(run)!r}: {error.strerror}.") from None
    except ValueError:
        records = []
    if not records or not all(isinstance(each, dict) and _FIELDS <= each.keys() for each in records):
        raise DataError(f"{str(run)!r} is no record of a request: make one with foredraft generate --record FILE.")
    return records
