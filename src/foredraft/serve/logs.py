"""Logs as lines of JSON."""

import json
import logging
import sys
import time


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


class _Handler(logging.StreamHandler):
    """Drops a line that cannot be written, for example to a full disk."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def log_to_stderr() -> None:
    """Send the logs of foredraft and of uvicorn to stderr."""
    handler = _Handler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("foredraft", "uvicorn"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
