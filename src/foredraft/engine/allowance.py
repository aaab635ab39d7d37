"""What drafting may lose: other controllers' plans are carried out only while they have not cost too much."""

import statistics
from collections import deque
from collections.abc import Sequence
from typing import final

from foredraft.core.drafter import Plan, View
from foredraft.engine.control import Controller
from foredraft.engine.costs import CostTable
from foredraft.engine.step import StepDone


@final
class Allowance(Controller):
    """Another controller's plans, as long as all drafts together have not lost more than a small share of the time.

    Whatever a controller believes, and however it finds that out, each trial of a drafter that does not pay costs
    something: the draft, the wider forward, a long prompt that a small model reads first. Here it is booked. A step's
    loss is the seconds that it took beyond those in which plain decoding says as many tokens, less ``SHARE`` of them,
    which every step allows, also one without drafts. Where the sum gets above zero, nothing is drafted until there is
    as much as the last trial has lost; then there is another, which is not broken off: its first step may be the one
    that reads. What drafting has won is its credit for bad times, up to some plain steps' time.
    """

    SHARE = 0.02  # of all time may be lost
    FIRST, CREDIT = 32.0, 16.0  # plain steps' time that may be lost beyond it: at first, and of what was won
    STEPS = 3  # of a trial at least
    CHEAP, DEAR = 0.5, 8.0  # plain steps' time that is saved for the next trial, at least and at most
    TIMINGS = 15  # so many of the last plain steps count, by their median: machines have slow moments

    def __init__(self, inner: Controller, costs: CostTable) -> None:
        self._inner = inner
        self._costs = costs
        self._plain: dict[int, deque[float]] = {}  # seconds of plain steps, by about how many rows they had
        self._debt = -self.FIRST * costs(1)
        self._saving = False
        self._drafted = 0  # steps in a row that drafted
        self._trial = 0.0  # seconds that these have lost

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        batch = len(view.rows)
        if self._saving:
            plain = self._plain_seconds(batch)
            self._saving = self._debt > -min(max(self._trial, self.CHEAP * plain), self.DEAR * plain)
        elif self._debt > 0 and not 0 < self._drafted < self.STEPS:
            self._saving = True
        return Plan((0,) * batch) if self._saving else self._inner.plan(view, limits)

    def observe(self, view: View, plan: Plan, done: StepDone) -> None:
        batch, seconds = len(view.rows), done.draft_seconds + done.verify_seconds
        if not plan.length:
            self._plain.setdefault(batch.bit_length(), deque(maxlen=self.TIMINGS)).append(seconds)
        plain, lost = self._plain_seconds(batch), 0.0
        if plan.length:
            lost = seconds - sum(len(result.emitted) for result in done.rows) / batch * plain
            self._trial = lost + (self._trial if self._drafted else 0.0)
        self._drafted = self._drafted + 1 if plan.length else 0
        self._debt = max(self._debt + lost - self.SHARE * seconds, min(self._debt, -self.CREDIT * plain))
        self._inner.observe(view, plan, done)

    def release(self, row: int) -> None:
        self._inner.release(row)

    def _plain_seconds(self, batch: int) -> float:
        """A step of so many rows without drafts; its forward alone where there was none yet."""
        seen = self._plain.get(batch.bit_length())
        return statistics.median(seen) if seen else self._costs(batch)
