"""How much to draft. A controller sees the past and the load, never what is being drawn (non-anticipation)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from foredraft.core.drafter import Plan, View
from foredraft.engine.costs import CostTable
from foredraft.engine.step import StepDone


class Controller(ABC):
    """Decides the plan of each step. Subclasses are final."""

    @abstractmethod
    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        """The plan for the rows of ``view``; ``limits`` are the most tokens that each of them can still use."""

    @abstractmethod
    def observe(self, view: View, plan: Plan, done: StepDone) -> None:
        """What came of it."""

    @abstractmethod
    def release(self, row: int) -> None:
        """A row has ended."""


class Constant(Controller):
    """The same length always; with ``confidence``, a path ends after its first unsure token, which is kept."""

    def __init__(self, length: int, confidence: float = 0.0) -> None:
        self._length = length
        self._confidence = confidence

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        return Plan(tuple(min(self._length, limit) for limit in limits), self._confidence)

    def observe(self, view: View, plan: Plan, done: StepDone) -> None: ...

    def release(self, row: int) -> None: ...


class Heuristic(Controller):
    """transformers' schedule: two tokens more after a path that was accepted whole, one less after any other.

    Each row has a length of its own, so that a request's draws do not depend on its neighbours.
    """

    def __init__(self, length: int, confidence: float = 0.0, longest: int = 24) -> None:
        self._first = length
        self._longest = longest
        self._confidence = confidence
        self._lengths: dict[int, int] = {}

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        wanted = (self._lengths.get(row, self._first) for row in view.rows)
        return Plan(tuple(map(min, wanted, limits)), self._confidence)

    def observe(self, view: View, plan: Plan, done: StepDone) -> None:
        for row, planned, result in zip(view.rows, plan.lengths, done.rows, strict=True):
            if planned and result.depth:
                length = self._lengths.get(row, self._first)
                grown = length + 2 if result.accepted == result.depth else length - 1
                self._lengths[row] = min(max(grown, 1), self._longest)

    def release(self, row: int) -> None:
        self._lengths.pop(row, None)


class CostAware(Controller):
    """The length with the best expected tokens a second, and none at all when nothing pays.

    Expected tokens of a path of k are 1 + a_1 + a_1 a_2 + ..., with a_d the share of drafted tokens at depth d
    that were accepted once their parent was; old observations fade. Its cost is the forward of 1 + k nodes from
    the measured table plus the time that drafting k tokens has taken so far. Where drafting is off, it is tried
    again at growing intervals, since the text may have changed.
    """

    FADE = 0.97  # what an observation still counts after each later one
    PRIOR = 2.0  # weight of the assumption a_d = 0.8, in observations
    MARGIN = 1.03  # drafting must promise so much more than plain decoding
    FIRST_REST, LONGEST_REST = 8, 128  # steps between two trials while drafting is off

    def __init__(self, longest: int, measure: Callable[[], CostTable], confidence: float = 0.0) -> None:
        self._longest = longest
        self._measure = measure
        self._table: CostTable | None = None  # measured when it is first needed
        self._confidence = confidence
        self._hits = [0.8 * self.PRIOR] * longest
        self._tries = [self.PRIOR] * longest
        self._nodes = [float(k + 2) for k in range(longest)]  # nodes of a tree of depth k + 1, root included
        self._draft_seconds = 0.0  # a planned token
        self._rest = self.FIRST_REST
        self._idle = 0

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        length = self.best_length(len(view.rows))
        if length == 0:
            self._idle += 1
            if self._idle >= self._rest:
                self._idle, self._rest = 0, min(2 * self._rest, self.LONGEST_REST)
                length = min(2, self._longest)
        else:
            self._idle, self._rest = 0, self.FIRST_REST
        return Plan(tuple(min(length, limit) for limit in limits), self._confidence)

    def _costs(self, rows: int | float) -> float:
        if self._table is None:
            self._table = self._measure()
        return self._table(rows)

    def best_length(self, batch: int) -> int:
        """The best length for so many rows at what is known now; 0 when plain decoding is as good."""
        best, best_rate = 0, self.MARGIN / self._costs(batch)
        reach, tokens = 1.0, 1.0
        for depth in range(self._longest):
            reach *= self._hits[depth] / self._tries[depth]
            tokens += reach
            seconds = self._costs(batch * self._nodes[depth]) + self._draft_seconds * (depth + 1)
            if tokens / seconds > best_rate:
                best, best_rate = depth + 1, tokens / seconds
        return best

    def observe(self, view: View, plan: Plan, done: StepDone) -> None:
        if not plan.length:
            return
        fade = 0.1 if self._draft_seconds else 1.0
        self._draft_seconds += fade * (done.draft_seconds / plan.length - self._draft_seconds)
        for result in done.rows:
            if result.depth:
                self._nodes[result.depth - 1] += 0.1 * (1 + result.drafted - self._nodes[result.depth - 1])
            for depth in range(min(result.depth, self._longest, result.accepted + 1)):
                self._tries[depth] = self._tries[depth] * self.FADE + 1.0
                self._hits[depth] = self._hits[depth] * self.FADE + (depth < result.accepted)

    def release(self, row: int) -> None: ...


class Auto(Controller):
    """Cost-aware where the text cannot depend on it, constant elsewhere.

    What a greedy row says, or one whose drafts are picked, is the same whatever is drafted. A sampled row whose
    drafts are drawn from q says something else for each length, with the same law; timing decides lengths in
    ``CostAware``, so there the length stays constant and a seed gives the same text every time.
    """

    def __init__(self, constant: Controller, cost_aware: Controller, picked: bool) -> None:
        self._constant = constant
        self._cost_aware = cost_aware
        self._picked = picked

    def _for(self, view: View) -> Controller:
        return self._cost_aware if self._picked or view.warp.greedy else self._constant

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        return self._for(view).plan(view, limits)

    def observe(self, view: View, plan: Plan, done: StepDone) -> None:
        self._for(view).observe(view, plan, done)

    def release(self, row: int) -> None:
        self._constant.release(row)
        self._cost_aware.release(row)
