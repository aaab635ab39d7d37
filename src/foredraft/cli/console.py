"""Output: results to stdout, messages to stderr."""

import contextlib
import gc
import io
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.text import Text

if TYPE_CHECKING:
    from rich.progress import Progress


class PipeConsole(Console):
    """Raises ``BrokenPipeError``, where rich would exit with its own status."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def output() -> Console:
    """stdout, for tables and messages (generated text goes through ``TextOut``)."""
    return PipeConsole(highlight=False)


def errors() -> Console:
    """stderr."""
    return Console(stderr=True, highlight=False)


@contextlib.contextmanager
def busy(doing: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner and the time, on a terminal only; yields a function that changes its text."""
    console = errors()
    if not console.is_terminal:
        yield lambda text: None
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn("dots"), TextColumn("[dim]{task.description}[/dim]"), TimeElapsedColumn())
    with Progress(*columns, console=console, refresh_per_second=4, transient=True) as progress:
        task = progress.add_task(escape(doing), total=None)
        yield lambda text: progress.update(task, description=escape(text))


@contextlib.contextmanager
def starting() -> Iterator[Callable[[str], None]]:
    """``busy`` around imports: torch takes seconds. They leave no garbage, so none is looked for, an eighth of them."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with busy("Starting") as said:
            yield said
    finally:
        if collects:
            gc.enable()


def progress_bar(*, auto_refresh: bool = True) -> "Progress":
    """A progress bar on stderr, on a terminal only."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = errors()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, auto_refresh=auto_refresh, disable=not console.is_terminal)


class TextOut:
    """Streams generated text to stdout, without wrapping or markup.

    On a terminal, control characters are made visible, because a model can generate any, and ``show_drafts`` colours
    accepted drafts. Elsewhere the text is unchanged.
    """

    def __init__(self, show_drafts: bool = False) -> None:
        console = output()
        self.terminal = console.is_terminal
        self.colours = show_drafts and console.is_terminal
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # for characters that the terminal's encoding lacks
        # NO_COLOR: underline instead
        self._on = "\x1b[4m" if console.no_color else "\x1b[1;32m"

    def __call__(self, text: str, drafted: bool = False) -> None:
        if self.terminal:
            text = text.translate(_VISIBLE)
        if text and drafted and self.colours:
            text = f"{self._on}{text}\x1b[0m"
        sys.stdout.write(text)
        sys.stdout.flush()


class WordWrap:
    """Streams text through a ``TextOut``; on a terminal, lines of prose break between words.

    A word is shown at its end. Code between lines of three backquotes is left as it is, so that it can be copied.
    """

    def __init__(self, out: TextOut) -> None:
        self._out = out
        self._space = ""
        self._word: list[tuple[str, bool]] = []
        self._line = ""  # so far, without what is held back
        self._code = False

    def __call__(self, text: str, drafted: bool = False) -> None:
        if not self._out.terminal:
            return self._out(text, drafted)
        for part in re.split(r"(\s)", text):
            if part and not part.isspace():
                self._word.append((part, drafted))
            elif part:
                self._end_word()
                self._space += part
            if part == "\n":
                self._code ^= self._line.startswith("```")
                self._out(self._space)
                self._space = self._line = ""

    def _end_word(self) -> None:
        word = "".join(text for text, _ in self._word)
        if not word:
            return
        if not self._code and self._line and cell_len(self._line + self._space + word) > _columns():
            self._space, self._line = "\n", ""
        self._line += self._space.strip("\n") + word
        self._out(self._space)
        for text, drafted in self._word:
            self._out(text, drafted)
        self._space, self._word = "", []


def _columns() -> int:
    return shutil.get_terminal_size().columns


def legend(console: Console) -> Text:
    """The legend for the styles of ``TextOut``."""
    return Text.assemble(("accepted drafts", drafted_style(console)), "   target's tokens")


def drafted_style(console: Console) -> str:
    """Of accepted drafts; underlined with NO_COLOR."""
    return "underline" if console.no_color else "bold green"


_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n\r"}
_VISIBLE |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}
