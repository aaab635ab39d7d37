"""Exit statuses and one-sentence errors; no traceback for a user's mistake.

0: success; 1: negative verdict (``check``, ``demo``, ``bench --compare``) or failed write; 2: bad input; 3: no verdict
(``bench --compare`` with too few units); 130: Ctrl-C; 141: closed pipe; 143: SIGTERM.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import typer

from foredraft.cli.console import errors
from foredraft.core.errors import ForedraftError, OptionError
from foredraft.core.sampling.params import suggestion

FAILED, REFUSED, UNJUDGED, INTERRUPTED, CLOSED_PIPE, TERMINATED = 1, 2, 3, 130, 141, 143
_ParseError: Any = typer.BadParameter.__base__  # base of all option errors; typer has no public name for it


class Terminated(KeyboardInterrupt):
    """SIGTERM, in a command that then keeps what it has done; see ``terminable``."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM.

    Args:
        message: what was kept.
        by: the interrupt, which decides the exit status.
    """

    def __init__(self, message: str = "", by: BaseException | None = None) -> None:
        super().__init__(message)
        self.status = TERMINATED if isinstance(by, Terminated) else INTERRUPTED


class ClosedPipe(Exception):
    """The reader of our output has closed the pipe."""


def status_of(run: Callable[[], Any]) -> int:
    """Run a command and return the exit status.

    Raises:
        Exception: an error that is not the user's; with FOREDRAFT_DEBUG any error.
    """
    try:
        status = run()
        return status if isinstance(status, int) else 0
    except (ForedraftError, _ParseError, Interrupted, typer.Abort) as error:
        if debugging():
            raise
        return _print_and_status(error)
    except ClosedPipe:
        _drop_output()
        return CLOSED_PIPE
    except OSError as error:  # e.g. stdout on a full disk
        if debugging():
            raise
        _drop_output()
        print_error(f"{error.strerror or error}.")
        return FAILED


def _drop_output() -> None:
    """Discard buffered output, which Python would otherwise complain about at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_and_status(error: BaseException) -> int:
    """Print one line and return the exit status."""
    if isinstance(error, (Interrupted, typer.Abort)):
        print_error(str(error) or "Interrupted.")
        return error.status if isinstance(error, Interrupted) else INTERRUPTED
    if isinstance(error, ForedraftError):
        print_error(str(error))
        return REFUSED
    context, said = getattr(error, "ctx", None), error.format_message()  # type: ignore[attr-defined]
    options = [name for each in context.command.params for name in each.opts] if context else []
    if (unknown := getattr(error, "option_name", "")) and said.startswith("No such option"):
        said = f"No such option: {unknown}.{suggestion(unknown, options)}"
    if "--model" in options and said.startswith("Got unexpected extra argument"):  # as vLLM takes it
        said += " The model is an option: -m MODEL."
    print_error(said + (f" (See {context.command_path} --help.)" if context else ""))
    return REFUSED


def print_error(sentence: str) -> None:
    """Print one unwrapped line on stderr."""
    console = errors()
    console.print("foredraft:", style="bold red", end=" ")
    console.print(" ".join(sentence.split()), markup=False, highlight=False, soft_wrap=True)


def debugging() -> bool:
    return os.environ.get("FOREDRAFT_DEBUG", "") not in ("", "0")


class _Warnings(logging.Handler):
    """Prints the library's warnings, as errors are, unless the command writes logs."""

    def emit(self, record: logging.LogRecord) -> None:
        others = [each for each in logging.getLogger("foredraft").handlers if each is not self]
        if all(isinstance(each, logging.NullHandler) for each in others):
            console = errors()  # the stderr of now: a spinner's passes lines on above it
            console.print("foredraft:", style="bold yellow", end=" ")
            console.print(" ".join(record.getMessage().split()), markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def printed_warnings() -> Iterator[None]:
    """Print the library's own warnings on stderr."""
    logger, handler = logging.getLogger("foredraft"), _Warnings(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence the warnings of other packages."""
    if debugging():
        yield
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read at import
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]  # if already imported
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


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM interrupts the command as Ctrl-C does, so that it keeps its work. Only in the main thread.

    Python ignores what is raised in destructors, and they run at any moment: there both signals wait.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kinds: dict[int, type[KeyboardInterrupt]] = {signal.SIGTERM: Terminated}
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        kinds[signal.SIGINT] = KeyboardInterrupt
    waiting: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if _in_destructor(frame):
            waiting.append(number)
            signal.setitimer(signal.ITIMER_REAL, 0.01)
        else:
            raise kinds[number]

    def retry(number: int, frame: FrameType | None) -> None:
        signal.raise_signal(waiting.pop())  # by the handler of that time, which may delay it

    before = {number: signal.signal(number, interrupt) for number in kinds}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, retry)
    try:
        yield
    finally:
        if waiting:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextlib.contextmanager
def interruptible(sentence: Callable[[], str]) -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM end the command; the sentence says what it keeps, and what the same command does."""
    try:
        with terminable():
            yield
    except KeyboardInterrupt as error:
        raise Interrupted(sentence(), error) from None


@contextlib.contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Inside, a package that is missing is an ``OptionError`` that names the extra with it; ``what`` needs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise OptionError(f"{what} the package {error.name}: pip install 'foredraft[{extra}]'.") from error


def _in_destructor(frame: FrameType | None) -> bool:
    """Whether a frame is in a destructor, or the callback of a weak reference."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code.co_filename == weakref.__file__:
            return True
        frame = frame.f_back
    return False


class CtrlC:
    """Inside, the first Ctrl-C only sets ``pressed``, so that no step stops midway; the second raises as usual.

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
