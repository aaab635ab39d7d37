"""``foredraft chat``."""

import importlib
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.choices import CHAT_SAMPLING, MODEL, ModelChoice
from foredraft.cli.console import TextOut, errors, legend, output
from foredraft.cli.exit_status import say_error
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


EXAMPLES = (
    "foredraft chat",
    'foredraft chat -m PATH -d eagle3:HEAD --system "Answer briefly." --temperature 0.7',
)


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
    person = sys.stdin.isatty()
    generator = choice.load()
    talk = Conversation(generator, sampling, TextOut(show_drafts), system)
    talk.check()
    if person and not quiet:
        console = errors()
        console.print(f"{choice.model} with {generator.kind.method}. /help lists commands, Ctrl-D quits.", style="dim")
        if talk.out.colours:
            out = output()
            out.print(legend(out))
    while (line := read_turn(person)) is not None:
        if line in _HELP:
            if line == "/exit":
                return
            _order(talk, line)
        elif line.startswith("/"):
            say_error(f"Unknown command {line.split()[0]!r}. Known: {', '.join(_HELP)}.")
        elif line:
            _turn(talk, line, person, quiet)


def _turn(talk: "Conversation", line: str, person: bool, quiet: bool) -> None:
    """Answer one turn. An error ends a script; an interactive chat goes on."""
    from foredraft.cli.running import summary

    try:
        stats = talk.say(line)
    except UsageError as error:
        if not person:
            raise
        return say_error(f"{error} (/reset starts a new conversation.)")
    except KeyboardInterrupt:  # before there was anything to keep
        if not person:
            raise
        return errors().print("(interrupted)", style="dim")
    if person and not quiet:
        errors().print(summary(stats), style="dim", soft_wrap=True)


def _order(talk: "Conversation", line: str) -> None:
    from foredraft.cli.running import summary

    console = output()
    if line == "/help":
        for name, meaning in _HELP.items():
            console.print(f"{name:8}{meaning}")
    elif line == "/reset":
        talk.reset()
        console.print("Started a new conversation.")
    elif line == "/stats":
        turns = sum(message["role"] == "assistant" for message in talk.messages)
        console.print(f"{turns} turn{'s' if turns != 1 else ''} · {summary(talk.stats)}", soft_wrap=True)


@dataclass
class Conversation:
    """Messages so far, and their statistics. Every turn sends all messages."""

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
        """Forget all but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def check(self) -> None:
        """Raise a ``PromptError`` now, not at the first turn, if the model has no chat template."""
        self.generator.encode([*self.messages, {"role": "user", "content": "?"}])

    def say(self, text: str) -> DecodeStats:
        """Answer one turn on the screen; Ctrl-C ends the answer and keeps its beginning.

        Raises:
            UsageError: the conversation does not fit the model; it is as it was before.
            NumericsError: the model broke down; what it had said is on the screen.
        """
        from foredraft.cli.running import Watcher, follow, stats_of

        messages = [*self.messages, {"role": "user", "content": text}]
        sequences = self.generator.submit([messages], self.sampling)
        watcher = Watcher(lambda number: None, lambda piece: self.out(piece.text, piece.drafted))
        outcome = follow(self.generator, sequences, watcher)
        self.out("\n")
        if outcome.error is not None:
            raise outcome.error
        if outcome.interrupted:
            errors().print("(interrupted)", style="dim")
        self.messages = [*messages, {"role": "assistant", "content": sequences[0].text}]
        stats = stats_of(self.generator, sequences)
        self.stats += stats
        return stats


def read_turn(person: bool) -> str | None:
    """The next line, without spaces around it; None at the end."""
    if not person:
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError:
            raise PromptError("The turns on standard input are not UTF-8 text.") from None
        return line.strip() if line else None
    try:
        importlib.import_module("readline")  # its import is what gives ``input`` arrow keys and a history
    except ImportError:
        pass
    while True:
        try:
            return input(_INVITATION).strip()
        except EOFError:
            output().print()
            return None
        except KeyboardInterrupt:
            errors().print("\nCtrl-D or /exit quits.", style="dim")


_INVITATION = "you> "
