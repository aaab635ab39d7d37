"""Logs as lines of JSON, or for people."""

import contextlib
import json
import logging
import math
import sys
import time

_MINUTE = 60.0
_BEGINNING, _KINDS = 100, 1000
"""Characters by which lines are compared, and different lines that are remembered."""
_POLLED = ("/live", "/health")


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the ``facts`` of the record."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class OnceAMinute(logging.Filter):
    """Leaves out warnings and errors that begin like one of the last minute; the next line says how many they were."""

    def __init__(self) -> None:
        super().__init__()
        self._left_out: dict[tuple[str, str], tuple[float, int]] = {}  # since when, and how many

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        key = record.name, record.getMessage().partition("\n")[0][:_BEGINNING]
        since, count = self._left_out.get(key, (-math.inf, 0))
        if record.created - since < _MINUTE:
            self._left_out[key] = since, count + 1
            return False
        if len(self._left_out) >= _KINDS:
            self._left_out.clear()
        self._left_out[key] = record.created, 0
        if count:
            record.facts = {**getattr(record, "facts", {}), "left_out": count}
        return True


class Lines(logging.Formatter):
    """A line to read on a terminal; a server's start has a line for each address to open."""

    def format(self, record: logging.LogRecord) -> str:
        facts, clock = getattr(record, "facts", {}), time.strftime("%H:%M:%S", time.localtime(record.created))
        if "page" in facts:
            return (
                f"{clock}  Ready. Open or use:\n\n    page  {facts['page']}\n    API   {facts['api']}\n\n"
                "Ctrl-C ends the server when accepted requests have ended; a second one ends these, too."
            )
        message = record.getMessage()
        if "path" in facts:
            message = f"{facts['status']}  {facts['method']} {facts['path']}  {facts['seconds']:.2f} s"
        elif record.levelno >= logging.WARNING:
            more = f" ({facts['left_out']} more in the last minute)" if "left_out" in facts else ""
            message = f"{record.levelname.capitalize()}: {message}{more}"
        text = f"{clock}  {message}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _worth_a_line(record: logging.LogRecord) -> bool:
    """Whether people want to read it: not every look of the page at the server."""
    facts = getattr(record, "facts", {})
    return not (facts.get("path") in _POLLED and facts.get("status") == 200)


class _Handler(logging.Handler):
    """Writes to the stderr of the moment, which a spinner replaces by its own, and drops what cannot be written."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):  # such as a full disk
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()


def log_to_stderr() -> None:
    """Send the logs of foredraft, uvicorn and the event loop to stderr: on a terminal for people, else as JSON."""
    handler, people = _Handler(), sys.stderr.isatty()
    handler.setFormatter(Lines() if people else JsonLines())
    if people:
        handler.addFilter(_worth_a_line)
    handler.addFilter(OnceAMinute())
    for name in ("foredraft", "uvicorn", "asyncio"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.WARNING if people and name == "uvicorn" else logging.INFO)
        logger.propagate = False
