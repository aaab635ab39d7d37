"""How much to draft, learned as texts go on: a threshold by what it would have brought, a length for a batch."""

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, final

from foredraft.core.drafter import Plan, View
from foredraft.core.theory import expected_tokens
from foredraft.engine.control import Controller, Mean, Rest, Stopwatch
from foredraft.engine.costs import CostTable
from foredraft.engine.step import StepDone

MARGIN = 1.02
"""Drafting must promise so much more than plain decoding."""


class Trace(NamedTuple):
    """A chain that was drafted as far as it could be: each token's probability under the draft, given its parent, and
    how many were accepted."""

    confidences: tuple[float, ...]
    accepted: int

    def length(self, threshold: float) -> int:
        """How long it had been, had it ended after its first token below the threshold."""
        unsure = (i for i, confidence in enumerate(self.confidences, start=1) if confidence < threshold)
        return next(unsure, len(self.confidences))


class Choice(NamedTuple):
    """A threshold, and the tokens a second that it would have brought."""

    threshold: float
    rate: float


def replay(
    traces: Sequence[Trace], thresholds: Sequence[float], costs: CostTable, draft_seconds: float, batch: int = 1
) -> Choice:
    """The threshold that would have brought the most tokens a second over these chains; of equals the highest.

    Args:
        costs: of a forward, by its rows.
        draft_seconds: a drafted token takes so long.
        batch: so many rows share a forward, each with a chain of the same length.
    """
    best = Choice(math.inf, 0.0)
    for threshold in sorted(thresholds):
        lengths = [trace.length(threshold) for trace in traces]
        tokens = sum(1 + min(trace.accepted, length) for trace, length in zip(traces, lengths, strict=True))
        seconds = sum(costs(batch * (1 + length)) + draft_seconds * length for length in lengths)
        rate = batch * tokens / seconds if seconds > 0 else 0.0
        if rate >= best.rate:
            best = Choice(threshold, rate)
    return best


@final
class Calibrated(Controller):
    """The confidence below which a chain ends, chosen by what each would have brought lately; none where nothing pays.

    Now and then a chain is drafted as far as it can be, and what became of it is kept; the threshold is the one that
    would have brought the most tokens a second over these chains, by the measured costs. So it needs no training and
    follows the text, as DISCO (arXiv:2405.04304) and transformers' adaptive threshold do; the token below the threshold
    is kept, hence nothing is anticipated.
    """

    GRID = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    EXPLORE, FEW, KEPT = 8, 4, 64  # every so many steps a whole chain, and at first so many; so many are kept
    _NO_END = 1e-30  # a threshold that no token is below: asked for, so that tokens are scored

    def __init__(self, longest: int, costs: CostTable) -> None:
        self._longest = longest
        self._costs = costs
        self._traces: deque[Trace] = deque(maxlen=self.KEPT)
        self._watch = Stopwatch()
        self._rest = Rest()
        self._steps = 0

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        batch = len(view.rows)
        lengths = tuple(min(self._longest, limit) for limit in limits)
        if len(self._traces) < self.FEW:
            return Plan(lengths, self._NO_END)
        best = replay(self._traces, self.GRID, self._costs, self._watch.seconds, batch)
        if best.rate < MARGIN * batch / self._costs(batch):
            return Plan(lengths, self._NO_END) if self._rest.step() else Plan((0,) * batch)
        self._rest.begin()
        self._steps += 1
        return Plan(lengths, best.threshold if self._steps % self.EXPLORE else self._NO_END)

    def observe(self, view: View, plan: Plan, done: StepDone) -> None:
        self._watch.add(view, plan, done)
        if plan.confidence != self._NO_END:
            return
        for length, result in zip(plan.lengths, done.rows, strict=True):
            if length and result.scores:
                before = (0.0, *result.scores[:-1])
                own = (math.exp(after - above) for after, above in zip(result.scores, before, strict=True))
                self._traces.append(Trace(tuple(own), result.accepted))

    def release(self, row: int) -> None:
        self._watch.release(row)
        self._rest.hurry()


@final
class Goodput(Controller):
    """One length for the batch, with the most accepted tokens a second of all its rows (SmartSpec, arXiv:2406.14066).

    Each row has an acceptance rate of its own, which fades and begins with that of all rows; a row whose rate is a and
    whose text has room for l more tokens brings 1 + a + a^2 + ... of a draft. Drafts of a batch are padded to the
    longest, so a shorter one for some rows would save nothing. Where no length pays, none is drafted, and tried again.
    With ``confidence``, a path ends after its first unsure token, which is kept.
    """

    PRIOR, WEIGHT = 0.75, 6.0

    def __init__(self, longest: int, costs: CostTable, confidence: float = 0.0) -> None:
        self._longest = longest
        self._confidence = confidence
        self._costs = costs
        self._all = Mean(self.PRIOR, self.WEIGHT)
        self._own: dict[int, Mean] = {}
        self._watch = Stopwatch()
        self._rest = Rest()

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        rates = [self._own[row].value if row in self._own else self._all.value for row in view.rows]
        length = best_batch_length(rates, limits, self._longest, self._costs, self._watch.seconds)
        if length:
            self._rest.begin()
        elif self._rest.step():
            length = min(3, self._longest)
        return Plan(tuple(min(length, limit) for limit in limits), self._confidence)

    def observe(self, view: View, plan: Plan, done: StepDone) -> None:
        self._watch.add(view, plan, done)
        for row, result in zip(view.rows, done.rows, strict=True):
            own = self._own.setdefault(row, Mean(self._all.value, self.WEIGHT))
            for depth in range(min(result.depth, result.accepted + 1)):
                own.add(float(depth < result.accepted))
                self._all.add(float(depth < result.accepted))

    def release(self, row: int) -> None:
        self._own.pop(row, None)
        self._watch.release(row)
        self._rest.hurry()


def best_batch_length(
    rates: Sequence[float], limits: Sequence[int], longest: int, costs: CostTable, draft_seconds: float
) -> int:
    """The length with the most expected tokens a second of all rows; 0 where that is plain decoding.

    Args:
        rates: each row's acceptance rate.
        limits: the most drafted tokens that each row has room for.
    """
    batch = len(rates)
    best, most = 0, MARGIN * batch / costs(batch)
    for length in range(1, longest + 1):
        tokens = sum(expected_tokens(min(a, 1.0), min(length, limit)) for a, limit in zip(rates, limits, strict=True))
        rate = tokens / (costs(batch * (1 + length)) + draft_seconds * length)
        if rate > most:
            best, most = length, rate
    return best
