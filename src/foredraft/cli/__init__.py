"""The command line. A command's file, and with it torch, is imported only when that command is run."""

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from foredraft import __version__
from foredraft.cli.ending import ClosedPipe, Interrupted, ended, quiet_libraries

COMMANDS = {
    "generate": "Continue a prompt; the text streams to the screen.",
    "chat": "Talk with a model: its chat template, and the whole conversation each turn.",
    "demo": "Plain decoding and speculation side by side, with the bundled models.",
    "train": "Train a draft head or a draft model for a target, on your text or on its own.",
    "inspect": "What a trained draft head is: method, format, shape, and the target that it needs.",
    "export": "Write a draft head in another format, for vLLM, SGLang or the code that it comes from.",
    "bench": "How fast is it here? Any drafters on any prompts, side by side.",
    "report": "Tables and figures of benchmark runs, on the screen, as a page or for a paper.",
    "tune": "Which drafter, how long, up to which batch? Measured here, on your prompts.",
    "skip": "Which layers can a draft do without? Searched here, on your prompts, for layer_skip.",
    "check": "Is it lossless on this pair? Greedy by identity, sampled by law.",
    "methods": "What can draft, with its law, its options and what it needs.",
    "theory": "What speculation can gain, from an acceptance rate and a cost.",
}
"""Each name is also the file of its ``command``; the text is the first line of that command's help."""


class Commands(TyperGroup):
    """Puts the real command in the place of its entry in the help as soon as it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = build(args[0])
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            value = super().invoke(ctx)
            sys.stdout.flush()
            return value
        except BrokenPipeError as error:  # before typer sees them: it has endings of its own
            raise ClosedPipe from error
        except KeyboardInterrupt as error:
            raise Interrupted from error


def build(name: str) -> Any:
    """The command of that name, its options read and its file imported."""
    single = typer.Typer(add_completion=False, rich_markup_mode="markdown", context_settings=_SETTINGS)
    single.command(name)(importlib.import_module(f"foredraft.cli.{name}").command)
    return typer.main.get_command(single)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default the process's own, and return its exit status.

    0, or what the command says; 2 with one sentence on stderr where something cannot be; 130 after Ctrl-C; 141 when
    whoever reads our output has gone. With FOREDRAFT_DEBUG=1 in the environment errors are raised instead.
    """
    with quiet_libraries():
        return ended(lambda: _app()(arguments, prog_name="foredraft", standalone_mode=False))


_SETTINGS = {"help_option_names": ["-h", "--help"]}


def _app() -> typer.Typer:
    app = typer.Typer(cls=Commands, context_settings=_SETTINGS, pretty_exceptions_enable=False, no_args_is_help=False)
    app.callback(invoke_without_command=True)(_face)
    for name, summary in COMMANDS.items():
        app.command(name, help=summary)(_entry)
    return app


def _face(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Lossless speculative decoding: any Hugging Face causal LM, faster, without changing what it says."""
    if version:
        typer.echo(f"foredraft {__version__}")
    elif ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def _entry() -> None:
    """Stands for a command in the help."""
