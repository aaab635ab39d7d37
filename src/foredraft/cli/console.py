"""Output: results to stdout, messages to stderr."""

import contextlib
import io
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

DRAFTED = "bold green"
"""Style of accepted drafted tokens."""


class PipeConsole(Console):
    """Raises ``BrokenPipeError`` where rich would exit with a status of its own."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def output() -> Console:
    """stdout, for tables and texts of the program itself."""
    return PipeConsole(highlight=False)


def errors() -> Console:
    """stderr."""
    return Console(stderr=True, highlight=False)


@contextlib.contextmanager
def busy(doing: str) -> Iterator[None]:
    """Show a spinner on a terminal; elsewhere, nothing."""
    console = errors()
    if console.is_terminal:
        with console.status(f"[dim]{doing}[/dim]"):
            yield
    else:
        yield


class TextOut:
    """Generated text on stdout as it comes, without wrapping or markup.

    On a terminal control characters are made visible, because a model can generate any, and with ``show_drafts``
    accepted drafts are coloured. Elsewhere the text is unchanged.
    """

    def __init__(self, show_drafts: bool = False) -> None:
        console = output()
        self.terminal = console.is_terminal
        self.colours = show_drafts and console.is_terminal
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # for characters that the terminal lacks
        # with NO_COLOR it is underlined
        self._on = "\x1b[4m" if console.no_color else "\x1b[1;32m"

    def __call__(self, text: str, drafted: bool = False) -> None:
        if self.terminal:
            text = text.translate(_VISIBLE)
        if text and drafted and self.colours:
            text = f"{self._on}{text}\x1b[0m"
        sys.stdout.write(text)
        sys.stdout.flush()


def legend(console: Console) -> Text:
    """What the styles of ``TextOut`` mean."""
    style = "underline" if console.no_color else DRAFTED
    return Text.assemble(("drafted and accepted", style), "   the target's own")


_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n\r"}
_VISIBLE |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}
