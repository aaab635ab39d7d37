"""``foredraft chat``."""

import importlib
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.choices import CHAT_SAMPLING, MODEL, ModelChoice
from foredraft.cli.console import TextOut, errors, legend, output
from foredraft.cli.exit_status import print_error
from foredraft.cli.flags import flags
from foredraft.core.errors import PromptError, UsageError
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.stats import DecodeStats

if TYPE_CHECKING:
    from foredraft.engine.generator import Generator

_HELP = {
    "/help": "list these commands",
    "/reset": "start a new conversation",
    "/stats": "show speed and acceptance so far",
    "/exit": "quit (or Ctrl-D)",
}


EXAMPLES = ("foredraft chat", 'foredraft chat -m PATH -d eagle3:HEAD --system "Answer briefly." --temperature 0.7')


@flags(choice=MODEL, sampling=CHAT_SAMPLING)
def command(
    system: Annotated[str | None, typer.Option(help="System message.", metavar="TEXT", show_default=False)] = None,
    show_drafts: Annotated[bool, typer.Option("--show-drafts", metavar="", help="Colour accepted drafts.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", metavar="", help="No greeting, no statistics.")] = False,
    *,
    choice: ModelChoice,
    sampling: SamplingParams,
) -> None:
    """Chat with a model, using its chat template.

    Each line is one turn, typed or from a pipe. Ctrl-C stops an answer and keeps it; Ctrl-D quits.
    """
    interactive = sys.stdin.isatty()
    generator = choice.load()
    conversation = Conversation(generator, sampling, TextOut(show_drafts), system)
    conversation.check()
    if interactive and not quiet:
        console = errors()
        console.print(f"{choice.model} with {generator.kind.method}. /help lists commands, Ctrl-D quits.", style="dim")
        if conversation.out.colours:
            out = output()
            out.print(legend(out))
    while (line := read_turn(interactive)) is not None:
        if line in _HELP:
            if line == "/exit":
                return
            _run_command(conversation, line)
        elif line.startswith("/"):
            print_error(f"Unknown command {line.split()[0]!r}. Known: {', '.join(_HELP)}.")
        elif line:
            _turn(conversation, line, interactive, quiet)


def _turn(conversation: "Conversation", line: str, interactive: bool, quiet: bool) -> None:
    """Answer one turn. An error ends a script; an interactive chat continues."""
    from foredraft.cli.running import summary

    try:
        stats = conversation.answer(line)
    except UsageError as error:
        if not interactive:
            raise
        return print_error(f"{error} (/reset starts a new conversation.)")
    except KeyboardInterrupt:  # before the first token
        if not interactive:
            raise
        return errors().print("(interrupted)", style="dim")
    if interactive and not quiet:
        errors().print(summary(stats), style="dim", soft_wrap=True)


def _run_command(conversation: "Conversation", line: str) -> None:
    from foredraft.cli.running import summary

    console = output()
    if line == "/help":
        for name, meaning in _HELP.items():
            console.print(f"{name:8}{meaning}")
    elif line == "/reset":
        conversation.reset()
        console.print("Started a new conversation.")
    elif line == "/stats":
        turns = sum(message["role"] == "assistant" for message in conversation.messages)
        console.print(f"{turns} turn{'s' if turns != 1 else ''} · {summary(conversation.stats)}", soft_wrap=True)


@dataclass
class Conversation:
    """Messages so far, and their statistics. Every turn sends all messages to the model."""

    generator: "Generator"
    sampling: SamplingParams
    out: TextOut
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    stats: DecodeStats = field(default_factory=DecodeStats)

    def __post_init__(self) -> None:
        self.reset()
        kind = self.generator.kind
        self.stats = DecodeStats(method=kind.method, lossless=kind.lossless)

    def reset(self) -> None:
        """Drop all messages but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def check(self) -> None:
        """Raise ``PromptError`` now, not at the first turn, if the model has no chat template."""
        self.generator.encode([*self.messages, {"role": "user", "content": "?"}])

    def answer(self, text: str) -> DecodeStats:
        """Stream the answer to one turn; Ctrl-C stops it and keeps what was generated.

        Raises:
            UsageError: the model cannot take the conversation, which is left unchanged.
            NumericsError: the model's logits were not finite; the answer so far was printed.
        """
        from foredraft.cli.running import Watcher, run_requests, stats_of

        messages = [*self.messages, {"role": "user", "content": text}]
        sequences = self.generator.submit([messages], self.sampling)
        watcher = Watcher(lambda number: None, lambda piece: self.out(piece.text, piece.drafted))
        outcome = run_requests(self.generator, sequences, watcher)
        self.out("\n")
        if outcome.error is not None:
            raise outcome.error
        if outcome.interrupted:
            errors().print("(interrupted)", style="dim")
        self.messages = [*messages, {"role": "assistant", "content": sequences[0].text}]
        stats = stats_of(self.generator, sequences)
        self.stats += stats
        return stats


def read_turn(interactive: bool) -> str | None:
    """The next line, stripped; None at the end."""
    if not interactive:
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError:
            raise PromptError("Standard input is not valid UTF-8.") from None
        return line.strip() if line else None
    try:
        importlib.import_module("readline")  # importing it gives ``input`` line editing and history
    except ImportError:
        pass
    while True:
        try:
            return input(_INPUT_PROMPT).strip()
        except EOFError:
            output().print()
            return None
        except KeyboardInterrupt:
            errors().print("\nCtrl-D or /exit quits.", style="dim")


_INPUT_PROMPT = "you> "
