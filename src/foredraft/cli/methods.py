"""``foredraft methods``."""

import json
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from foredraft.cli.console import output

_WIDE = 90


def command(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False) -> None:
    """What can draft, with its law, its options and what it needs."""
    found = described()
    if as_json:
        typer.echo(json.dumps(found))
        return
    console = output()
    console.print(_table(found) if console.width >= _WIDE else _records(found))
    console.print(_options(found))
    console.print(
        "Write a drafter as NAME, NAME:PATH or NAME:PATH,option=value, as in "
        "--drafter draft_model:PATH,num_assistant_tokens=5",
        style="dim",
    )


def described() -> list[dict[str, Any]]:
    """The table of methods in types that JSON knows."""
    from foredraft.compose import describe_options
    from foredraft.core.verify import DEFAULT
    from foredraft.drafters import METHODS

    return [
        {
            "name": name,
            "what": method.what,
            "laws": [{"law": law.value, "default_verifier": DEFAULT[law]} for law in method.laws],
            "lossless": method.lossless,
            "needs": method.needs,
            "paper": method.paper,
            "options": describe_options(name),
        }
        for name, method in METHODS.items()
    ]


def _laws(method: dict[str, Any]) -> str:
    pairs = [f"{each['law']}: {each['default_verifier']}" for each in method["laws"]]
    return "\n".join(pairs) or "-"


def _lossless(method: dict[str, Any]) -> Text:
    return Text("yes", style="green") if method["lossless"] else Text("no", style="bold red")


def _table(found: list[dict[str, Any]]) -> Table:
    """One line a method, for a wide screen."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0))
    table.add_column("method", style="bold", no_wrap=True)
    table.add_column("what", ratio=3)
    table.add_column("law: default verifier", no_wrap=True)
    table.add_column("lossless", no_wrap=True)
    table.add_column("needs", ratio=2)
    table.add_column("paper", style="dim", ratio=2, overflow="fold")
    for each in found:
        table.add_row(
            each["name"],
            each["what"],
            _laws(each),
            _lossless(each),
            each["needs"],
            each["paper"].replace(", ", "\n"),
        )
    return table


def _records(found: list[dict[str, Any]]) -> Group:
    """One block a method, for a narrow screen."""
    blocks: list[Any] = []
    for each in found:
        block = Table.grid(padding=(0, 2, 0, 0))
        block.add_column(no_wrap=True, style="dim")
        block.add_column(overflow="fold")
        block.add_row("laws", _laws(each))
        block.add_row("lossless", _lossless(each))
        block.add_row("needs", each["needs"])
        block.add_row("paper", each["paper"].replace(", ", "\n"))
        blocks += [Text(each["name"], style="bold"), Text(each["what"]), block, Text()]
    return Group(*blocks)


def _options(found: list[dict[str, Any]]) -> Table:
    """Options of every method that has some, with their defaults."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("option of", style="bold", no_wrap=True)
    table.add_column("", overflow="fold")
    table.add_column("default", overflow="fold")
    for each in found:
        for number, (name, value) in enumerate(each["options"].items()):
            table.add_row("" if number else each["name"], name, "off" if value is None else str(value))
    table.add_row()
    return table
