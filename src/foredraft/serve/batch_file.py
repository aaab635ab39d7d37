"""Offline batches in the format of OpenAI's Batch API: a file of requests becomes a file of answers."""

import contextlib
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from foredraft.core.errors import OptionError, shown
from foredraft.files.outputs import may_cut
from foredraft.serve.batch_answers import Answered, Numbered, begin_of_line, parsed
from foredraft.serve.errors import ApiError

Report = Callable[[int, int], object]
"""Called after each answer with the numbers of answers and of failed ones so far, those of earlier runs included."""


class BatchFile:
    """Writes the answers to the requests of ``source`` to ``out``, in their order; continues an interrupted run.

    Whatever interrupts a run, ``out`` then holds the first answers of the undisturbed one, perhaps with half a line,
    which the next run replaces. ``created``, the time of the source file, is a time for answers that is the same then.

    Args:
        run: see ``BatchOptions``.

    Raises:
        OptionError: a file cannot be read or written, or ``out`` holds something else than answers to these requests
            by this run.
    """

    def __init__(self, source: Path, out: Path, run: Mapping[str, Any] | None = None) -> None:
        self._source, self._out, self._run = source, out, run or {}
        try:
            if source.exists() and not source.is_file():
                raise OptionError(f"Cannot read {source}: it is no file that could be read twice.")
            self.created = int(source.stat().st_mtime)
            self.total = sum(1 for _ in self._lines())
        except OSError as error:
            raise OptionError(f"Cannot read {source}: {error.strerror}.") from None
        self.answered, self.failed = self._resume()

    def check_model(self, name: str) -> None:
        """Refuse requests to another model than ``name``.

        Raises:
            OptionError: the first such request.
        """
        for number, line in enumerate(self._lines(), start=1):
            try:
                body = parsed(line).get("body")
            except ApiError:  # its answer will say so
                continue
            asked = body.get("model") if isinstance(body, dict) else None
            if isinstance(asked, str) and asked != name:
                raise OptionError(
                    f"{self._source}, request {number} asks for the model {shown(asked)}, and this one is {name!r}: "
                    f"give --name {shlex.quote(asked[:200])} if it is to answer."
                )

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
        failed = size = number = 0
        asked = self._lines()
        try:
            with self._out.open("rb") as file:
                while begun := file.readline(_BEGUN):
                    request = next(asked, None)
                    begin = begin_of_line(number, self._run, None if request is None else _custom_id(request))
                    if request is None or not may_cut(begun, json.dumps(begin).encode()[:-1]):
                        raise self._other(begun, begin)
                    line = begun if begun.endswith(b"\n") else begun + file.readline()
                    if not line.endswith(b"\n"):
                        break
                    if (status := _status(line)) is None:
                        raise self._other(begun, begin)
                    failed += status != 200
                    number, size = number + 1, size + len(line)
            if size < self._out.stat().st_size:
                with self._out.open("r+b") as file:
                    file.truncate(size)
        except OSError as error:
            raise OptionError(f"Cannot read {self._out}: {error.strerror}.") from None
        return number, failed

    def _other(self, begun: bytes, begin: dict[str, Any]) -> OptionError:
        """What is said of a line that is not the one that ``begin`` begins."""
        with contextlib.suppress(ValueError, RecursionError, AttributeError, KeyError, TypeError):
            found = json.loads(begun)
            if found["id"] == begin["id"] and found["custom_id"] == begin["custom_id"]:
                run = dict(found.get("foredraft", {}))
                changed = [name for name in {**run, **self._run} if run.get(name) != self._run.get(name)]
                return OptionError(
                    f"{self._out} was begun with {_named(run, changed)}, not {_named(self._run, changed)}: use the "
                    "same options to continue it, or choose another file."
                )
        return OptionError(f"{self._out} holds something else than answers to these requests: choose another file.")


_BEGUN = 1 << 20
"""Bytes of a line that are read before it is known to be an answer."""


def _named(run: Mapping[str, Any], names: Iterable[str]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {shown(run.get(name))}" for name in names)


def _custom_id(line: bytes) -> str | None:
    try:
        return parsed(line)["custom_id"]
    except ApiError:
        return None


def _status(line: bytes) -> int | None:
    """The status of an answer; None if the line is something else."""
    try:
        found = json.loads(line)["response"]["status_code"]
        return found if isinstance(found, int) else None
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
