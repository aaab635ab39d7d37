"""``foredraft methods``."""

import json
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from foredraft.cli import completion_names as names
from foredraft.cli.console import output, starting
from foredraft.core.sampling.params import check_known
from foredraft.drafters import METHODS, Method

_WIDE = 90
_NAME = "Drafter to explain, with its options."
EXAMPLES = ("foredraft methods", "foredraft methods draft_model")


def command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help=_NAME, autocompletion=names.methods, show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.")] = False,
) -> None:
    """List the drafters, or explain one of them with its options."""
    if name is not None:
        _explain(name, as_json)
        return
    if as_json:
        typer.echo(json.dumps(described()))
        return
    found = [_about(each, method) for each, method in METHODS.usable().items()]
    console = output()
    console.print(_table(found) if console.width >= _WIDE else _records(found))
    console.print(
        "foredraft methods NAME lists a drafter's options. --drafter takes NAME, NAME:PATH or NAME:PATH,option=value, "
        "e.g. --drafter draft_model:PATH,num_assistant_tokens=5",
        style="dim",
    )


def described(only: str | None = None) -> list[dict[str, Any]]:
    """The table of methods, or one entry, with their options, in JSON types."""
    methods = METHODS.usable() if only is None else {only: METHODS[only]}
    with starting():
        from foredraft.compose.spec import option_defaults

        options = {name: option_defaults(name) for name in methods}  # imports the methods' modules
    return [_about(name, method) | {"options": options[name]} for name, method in methods.items()]


def _about(name: str, method: Method) -> dict[str, Any]:
    """An entry of the table in JSON types, without its options: it needs no torch."""
    return {
        "name": name,
        "what": method.what,
        "laws": [law.value for law in method.laws],
        "lossless": method.lossless,
        "needs": method.needs,
        "paper": method.paper,
    }


def _explain(name: str, as_json: bool) -> None:
    """Print one method and its options. Raises ``OptionError``: unknown method."""
    check_known("method", {name: None}, list(METHODS))
    with starting():
        from foredraft.compose.spec import find
        from foredraft.core.options import describe_options
    found = described(name)[0]
    options = describe_options(find(name)[1])
    if as_json:
        typer.echo(json.dumps(found | {"meanings": {each.name: each.meaning for each in options}}))
        return
    console = output()
    console.print(_records([found]))
    console.print("Options (NAME=VALUE):" if options else "No options.")
    for each in options:
        default = each.default if each.default == "required" else f"default: {each.default}"
        console.print(Text.assemble((each.name, "bold"), "  ", (default, "dim")))
        console.print(Padding(Text(each.meaning), (0, 0, 0, 4)))


def _laws(method: dict[str, Any]) -> str:
    return "\n".join(method["laws"]) or "-"


def _lossless(method: dict[str, Any]) -> Text:
    return Text("yes", style="green") if method["lossless"] else Text("no", style="bold red")


def _table(found: list[dict[str, Any]]) -> Table:
    """One row per method, for a wide screen."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_lines=True)
    table.add_column("method", style="bold", no_wrap=True)
    table.add_column("description, requirements, paper", ratio=1, overflow="fold")
    table.add_column("laws of drafts", no_wrap=True)
    table.add_column("lossless", no_wrap=True)
    for each in found:
        paper = "" if each["paper"] == "-" else f"\n{each['paper']}"
        what = Text.assemble(each["what"], "\nneeds: ", each["needs"], (paper, "dim"))
        table.add_row(each["name"], what, _laws(each), _lossless(each))
    return table


def _records(found: list[dict[str, Any]]) -> Group:
    """One block per method, for a narrow screen."""
    blocks: list[Any] = []
    for each in found:
        block = Table.grid(padding=(0, 2, 0, 0))
        block.add_column(no_wrap=True, style="dim")
        block.add_column(overflow="fold")
        block.add_row("laws", _laws(each))
        block.add_row("lossless", _lossless(each))
        block.add_row("needs", Text(each["needs"]))
        block.add_row("paper", each["paper"].replace(", ", "\n"))
        blocks += [Text(each["name"], style="bold"), Text(each["what"]), block, Text()]
    return Group(*blocks)
