"""Exit statuses and one-sentence errors; no traceback for a user's mistake.

0 is success; 1 a negative verdict (``check``, ``demo``, ``bench --compare``) or a failed write; 2 bad input; 3 no
verdict (``bench --compare`` with too few units); 130 Ctrl-C; 141 a closed pipe.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import typer

from foredraft.cli.console import errors
from foredraft.core.errors import ForedraftError

FAILED, REFUSED, UNJUDGED, INTERRUPTED, CLOSED_PIPE = 1, 2, 3, 130, 141
_ParseError: Any = typer.BadParameter.__base__  # of any wrong option; typer has no public name for it


class Interrupted(Exception):
    """Ctrl-C; the text says what was kept."""


class ClosedPipe(Exception):
    """The reader of our output has closed the pipe."""


def ended(run: Callable[[], Any]) -> int:
    """Run to the end and return the exit status.

    Raises:
        Exception: an error that is not the user's; every error, if FOREDRAFT_DEBUG is set.
    """
    try:
        status = run()
        return status if isinstance(status, int) else 0
    except (ForedraftError, _ParseError, Interrupted, typer.Abort) as error:
        if debugging():
            raise
        return _explained(error)
    except ClosedPipe:
        _drop_output()
        return CLOSED_PIPE
    except OSError as error:  # such as a full disk behind stdout
        if debugging():
            raise
        _drop_output()
        say_error(f"{error.strerror or error}.")
        return FAILED


def _drop_output() -> None:
    """Discard buffered output, which Python would otherwise complain about at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _explained(error: BaseException) -> int:
    """Print one line, and return the exit status."""
    if isinstance(error, (Interrupted, typer.Abort)):
        say_error(str(error) or "Interrupted.")
        return INTERRUPTED
    if isinstance(error, ForedraftError):
        say_error(str(error))
        return REFUSED
    context = getattr(error, "ctx", None)
    hint = f" (See {context.command_path} --help.)" if context else ""
    say_error(error.format_message() + hint)  # type: ignore[attr-defined]
    return REFUSED


def say_error(sentence: str) -> None:
    """One line on stderr, whatever the width of the screen."""
    console = errors()
    console.print("foredraft:", style="bold red", end=" ")
    console.print(" ".join(sentence.split()), markup=False, highlight=False, soft_wrap=True)


def debugging() -> bool:
    return os.environ.get("FOREDRAFT_DEBUG", "") not in ("", "0")


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence other packages' warnings, which are meant for programmers."""
    if debugging():
        yield
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when they are imported
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]  # if they have been before
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


class CtrlC:
    """Inside, the first Ctrl-C is only noted, so that no step is cut in half; the second raises as usual.

    Does nothing outside the main thread, or where the shell ignores Ctrl-C.
    """

    def __init__(self) -> None:
        self.pressed = False
        self._before: Any = None

    def __enter__(self) -> "CtrlC":
        ours = threading.current_thread() is threading.main_thread()
        if ours and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        signal.signal(signal.SIGINT, self._before)
