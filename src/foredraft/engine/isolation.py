"""Isolation of rows within a step: what fails for some rows is done again without the rules of these rows.

A row's rules are its sampling parameters: penalties, bans, truncations, processors. They run for all rows at once, and
drafters apply them, too. If that fails, the rows are tried apart. Those that fail lose their rules for the rest of the
step, and their requests end with it; the others keep their place in the batch, their drafts and their random numbers,
so their texts are those that they would have had.
"""

from collections.abc import Callable, Collection
from typing import TypeVar

from foredraft.core.drafter import View
from foredraft.engine.state import Batch

T = TypeVar("T")


class Isolation:
    """The view of one step, and the errors of the rows that failed in it, by index in the batch.

    Args:
        batch: makes the view without the rules of some rows. None: an error of one row is one of all rows.
    """

    def __init__(self, view: View, batch: Batch | None = None) -> None:
        self.view = view
        self.errors: dict[int, Exception] = {}
        self._batch = batch

    def run(self, work: Callable[[View], T]) -> T:
        """``work`` of the view. It may run several times, so it must change nothing that a repetition does not.

        Raises:
            Exception: it also fails without any row's rules, or no row's rules are to blame.
        """
        try:
            return work(self.view)
        except Exception:
            if self._batch is None:
                raise
            found = self._search(work, self._batch)
            if not found:
                raise
        self.errors |= found
        self.view = self._batch.view(self.view.kv_size, idle=self.errors)
        return work(self.view)

    def _search(self, work: Callable[[View], object], batch: Batch) -> dict[int, Exception]:
        """The rows whose rules alone make the work fail, found by halving; none if it fails without any rules."""
        count = len(self.view.rows)

        def fault(rows: Collection[int]) -> Exception | None:
            """The error with the rules of these rows only."""
            try:
                work(batch.view(self.view.kv_size, idle=[row for row in range(count) if row not in rows]))
            except Exception as error:
                return error
            return None

        found: dict[int, Exception] = {}
        parts = [] if fault(()) is not None else [[row for row in range(count) if row not in self.errors]]
        while parts:
            part = parts.pop()
            error = fault(part)
            if error is not None and len(part) == 1:
                found[part[0]] = error
            elif error is not None:
                half = len(part) // 2
                parts += [part[:half], part[half:]]
        return found
