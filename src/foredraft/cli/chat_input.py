"""What is typed in a chat: turns of one or several lines, with a history in a file."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from foredraft.cli.console import errors
from foredraft.core.errors import PromptError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

_PROMPT, _MORE = "you> ", "...> "
_QUOTES = '"""'
Completions = Mapping[str, Sequence[str] | None]
"""Commands, and what may be behind each: words, a file if there are none, nothing if None."""


class Turn(NamedTuple):
    """A message, or a command: a single line that begins with a slash."""

    text: str
    command: bool


class TurnReader:
    r"""Reads turns from a terminal or a pipe.

    A turn is a line. It goes on in the next line behind a backslash; a turn that begins with three double quotes goes
    on to the next three, and is no command.
    """

    def __init__(self, history: Path | None, completions: Completions) -> None:
        """
        Args:
            history: the file of typed lines; None to forget them.
            completions: what Tab completes.
        """
        self.interactive = sys.stdin.isatty()
        self._session = _session(history, completions) if self.interactive else None

    def read(self) -> Turn | None:
        """The next turn that is not empty; None at the end. On a terminal, Ctrl-C drops what was typed."""
        while True:
            try:
                turn = self._turn()
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                errors().print("Ctrl-D or /quit quits.", style="dim")
                continue
            if turn is None or turn.text:
                return turn

    def _turn(self) -> Turn | None:
        line = self._line(_PROMPT)
        if line is None:
            return None
        if (stripped := line.strip()).startswith(_QUOTES):
            return Turn(self._block(stripped.removeprefix(_QUOTES)), False)
        text = stripped
        while text.endswith("\\"):
            more = self._line(_MORE)
            text = text[:-1] + ("" if more is None else f"\n{more.rstrip()}")
            if more is None:
                break
        return Turn(text.strip(), text.startswith("/") and "\n" not in text)

    def _block(self, text: str) -> str:
        """What is between the quotes, whose first line is ``text``; the end of the input ends it, too."""
        while not text.rstrip().endswith(_QUOTES):
            more = self._line(_MORE)
            if more is None:
                return text.strip("\n")
            text += f"\n{more}"
        return text.rstrip().removesuffix(_QUOTES).strip("\n")

    def _line(self, prompt: str) -> str | None:
        """A line without its end; None at the end of the input."""
        if self._session is not None:
            try:
                line = self._session.prompt(prompt)
                line.encode()  # bytes that were not UTF-8 are lone surrogates
            except EOFError:
                return None
            except UnicodeEncodeError:
                raise PromptError("What was typed is not valid UTF-8.") from None
            return line
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError:
            raise PromptError("Standard input is not valid UTF-8.") from None
        return line.rstrip("\r\n") if line else None


def _session(history: Path | None, completions: Completions) -> "PromptSession[str]":
    """A line editor on the terminal; where stdout is a file, which only answers go to, on stderr."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.output import create_output
    from prompt_toolkit.shortcuts import CompleteStyle

    class Lines(FileHistory):
        """A history that cannot be read or written ends no chat."""

        def load_history_strings(self) -> Iterable[str]:
            with suppress(OSError):
                yield from super().load_history_strings()

        def store_string(self, string: str) -> None:
            with suppress(OSError, UnicodeEncodeError):
                Path(str(history)).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                super().store_string(string)

    class Commands(Completer):
        """Commands, and what is behind one."""

        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
            name, space, argument = document.text_before_cursor.partition(" ")
            if not space:
                yield from self._of(completions if name.startswith("/") else (), name)
            elif completions.get(name) is None:
                return
            elif known := completions[name]:
                yield from self._of(known, argument)
            else:
                yield from PathCompleter(expanduser=True).get_completions(Document(argument), complete_event)

        @staticmethod
        def _of(known: Iterable[str], typed: str) -> Iterable[Completion]:
            return (Completion(each, -len(typed)) for each in known if each.startswith(typed))

    return PromptSession(
        history=InMemoryHistory() if history is None else Lines(str(history)),
        completer=Commands(),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        output=None if sys.stdout.isatty() else create_output(sys.stderr),
    )


def history_file() -> Path:
    """The history in the user's folder for state: XDG_STATE_HOME, or ~/.local/state."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "foredraft" / "chat_history"
