"""``foredraft methods``."""

import json
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
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
    """One row a method, for a wide screen."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_lines=True)
    table.add_column("method", style="bold", no_wrap=True)
    table.add_column("what, what it needs, paper", ratio=1, overflow="fold")
    table.add_column("law: default verifier", no_wrap=True)
    table.add_column("lossless", no_wrap=True)
    for each in found:
        paper = "" if each["paper"] == "-" else f"\n{each['paper']}"
        what = Text.assemble(each["what"], "\nneeds ", each["needs"], (paper, "dim"))
        table.add_row(each["name"], what, _laws(each), _lossless(each))
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
