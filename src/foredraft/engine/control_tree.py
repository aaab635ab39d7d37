"""How much to draft where a drafter scores what it picks: the size of the tree by what it has brought, and its cost."""

import statistics
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import final

from foredraft.core.drafter import Plan, View
from foredraft.engine.control import Controller, Mean, Rest
from foredraft.engine.costs import CostTable
from foredraft.engine.step import SIZES, RowStep, StepDone, round_up


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
    AGAIN = 128  # after so many steps with drafts one without is timed anew
    EXPLORE, FEW = 16, 4.0  # every so many steps, and until it was seen a few times, all that can be drafted is
    OLD = 2.0  # all that was seen before a trial counts as so many of its steps
    TIMINGS = 15  # so many of the last times count, by their median: machines have slow moments

    def __init__(self, depth: int, nodes: int, costs: CostTable) -> None:
        self._depth = depth
        self._costs = costs
        self._sizes = (0, *(size - 1 for size in SIZES if 1 < size <= nodes), nodes)
        self._gains = [Mean() for _ in self._sizes[1:]]  # accepted nodes of the ranks from one size to the next
        self._goes_on = Mean()  # how often one of the children of an accepted node was accepted
        self._more: dict[tuple[bool, int], deque[float]] = {}  # seconds of steps over their forwards; see ``_key``
        self._drafts = deque[float](maxlen=self.TIMINGS)  # seconds of a draft
        self._levels = deque[float](maxlen=self.TIMINGS)  # seconds of a level
        self._known: set[int] = set()
        self._steps = self._since_plain = 0
        self._rest, self._resting = Rest(), False
        self._reading = True

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        batch, active = len(view.rows), sum(limit > 0 for limit in limits)
        if not active or len(self._more.get(_key(False, batch), ())) < self.PLAIN or self._since_plain >= self.AGAIN:
            return Plan((0,) * batch)
        if self._resting and self._at_rest():
            return Plan((0,) * batch)
        nodes, rate = self._best(batch, active)
        plain = self._plain_rate(batch)
        if not self._resting and self._steps >= self.SURE and rate < self.MARGIN * plain:
            self._resting = True
            if self._at_rest():
                return Plan((0,) * batch)
        lengths = tuple(min(self._depth, limit) for limit in limits)
        curious = self._gains[-1].weight < self.FEW or self._steps % self.EXPLORE == self.EXPLORE - 1
        if curious and not self._resting:  # a trial is to be cheap: it drafts what seemed best
            return Plan(lengths, nodes=self._sizes[-1])
        level = statistics.median(self._levels) if self._levels else 0.0
        worth = level * max(rate, plain) / max(self._goes_on.value, 0.1)  # parents promise so much of their own chance
        return Plan(lengths, nodes=nodes, level_worth=min(worth, 0.9 * active))

    def observe(self, view: View, plan: Plan, done: StepDone) -> None:
        batch, drafting = len(view.rows), plan.length > 0
        rows = batch * round_up(1 + max(result.drafted for result in done.rows))
        times = self._more.setdefault(_key(drafting, batch), deque(maxlen=self.TIMINGS))
        times.append(done.verify_seconds - self._costs(rows))
        if not drafting:
            self._reading, self._since_plain = True, 0
            return
        fresh = self._reading or not self._known.issuperset(view.rows)  # it has read a text first
        self._known.update(view.rows)
        self._reading = False
        self._since_plain += 1
        active = [result for length, result in zip(plan.lengths, done.rows, strict=True) if length]
        if done.levels:
            self._count(active, plan.nodes or self._sizes[-1])
        if fresh or not done.levels:
            return
        self._drafts.append(done.draft_seconds)
        self._levels.append(done.draft_seconds / done.levels)
        if self._resting and self._best(batch, len(active))[1] > self.MARGIN * self._plain_rate(batch):
            self._resting = False
            self._rest.begin()

    def release(self, row: int) -> None:
        """After the last text comes another matter: what was seen counts half, and drafting is tried again soon."""
        self._known.discard(row)
        if not self._known and self._resting:
            self._rest.hurry()
        elif not self._known:
            self._doubt()
            self._steps = min(self._steps, self.SURE - Rest.TRIAL)

    def _at_rest(self) -> bool:
        """Whether this step of a rest goes without drafts; a trial's does not."""
        trial = self._rest.step()
        if trial == 1:
            for gain in self._gains:
                gain.limit(self.OLD)
        return not trial

    def _count(self, results: Sequence[RowStep], drafted: int) -> None:
        """What a step has brought a row, by the ranks of the nodes; of those that could not be drafted nothing is
        known."""
        for gain, (fewer, more) in zip(self._gains, pairwise(self._sizes), strict=True):
            if more <= drafted:
                gain.add(statistics.fmean(sum(fewer < rank <= more for rank in each.ranks) for each in results))
        accepted, refused = sum(each.accepted for each in results), sum(each.refused for each in results)
        if accepted + refused:
            self._goes_on.add(accepted / (accepted + refused))
        self._steps += 1

    def _doubt(self) -> None:
        for gain in self._gains:
            gain.doubt()
        drafting = (times for (drafts, _), times in self._more.items() if drafts)
        for times in (self._drafts, self._levels, *drafting):
            while len(times) > self.TIMINGS // 3:
                times.popleft()

    def _overhead(self, drafting: bool, batch: int) -> float:
        """Seconds that a step takes over those of its forward; less than none where the machine got faster."""
        seen = self._more.get(_key(drafting, batch)) or self._more.get(_key(False, batch))
        return max(statistics.median(seen), -self._costs(1) / 2) if seen else 0.0

    def _plain_rate(self, batch: int) -> float:
        """Tokens a second without drafts."""
        return batch / (self._costs(batch) + self._overhead(False, batch))

    def _best(self, batch: int, active: int) -> tuple[int, float]:
        """The best number of nodes, and what it brings, in tokens a second; ``active`` rows of the batch draft."""
        drafting = self._overhead(True, batch) + (statistics.median(self._drafts) if self._drafts else 0.0)
        tokens, best, most = float(batch), self._sizes[-1], 0.0
        for gain, nodes in zip(self._gains, self._sizes[1:], strict=True):
            tokens += active * gain.value
            rate = tokens / max(self._costs(batch * (1 + nodes)) + drafting, self._costs(1) / 2)
            if rate > most:
                best, most = nodes, rate
        return best, most


def _key(drafting: bool, batch: int) -> tuple[bool, int]:
    """Batches of about the same size share what is known of their steps."""
    return drafting, batch.bit_length()
