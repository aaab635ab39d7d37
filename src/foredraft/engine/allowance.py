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
    as much as the last trial has lost; then there is another. A trial is not broken off, since its first step may be
    the one that reads, nor are drafts that win lately, whatever it took to begin. What drafting has won is its credit
    for bad times, up to some plain steps' time, and so is what it may owe: a machine that was asleep for a minute says
    nothing about drafts. The very first draft is not booked, in which kernels are made and some drafters measure what
    they need to know. What plain decoding takes is timed now and then.
    """

    SHARE = 0.015  # of all time may be lost
    FIRST, CREDIT = 20.0, 16.0  # plain steps' time that may be lost beyond it: at first, and of what was won
    DEBT = 32.0  # plain steps' time that is owed at most
    STEPS = 3  # of a trial at least
    CHEAP, DEAR = 0.5, 8.0  # plain steps' time that is saved for the next trial, at least and at most
    PLAIN, AGAIN = 3, 128  # plain steps that are seen before anything is drafted, and one after so many with drafts
    TIMINGS = 15  # so many of the last plain steps count, by their median: machines have slow moments
    LATELY = 8  # drafting steps that show whether drafts win

    def __init__(self, inner: Controller, costs: CostTable) -> None:
        self._inner = inner
        self._costs = costs
        self._plain: dict[int, deque[float]] = {}  # plain steps' time over their forwards', by about how many rows
        self._debt: float | None = None  # seconds; None before the first step
        self._saving = False
        self._drafted = self._since_plain = 0  # steps in a row that drafted, and those since plain decoding was timed
        self._trial = 0.0  # seconds that the steps in a row have lost
        self._lately = deque[float](maxlen=self.LATELY)  # seconds lost by steps that had no text to read first
        self._known: set[int] = set()
        self._begun = False  # whether there was a draft

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        batch = len(view.rows)
        nothing = Plan((0,) * batch)
        if len(self._plain.get(batch.bit_length(), ())) < self.PLAIN or self._since_plain >= self.AGAIN:
            return nothing
        plain, debt = self._plain_seconds(batch), self._debt or 0.0
        if self._saving:
            self._saving = debt > -min(max(self._trial, self.CHEAP * plain), self.DEAR * plain)
        elif debt > 0 and not 0 < self._drafted < self.STEPS:
            self._saving = sum(self._lately) > 0 or not self._known.issuperset(view.rows)
        return nothing if self._saving else self._inner.plan(view, limits)

    def observe(self, view: View, plan: Plan, done: StepDone) -> None:
        batch, seconds = len(view.rows), done.draft_seconds + done.verify_seconds
        if not plan.length:
            ratios = self._plain.setdefault(batch.bit_length(), deque(maxlen=self.TIMINGS))
            ratios.append(seconds / self._costs(batch))
        plain = self._plain_seconds(batch)
        debt = -self.FIRST * plain if self._debt is None else self._debt
        lost = self._drafting(view, done, plain) if plan.length and self._begun else 0.0
        self._begun = self._begun or plan.length > 0
        self._drafted = self._drafted + 1 if plan.length else 0
        self._since_plain = self._since_plain + 1 if plan.length else 0
        debt = max(debt + lost - self.SHARE * seconds, min(debt, -self.CREDIT * plain))
        self._debt = min(debt, self.DEBT * plain)
        self._inner.observe(view, plan, done)

    def release(self, row: int) -> None:
        self._known.discard(row)
        self._inner.release(row)

    def _drafting(self, view: View, done: StepDone, plain: float) -> float:
        """Seconds that a step with drafts has lost."""
        tokens = sum(len(result.emitted) for result in done.rows) / len(view.rows)
        lost = done.draft_seconds + done.verify_seconds - tokens * plain
        self._trial = lost + (self._trial if self._drafted else 0.0)
        if self._known.issuperset(view.rows) and self._drafted:
            self._lately.append(lost)
        self._known.update(view.rows)
        return lost

    def _plain_seconds(self, batch: int) -> float:
        """A step of so many rows without drafts; its forward alone where there was none yet."""
        seen = self._plain.get(batch.bit_length())
        return (statistics.median(seen) if seen else 1.0) * self._costs(batch)
