"""Keeps the partial KV cache in sync and decides when its tokens are selected again."""

from collections import deque
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.drafter import Fused, RowState, StepOut, View
from foredraft.model.partial.model import PartialLM

RECENT = 4
"""Number of latest drafts used to decide whether to select again."""


@dataclass(slots=True)
class _Record:
    """Accepted and drafted tokens of a row: in the latest drafts since the last selection, and in total."""

    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=RECENT))
    accepted: int = 0
    drafted: int = 0

    def add(self, accepted: int, drafted: int) -> None:
        if drafted:
            self.recent.append((accepted, drafted))
            self.accepted += accepted
            self.drafted += drafted

    def has_fallen(self, share: float) -> bool:
        """True if the acceptance rate of the latest drafts is below ``share`` times the row's mean."""
        if len(self.recent) < RECENT:
            return False
        accepted, drafted = (sum(column) for column in zip(*self.recent, strict=True))
        return accepted * self.drafted < share * self.accepted * drafted


class PartialCacheSync(RowState):
    """Keeps a ``PartialLM`` in sync with the rows.

    A row's tokens are selected again when there is no more room after them, or when the acceptance rate of its last
    four drafts since the last selection is below ``refresh`` times the row's mean. Both depend on past steps only, so
    the selection does not anticipate what will be drawn.

    Args:
        model: the target over a part of its cache.
        ahead: the most slots after a root that a draft writes, padding included.
        refresh: the share; 0 selects again only for lack of room.
    """

    def __init__(self, model: PartialLM, ahead: int, refresh: float) -> None:
        self.model = model
        self._ahead = ahead
        self._refresh = refresh
        self._records: dict[int, _Record] = {}
        self._drafting_rows: tuple[int, ...] | None = None  # rows of this step's draft
        self._pending: tuple[list[_Record], Int[Tensor, "B 2"]] | None = None  # results not yet read back

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Fused) -> None:
        self._records[row] = _Record()

    def sync(self, view: View) -> None:
        """Copy what was committed since; the target's cache holds everything except the roots."""
        if self._pending is not None:
            records, table = self._pending
            for record, (accepted, drafted) in zip(records, table.tolist(), strict=True):
                record.add(accepted, drafted)
        self._drafting_rows, self._pending = view.rows, None
        fallen = {row for row in view.rows if self._records[row].has_fallen(self._refresh)}
        for row in self.model.sync(view.rows, view.host_lengths, self._ahead, fallen):
            self._records[row].recent.clear()

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        """Record the verdict, unless the draft was not made here. Nothing is read back before the next draft."""
        drafting, self._drafting_rows = self._drafting_rows, None
        if drafting != view.rows:
            return
        drafted, accepted = draft.tree.valid.sum(1) - 1, verdict.accepted()
        if draft.copied is not None:
            drafted, accepted = drafted * ~draft.copied, accepted * ~draft.copied
        records = [self._records[row] for row in view.rows]  # row numbers may be reused before the read-back
        self._pending = records, torch.stack([accepted, drafted], 1)
        self.model.finalize(accepted)

    def rewind(self, row: int, length: int) -> None:
        self.model.rewind(row, length)

    def release(self, row: int) -> None:
        """The cache is cleared with the last row."""
        self._records.pop(row, None)
        self.model.forget(row)
        if not self._records:
            self._drafting_rows = self._pending = None
            self.model.clear()
