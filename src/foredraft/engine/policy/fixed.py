"""Policies that do not measure time."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, final

from foredraft.core.drafter import Plan, View
from foredraft.engine.policy.base import Policy
from foredraft.engine.step import StepResult


@final
class Constant(Policy):
    """Always the same length (Leviathan et al., arXiv:2211.17192).

    Args:
        length: of the longest path.
        confidence: a path ends after its first token with a draft probability below this; that token is kept.
        nodes: for drafters that score their trees, the number of drafted nodes; 0 is the most they can draft.
    """

    ahead = True

    def __init__(self, length: int, confidence: float = 0.0, nodes: int = 0) -> None:
        self._length = length
        self._confidence = confidence
        self._nodes = nodes

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        lengths = tuple(min(self._length, limit) for limit in limits)
        return Plan(lengths, self._confidence, self._nodes)


@final
class Heuristic(Policy):
    """transformers' schedule: two tokens more after a fully accepted path, one less after any other.

    Each row has its own length.
    """

    def __init__(self, length: int, confidence: float = 0.0, longest: int = 24) -> None:
        self._first = length
        self._longest = longest
        self._confidence = confidence
        self._lengths: dict[int, int] = {}

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        lengths = (self._lengths.get(row, self._first) for row in view.rows)
        return Plan(tuple(map(min, lengths, limits)), self._confidence)

    def observe(self, view: View, plan: Plan, step: StepResult) -> None:
        for row, planned, result in zip(view.rows, plan.lengths, step.rows, strict=True):
            if planned and result.depth:
                length = self._lengths.get(row, self._first)
                grown = length + 2 if result.accepted == result.depth else length - 1
                self._lengths[row] = min(max(grown, 1), self._longest)

    def release(self, row: int) -> None:
        self._lengths.pop(row, None)


@final
class Calibrated(Policy):
    """A constant length with a confidence threshold fitted to recent acceptances, as in transformers.

    A drafted token with at least the threshold's probability is predicted to be accepted. The threshold minimises
    ``false positive rate + 3 * false negative rate`` over the latest verified tokens, up to the first rejected one of
    each chain. A token below the threshold is still drafted, so its result is known too.

    Args:
        length: of the longest chain.
        confidence: the threshold until both an acceptance and a rejection were seen.
    """

    KEPT = 128  # number of latest verified tokens used
    MISSES = 3.0  # weight of the false negative rate

    def __init__(self, length: int, confidence: float) -> None:
        self._length = length
        self._confidence = confidence
        self._seen: deque[tuple[float, bool]] = deque(maxlen=self.KEPT)  # a token's probability; whether accepted

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        return Plan(tuple(min(self._length, limit) for limit in limits), self._confidence)

    def observe(self, view: View, plan: Plan, step: StepResult) -> None:
        for result in step.rows:
            above = 0.0  # the parent's score: scores are of paths
            scores = (result.nodes.scores or ())[1 : 1 + min(result.accepted + 1, result.drafted)]
            for index, score in enumerate(scores):
                self._seen.append((math.exp(min(score - above, 0.0)), index < result.accepted))
                above = score
        self._confidence = best_threshold(self._seen, self.MISSES) or self._confidence


def best_threshold(seen: Sequence[tuple[float, bool]], misses: float) -> float:
    """The threshold with the least ``false positive rate + misses * false negative rate``; the highest of ties.

    Args:
        seen: the draft probability of each token and whether it was accepted; tokens at or above the threshold are
            predicted to be accepted.

    Returns:
        one of the probabilities; 0 if all tokens had the same result.
    """
    accepted = sum(right for _, right in seen)
    rejected = len(seen) - accepted
    if not accepted or not rejected:
        return 0.0
    best, least = 0.0, math.inf
    missed, wrong = accepted, 0
    ordered = sorted(seen, reverse=True)
    for index, (chance, right) in enumerate(ordered):
        missed, wrong = missed - right, wrong + (not right)
        cost = wrong / rejected + misses * missed / accepted
        if cost < least and (index + 1 == len(ordered) or ordered[index + 1][0] < chance):
            best, least = chance, cost
    return best


@final
class OffFrom(Policy):
    """The inner policy's plans while fewer than ``rows`` rows are in flight; no drafts with more."""

    def __init__(self, inner: Policy, rows: int) -> None:
        self._inner = inner
        self._rows = rows
        self.ahead = inner.ahead

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        if len(view.rows) >= self._rows:
            return Plan((0,) * len(view.rows))
        return self._inner.plan(view, limits)

    def observe(self, view: View, plan: Plan, step: StepResult) -> None:
        self._inner.observe(view, plan, step)

    def release(self, row: int) -> None:
        self._inner.release(row)

    def state(self) -> dict[str, Any]:
        return self._inner.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._inner.restore(state)
