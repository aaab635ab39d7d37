"""``foredraft quantize``."""

from typing import Annotated

import typer

from foredraft.cli.console import busy, errors, starting

EXAMPLES = (
    "foredraft quantize PATH model-int4",
    "foredraft quantize model.gguf model-int8 --weights int8",
    "foredraft serve -m model-int4",
)


def command(
    model: Annotated[str, typer.Argument(help="The model: folder, hub name or GGUF file.", show_default=False)],
    out: Annotated[str, typer.Argument(help="Folder to write.", show_default=False)],
    weights: Annotated[str, typer.Option(metavar="TEXT", help="int4 or int8.")] = "int4",
) -> None:
    """Quantise a model for the CPU engine and save it.

    The folder holds the tokenizer, too, and loads in seconds. It is a model for every command and for foredraft.load,
    without --weights, on any processor.
    """
    with starting():
        from foredraft.compose.quantize import quantize

    with busy(f"Quantising {model}") as update:
        quantize(model, out, weights, lambda name: update(f"Quantising {name}"))
    errors().print(f"Wrote {model} in {weights} to {out}.", style="dim", markup=False, soft_wrap=True)
