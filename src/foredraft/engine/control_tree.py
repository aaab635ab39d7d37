"""How much to draft where a drafter scores what it picks: the size of the tree by what it has brought, and its cost."""

import statistics
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import final

from foredraft.core.drafter import Plan, View
from foredraft.engine.control import Controller
from foredraft.engine.costs import CostTable
from foredraft.engine.step import SIZES, StepDone, round_up


class Mean:
    """The mean of what was seen lately: old observations fade."""

    FADE = 0.95

    def __init__(self) -> None:
        self._sum = self.weight = 0.0

    def add(self, value: float) -> None:
        self._sum = self._sum * self.FADE + value
        self.weight = self.weight * self.FADE + 1.0

    def doubt(self) -> None:
        """Let what was seen count half."""
        self._sum, self.weight = self._sum / 2, self.weight / 2

    @property
    def value(self) -> float:
        return self._sum / self.weight if self.weight else 0.0


@final
class CostAwareTree(Controller):
    """The number of nodes with the most tokens a second, and none at all where nothing pays.

    What n nodes bring is counted, not guessed: the accepted nodes whose rank by score is n or better. Numbers are
    those that forwards are run with, so shapes stay few, and a forward is filled with as many nodes as it has room
    for; now and then a step drafts all that it can, so that larger trees are known too. A forward costs what the
    measured table says, and a step so much more as steps here have lately taken. Another level must promise as many
    tokens as its time would bring otherwise. Where all this is less than plain decoding, drafting rests and is tried
    again at growing intervals.
    """

    MARGIN = 1.02  # drafting must promise so much more than plain decoding
    PLAIN, SURE = 3, 8  # steps without drafts, and with, that are seen before drafting is judged
    EXPLORE, FEW = 16, 4.0  # every so many steps, and until it was seen a few times, all that can be drafted is
    TRIAL, FIRST_REST, LONGEST_REST = 3, 8, 64
    TIMINGS = 15  # so many of the last times count, by their median: machines have slow moments

    def __init__(self, depth: int, nodes: int, costs: CostTable) -> None:
        self._depth = depth
        self._costs = costs
        self._sizes = (0, *(size - 1 for size in SIZES if 1 < size <= nodes), nodes)
        self._gains = [Mean() for _ in self._sizes[1:]]  # accepted nodes of the ranks from one size to the next
        self._goes_on = Mean()  # how often a child of an accepted node was accepted, where it had any
        self._more = {drafting: deque[float](maxlen=self.TIMINGS) for drafting in (False, True)}  # than a forward
        self._drafts = deque[float](maxlen=self.TIMINGS)  # seconds of a draft
        self._levels = deque[float](maxlen=self.TIMINGS)  # seconds of a level
        self._known: set[int] = set()
        self._steps = 0
        self._rest, self._idle = self.FIRST_REST, 0
        self._resting = False
        self._reading = True

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        batch = len(view.rows)
        if len(self._more[False]) < self.PLAIN:
            return Plan((0,) * batch)
        nodes, rate = self._best(batch)
        plain = self._plain_rate(batch)
        if self._steps >= self.SURE and rate < self.MARGIN * plain:
            self._resting = True
        length = self._depth
        if self._resting:
            self._idle += 1
            if self._idle <= self._rest:
                length = 0
            elif self._idle == self._rest + 1:
                self._doubt()
            elif self._idle == self._rest + self.TRIAL:
                self._rest, self._idle = min(2 * self._rest, self.LONGEST_REST), 0
        if self._gains[-1].weight < self.FEW or self._steps % self.EXPLORE == self.EXPLORE - 1:
            nodes = self._sizes[-1]
        level = statistics.median(self._levels) if self._levels else 0.0
        worth = level * max(rate, plain) / max(self._goes_on.value, 0.1)  # parents promise so much of their own chance
        lengths = tuple(min(length, limit) for limit in limits)
        return Plan(lengths, nodes=nodes, level_worth=min(worth, 0.9 * batch))

    def observe(self, view: View, plan: Plan, done: StepDone) -> None:
        batch, drafting = len(view.rows), plan.length > 0
        rows = batch * round_up(1 + max(result.drafted for result in done.rows))
        self._more[drafting].append(done.verify_seconds - self._costs(rows))
        if not drafting:
            self._reading = True
            return
        deepest = max(result.depth for result in done.rows)
        fresh = self._reading or not self._known.issuperset(view.rows)  # it has read a text first
        self._known.update(view.rows)
        self._reading = False
        if fresh or not deepest:
            return
        self._drafts.append(done.draft_seconds)
        self._levels.append(done.draft_seconds / deepest)
        drafted = plan.nodes or self._sizes[-1]
        for result in done.rows:
            for depth in range(min(result.accepted + 1, result.depth)):
                self._goes_on.add(float(depth < result.accepted))
            for gain, (fewer, more) in zip(self._gains, pairwise(self._sizes), strict=True):
                if result.depth and more <= drafted:
                    gain.add(float(sum(fewer < rank <= more for rank in result.ranks)))
        self._steps += 1
        if self._resting and self._best(batch)[1] > self.MARGIN * self._plain_rate(batch):
            self._resting, self._rest, self._idle = False, self.FIRST_REST, 0

    def release(self, row: int) -> None:
        """Another text may be another matter: what was seen counts half, and drafting is tried again at once."""
        self._known.discard(row)
        self._doubt()
        self._steps, self._resting, self._rest, self._idle = 0, False, self.FIRST_REST, 0

    def _doubt(self) -> None:
        for gain in self._gains:
            gain.doubt()
        self._drafts.clear()
        self._levels.clear()

    def _overhead(self, drafting: bool) -> float:
        """Seconds that a step takes over those of its forward; less than none where the machine got faster."""
        seen = self._more[drafting] or self._more[False]
        return max(statistics.median(seen), -self._costs(1) / 2)

    def _plain_rate(self, batch: int) -> float:
        """Tokens a second without drafts."""
        return batch / (self._costs(batch) + self._overhead(drafting=False))

    def _best(self, batch: int) -> tuple[int, float]:
        """The best number of nodes, and what it brings, in tokens a second."""
        drafting = self._overhead(drafting=True) + (statistics.median(self._drafts) if self._drafts else 0.0)
        tokens, best, most = 1.0, self._sizes[-1], 0.0
        for gain, nodes in zip(self._gains, self._sizes[1:], strict=True):
            tokens += gain.value
            rate = batch * tokens / max(self._costs(batch * (1 + nodes)) + drafting, self._costs(1) / 2)
            if rate > most:
                best, most = nodes, rate
        return best, most
