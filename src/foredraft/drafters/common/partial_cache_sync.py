"""The target's weights over a partial cache beside its own: when texts are taken in, and tokens chosen anew."""

from collections import deque
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.drafter import View
from foredraft.model.partial.model import PartialLM

LATELY = 4
"""Drafts by which is judged whether the chosen tokens still serve."""


@dataclass(slots=True)
class _Record:
    """Accepted and drafted tokens of a text: in its last drafts since its tokens were chosen, and in all."""

    lately: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=LATELY))
    accepted: int = 0
    drafted: int = 0

    def add(self, accepted: int, drafted: int) -> None:
        if drafted:
            self.lately.append((accepted, drafted))
            self.accepted += accepted
            self.drafted += drafted

    def has_fallen(self, share: float) -> bool:
        """Whether of the last drafts less than ``share`` of what is usual in this text was accepted."""
        if len(self.lately) < LATELY:
            return False
        accepted, drafted = (sum(column) for column in zip(*self.lately, strict=True))
        return accepted * self.drafted < share * self.accepted * drafted


class PartialCacheSync:
    """Keeps a ``PartialLM`` beside the texts, row by row.

    A row's tokens are chosen anew when there is no more room behind them, or when acceptance has fallen: when of its
    last four drafts, all since the last choice, less than ``refresh`` of the text's own mean share was accepted. All
    of that is past when a draft begins, so the choice gives nothing away.

    Args:
        model: the target over a part of its cache.
        ahead: the most slots behind a root that are written for a draft, padding included.
        refresh: the share; 0 chooses anew for want of room only.
    """

    def __init__(self, model: PartialLM, ahead: int, refresh: float) -> None:
        self.model = model
        self._ahead = ahead
        self._refresh = refresh
        self._records: dict[int, _Record] = {}
        self._asked: tuple[int, ...] | None = None  # for whom this step's draft is made here
        self._judged: tuple[list[_Record], Int[Tensor, "B 2"]] | None = None  # not yet looked at

    def admit(self, row: int) -> None:
        """A text begins."""
        self._records[row] = _Record()

    def sync(self, view: View) -> None:
        """Take in what has been committed; the target's cache holds all but the roots."""
        if self._judged is not None:
            records, table = self._judged
            for record, (accepted, drafted) in zip(records, table.tolist(), strict=True):
                record.add(accepted, drafted)
        self._asked, self._judged = view.rows, None
        fallen = {row for row in view.rows if self._records[row].has_fallen(self._refresh)}
        for row in self.model.sync(view.rows, view.extents, self._ahead, fallen):
            self._records[row].lately.clear()

    def judged(self, view: View, draft: Draft, verdict: Verdict) -> None:
        """The target has judged: what was not drafted here says nothing of the tokens that were chosen.

        Nothing is read back from the device before the next draft.
        """
        asked, self._asked = self._asked, None
        if asked != view.rows:
            return
        drafted = draft.tree.valid.sum(1) - 1
        records = [self._records[row] for row in view.rows]  # a row's number may be another's by then
        self._judged = records, torch.stack([verdict.accepted(), drafted], 1)
        self.model.finalize(verdict.accepted())

    def rewind(self, row: int, length: int) -> None:
        """Only the first so many tokens of a text stand."""
        self.model.rewind(row, length)

    def release(self, row: int) -> None:
        """Forget a text; the last one takes the cache with it."""
        self._records.pop(row, None)
        self.model.forget(row)
        if not self._records:
            self._asked = self._judged = None
            self.model.clear()
