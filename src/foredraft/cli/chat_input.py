"""What is typed in a chat: turns of one or several lines, with a history in a file."""

import importlib
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from foredraft.cli.console import errors
from foredraft.core.errors import PromptError

_PROMPT, _MORE = "you> ", "...> "
_QUOTES = '"""'
_MOST = 1000
"""Lines of the history that are kept."""


class Turn(NamedTuple):
    """A message, or a command: a single line that begins with a slash."""

    text: str
    command: bool


class TurnReader:
    r"""Reads turns from a terminal or a pipe.

    A turn is a line. It goes on in the next line behind a backslash; a turn that begins with three double quotes goes
    on to the next three, and is no command.
    """

    def __init__(self, history: Path | None) -> None:
        """
        Args:
            history: the file of typed lines; None to forget them.
        """
        self.interactive = sys.stdin.isatty()
        self._history = _History(history) if self.interactive else None

    def read(self) -> Turn | None:
        """The next turn that is not empty; None at the end. On a terminal, Ctrl-C drops what was typed."""
        while True:
            try:
                turn = self._turn()
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                errors().print("\nCtrl-D or /quit quits.", style="dim")
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
        if not self.interactive:
            try:
                line = sys.stdin.readline()
            except UnicodeDecodeError:
                raise PromptError("Standard input is not valid UTF-8.") from None
            return line.rstrip("\r\n") if line else None
        if not sys.stdout.isatty():  # only answers go there
            errors().print(prompt, end="")
            prompt = ""
        try:
            line = input(prompt)
        except EOFError:
            errors().print()
            return None
        except UnicodeDecodeError:
            raise PromptError("What was typed is not valid UTF-8.") from None
        if self._history is not None:
            self._history.add(line)
        return line


class _History:
    """Lines for the arrow keys, also those of earlier chats, in a file of JSON strings. Nothing without readline.

    A history that cannot be read or written ends no chat.
    """

    def __init__(self, path: Path | None) -> None:
        """
        Args:
            path: the file; None to forget the lines after this chat.
        """
        self._path = path
        self._readline: Any = None
        self._last = ""
        with suppress(ImportError):  # on Windows
            self._readline = importlib.import_module("readline")  # ``input`` uses it as soon as it is imported
        if self._readline is None:
            return
        self._readline.set_auto_history(False)
        self._readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one turn
        for line in self._read():
            self._readline.add_history(line)

    def add(self, line: str) -> None:
        if self._readline is None or not line.strip() or line == self._last:
            return
        self._last = line
        self._readline.add_history(line)
        if self._path is not None:
            with suppress(OSError):
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")

    def _read(self) -> list[str]:
        """The newest lines; older ones are dropped from a file that has grown to twice as many."""
        found: list[str] = []
        if self._path is None:
            return found
        with suppress(OSError, UnicodeError):
            lines = self._path.read_text("utf-8").splitlines()
            if len(lines) >= 2 * _MOST:
                from foredraft.files.write import atomic_write_text

                atomic_write_text(self._path, "".join(f"{line}\n" for line in lines[-_MOST:]))
            for line in lines[-_MOST:]:
                with suppress(ValueError):
                    found.append(str(json.loads(line)))
        return found


def history_file() -> Path:
    """The history in the user's folder for state: XDG_STATE_HOME, or ~/.local/state."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "foredraft" / "chat_history.jsonl"
