"""Offline batches in the format of OpenAI's Batch API: a file of requests becomes a file of answers."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from foredraft.core.errors import OptionError
from foredraft.scale.answers import Answered, Numbered, parsed
from foredraft.serve.errors import ApiError

Report = Callable[[int, int], object]
"""Called after each answer with the numbers of answers and of failed ones so far, those of earlier runs included."""


class BatchFile:
    """Writes the answers to the requests of ``source`` to ``out``, in their order; continues an interrupted run.

    Whatever interrupts a run, ``out`` then holds the first answers of the undisturbed one, perhaps with half a line,
    which the next run removes. ``created``, the time of the source file, is a time for answers that is the same then.

    Raises:
        OptionError: a file cannot be read or written, or ``out`` holds answers to other requests.
    """

    def __init__(self, source: Path, out: Path) -> None:
        self._source, self._out = source, out
        try:
            self.created = int(source.stat().st_mtime)
            self.total = sum(1 for _ in self._lines())
        except OSError as error:
            raise OptionError(f"Cannot read {source}: {error.strerror}.") from None
        self.answered, self.failed = self._resume()

    def run(self, answers: Callable[[Iterator[Numbered]], Iterable[Answered]], report: Report | None = None) -> None:
        """Write the answers to all requests that have none yet.

        Args:
            answers: to numbered requests, in their order.

        Raises:
            OSError: an answer cannot be written; those before it are in the file.
        """
        self._out.parent.mkdir(parents=True, exist_ok=True)
        with self._out.open("ab") as file:
            for line, failed in answers(self._requests()):
                file.write(line)
                file.flush()
                self.answered += 1
                self.failed += failed
                if report is not None:
                    report(self.answered, self.failed)

    def _lines(self) -> Iterator[bytes]:
        """The lines of the source that are not blank."""
        with self._source.open("rb") as file:
            yield from (line for line in file if line.strip())

    def _requests(self) -> Iterator[tuple[int, bytes]]:
        """The requests without an answer, with their numbers."""
        for number, line in enumerate(self._lines()):
            if number >= self.answered:
                yield number, line

    def _resume(self) -> tuple[int, int]:
        """The numbers of answers and of failed ones in ``out``; half a line at its end is removed."""
        if not self._out.exists():
            return 0, 0
        answered = failed = size = 0
        asked = self._lines()
        try:
            with self._out.open("rb") as file:
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    answer, request = _answered(line), next(asked, None)
                    if answer is None or request is None or answer["custom_id"] != _custom_id(request):
                        raise OptionError(
                            f"{self._out} holds something else than answers to these requests: choose another file."
                        )
                    failed += answer["response"]["status_code"] != 200
                    answered, size = answered + 1, size + len(line)
            with self._out.open("r+b") as file:
                file.truncate(size)
        except OSError as error:
            raise OptionError(f"Cannot read {self._out}: {error.strerror}.") from None
        return answered, failed


def _custom_id(line: bytes) -> str | None:
    try:
        return parsed(line)["custom_id"]
    except ApiError:
        return None


def _answered(line: bytes) -> dict[str, Any] | None:
    """An answer; None if the line is something else."""
    try:
        found = json.loads(line)
        return found if found.keys() >= {"custom_id", "response"} else None
    except (ValueError, RecursionError, AttributeError):
        return None
