"""How much to draft. A controller sees the past and the load, never what is being drawn (non-anticipation)."""

import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from foredraft.core.drafter import Plan, View
from foredraft.engine.costs import CostTable
from foredraft.engine.step import StepDone


class Controller(ABC):
    """Decides the plan of each step. Subclasses are final."""

    @property
    def learns(self) -> bool:
        """Whether the plan of a sampled row may depend on other rows, on earlier requests, or on the clock."""
        return True

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

    @property
    def learns(self) -> bool:
        return False

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

    @property
    def learns(self) -> bool:
        return False

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


class Mean:
    """The mean of what was seen lately: old observations fade, and a prior counts for ``weight`` of them."""

    FADE = 0.95

    def __init__(self, prior: float = 0.0, weight: float = 0.0) -> None:
        self._prior = prior * weight, weight
        self._sum, self.weight = self._prior

    def add(self, value: float) -> None:
        self._sum = self._sum * self.FADE + value
        self.weight = self.weight * self.FADE + 1.0

    def doubt(self) -> None:
        """Go half the way back to the prior: another text may be another matter."""
        total, weight = self._prior
        self._sum, self.weight = (self._sum + total) / 2, (self.weight + weight) / 2

    def limit(self, weight: float) -> None:
        """Let all that was seen count for so many observations at most."""
        share = min(weight / self.weight, 1.0) if self.weight else 1.0
        self._sum, self.weight = self._sum * share, self.weight * share

    @property
    def value(self) -> float:
        """0 where there is neither an observation nor a prior."""
        return self._sum / self.weight if self.weight else 0.0


class Rest:
    """Steps without drafts, while these do not pay; a few steps try them again, at growing intervals."""

    FIRST, LONGEST = 8, 64  # steps of the first rest, and of a rest at most
    TRIAL = 3  # steps of a trial

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Let the next rest be a first one."""
        self._length, self._gone = self.FIRST, 0

    def hurry(self) -> None:
        """Another text may be another matter: let the next trial be soon, yet not while it may be a short one."""
        self._gone = max(self._gone, self._length - self.FIRST)

    def step(self) -> int:
        """Which step of a trial this step is, from 1 on; 0 for one without drafts."""
        self._gone += 1
        trial = max(self._gone - self._length, 0)
        if trial == self.TRIAL:
            self._length, self._gone = min(2 * self._length, self.LONGEST), 0
        return trial


class Stopwatch:
    """Seconds a drafted token, by the median of late; a proposal that had to read a text first does not count."""

    TIMINGS = 15  # so many of the last times count: machines have slow moments

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=self.TIMINGS)
        self._known: set[int] = set()
        self._reading = True

    def add(self, view: View, plan: Plan, done: StepDone) -> None:
        """Look at a step."""
        if not plan.length:
            self._reading = True
            return
        deepest = max(result.depth for result in done.rows)
        if deepest and not self._reading and self._known.issuperset(view.rows):
            self._seconds.append(done.draft_seconds / deepest)
        self._known.update(view.rows)
        self._reading = False

    def release(self, row: int) -> None:
        self._known.discard(row)

    @property
    def seconds(self) -> float:
        """0 where nothing was timed yet."""
        return statistics.median(self._seconds) if self._seconds else 0.0


class CostAware(Controller):
    """The length with the best expected tokens a second, and none at all when nothing pays.

    Drafts end early, for want of a match or of confidence: c_d is the share of paths that went on to depth d once they
    had got to d - 1, and a_d the share of tokens drafted at d that were accepted once their parent was. A plan of k
    gives 1 + c_1 a_1 + c_1 a_1 c_2 a_2 + ... tokens. It costs the forward of what was really drafted, from the measured
    table, and the time that drafting it has taken lately. Where drafting is off, a few steps try it again at growing
    intervals, since the text may have changed.
    """

    PRIOR, WEIGHT = 0.75, 6.0  # what every a_d is taken for at first, and for how many observations that counts
    MARGIN = 1.02  # drafting must promise so much more than plain decoding
    LONGEST_REST = Rest.LONGEST  # steps between two trials while drafting is off, at most
    TRIAL_LENGTH = 3  # of the drafts of a trial

    def __init__(self, longest: int, costs: CostTable, confidence: float = 0.0) -> None:
        self._longest = longest
        self._costs = costs
        self._confidence = confidence
        self._goes_on = [Mean(1.0, self.WEIGHT) for _ in range(longest)]
        self._accepted = [Mean(self.PRIOR, self.WEIGHT) for _ in range(longest)]
        self._nodes = [float(k + 2) for k in range(longest)]  # nodes of a tree of depth k + 1, root included
        self._watch = Stopwatch()
        self._rest = Rest()

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        length = self.best_length(len(view.rows))
        if length:
            self._rest.begin()
        elif self._rest.step():
            length = min(self.TRIAL_LENGTH, self._longest)
        return Plan(tuple(min(length, limit) for limit in limits), self._confidence)

    def best_length(self, batch: int) -> int:
        """The best length for so many rows at what is known now; 0 when plain decoding is as good."""
        plain = self._costs(batch)
        best, best_rate = 0, self.MARGIN / plain
        draft_seconds = self._watch.seconds
        tokens, reach = 1.0, 1.0  # expected tokens, and the chance that the next depth is accepted
        ended, going, cost = 0.0, 1.0, plain  # seconds of paths that have ended, chance of those that have not
        for depth in range(self._longest):
            goes_on = self._goes_on[depth].value
            ended += going * (1 - goes_on) * cost
            going *= goes_on
            cost = self._costs(batch * self._nodes[depth]) + draft_seconds * (depth + 1)
            reach *= goes_on * self._accepted[depth].value
            tokens += reach
            if tokens / (ended + going * cost) > best_rate:
                best, best_rate = depth + 1, tokens / (ended + going * cost)
        return best

    def observe(self, view: View, plan: Plan, done: StepDone) -> None:
        self._watch.add(view, plan, done)
        if not plan.length:
            return
        for length, result in zip(plan.lengths, done.rows, strict=True):
            depth = min(result.depth, self._longest)
            if depth:
                self._nodes[depth - 1] += 0.1 * (1 + result.drafted - self._nodes[depth - 1])
            for d in range(min(length, depth + 1, self._longest)):
                self._goes_on[d].add(float(d < depth))
            for d in range(min(depth, result.accepted + 1)):
                self._accepted[d].add(float(d < result.accepted))

    def release(self, row: int) -> None:
        """With a text half of what was learned goes, and drafting that is off is tried again soon."""
        self._watch.release(row)
        for share in (*self._goes_on, *self._accepted):
            share.doubt()
        self._rest.hurry()


class Apart(Controller):
    """One controller for greedy batches and another for sampled ones: what is accepted of the one says little about
    the other. Each hears of the end of the rows that it has seen."""

    def __init__(self, greedy: Controller, sampled: Controller) -> None:
        self._greedy, self._sampled = greedy, sampled
        self._seen: dict[int, set[Controller]] = {}

    @property
    def learns(self) -> bool:
        return self._sampled.learns

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        return self._for(view).plan(view, limits)

    def observe(self, view: View, plan: Plan, done: StepDone) -> None:
        own = self._for(view)
        for row in view.rows:
            self._seen.setdefault(row, set()).add(own)
        own.observe(view, plan, done)

    def release(self, row: int) -> None:
        for controller in self._seen.get(row, ()):
            controller.release(row)
        self._seen.pop(row, None)

    def _for(self, view: View) -> Controller:
        return self._greedy if view.warp.greedy else self._sampled
