"""Records the target's laws while it serves."""

from typing import final

from jaxtyping import Int
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.drafter import Fused, Needs, RowState, StepOut, View
from foredraft.drafters.online.samples import ReplayBuffer, RowRecord, StepRecord
from foredraft.drafters.online.trainer import Options

_UNREAD = 32
"""Most steps without a draft that are recorded later; beyond, a step reads them back and waits for the device."""


@final
class RecordedRows(RowState):
    """Records the target's laws of rows in flight, and makes samples of them.

    ``buffer``: the samples. ``requests``: how many have ended since this was last set to 0.

    Args:
        trained: what the drafter needs that learns from them.
    """

    def __init__(self, trained: Needs, options: Options) -> None:
        self.needs = Needs(trained.hidden_layers, learns=True, shares_text=True)
        self.buffer = ReplayBuffer(options.megabytes * 2**20)
        self.requests = 0
        self._options = options
        self._rows: dict[int, RowRecord] = {}
        self._steps: list[StepRecord] = []  # the last ones, still on the target's device

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Fused) -> None:
        self._rows[row] = RowRecord.started(prompt, hidden, self._options.context // 2, self._options.rejected)

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        if len(self._steps) >= _UNREAD:
            self.read_back()
        self._steps.append(StepRecord.of(view, draft, verdict, out, self._options.top_laws))

    def release(self, row: int) -> None:
        self.read_back()
        record = self._rows.pop(row, None)
        if record is not None:
            self._store(record)
            self.requests += record.rooted

    def read_back(self) -> None:
        """Add the last steps to the rows' records. Between steps this does not wait: the device has finished them."""
        unread, self._steps = self._steps, []
        for step in (each.read_back() for each in unread):
            for b, row in enumerate(step.rows):
                record = self._rows[row]
                record.add(step, b)
                if len(record.tokens) >= self._options.context:
                    self._store(record)
                    self._rows[row] = record.rest(self._options.context // 2)

    def _store(self, record: RowRecord) -> None:
        """Add a completed sample to the buffer, unless it is empty."""
        sample = record.sample()
        if sample is not None:
            self.buffer.add(sample)
