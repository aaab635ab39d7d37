"""The policy that chooses the draft size with the most tokens per second, from timings of whole steps."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, final

from foredraft.core.drafter import Needs, Plan, View
from foredraft.engine.policy.base import Policy
from foredraft.engine.policy.estimates import Acceptance, Choice, Timings, Window, expected_gains
from foredraft.engine.step import StepDone

LENGTHS = (1, 2, 3, 4, 5, 7, 11, 15, 23, 31, 47, 63)
NODES = (1, 3, 5, 7, 11, 15, 23, 31, 47, 63)
"""Candidate sizes, up to the drafter's maximum: lengths of chains, node counts of scored trees. With the root added,
most equal a node count of CPU forwards (``step.SIZES``)."""
NEUTRAL = 0.65
"""Default prior for the acceptance rate of the first drafted token."""


@final
class Throughput(Policy):
    """Chooses the draft size, 0 included, with the most tokens per second.

    A size is a length or a number of nodes. Keeps the step times of each size, by batch size bucket and temperature
    bucket (a chain counts as the length that it reached), and the accepted tokens within each size (a large draft
    also shows what a smaller one would have yielded). Takes the best size and sometimes tries another; the interval
    between trials grows with the square of the expected loss. A budget of each bucket caps the time lost to its
    trials at ``SHARE``. A step in which the drafter first reads a prompt does not count as a timing of its size:
    its extra time is spread over the tokens of a request.

    Args:
        needs: of the drafter.
        confidence: see ``Plan``.
        prior: expected acceptance rate of the first drafted token.
    """

    ahead = True
    SHARE = 0.012  # largest share of the time lost to trials
    CREDIT, DEBT = 12.0, 32.0  # trial budget, in plain steps' time: largest, largest debt
    EVERY, GAP = 48, 0.05  # steps between trials of a size as good as the best; twice as many at a loss of ``GAP``
    NEAR = 0.15  # sizes without timings are tried first if their expected loss is below this
    LIFE = 64.0  # assumed tokens of a request until one has ended
    HOLD = 4  # steps for which the best size is kept before choosing again
    SWITCH = 0.02  # least gain for which drafting starts or stops
    TRIAL, PAUSE = 3, 8  # steps of a trial that starts or interrupts drafting; steps between trials that start it

    def __init__(self, needs: Needs, confidence: float = 0.0, prior: float = NEUTRAL) -> None:
        most = needs.max_nodes if needs.scored else needs.longest
        self._needs = needs
        self.confidence = confidence
        self._sizes = (0, *(size for size in (NODES if needs.scored else LENGTHS) if size < most), most)
        self._prior = expected_gains(self._sizes, min(max(prior, 0.05), 0.95), needs.scored)
        self._timed: dict[tuple[int, int], Timings] = {}  # by row and temperature bucket; see ``_records``
        self._accepted: dict[int, Acceptance] = {}  # by temperature
        self._chosen: list[tuple[Plan, Choice]] = []  # not observed yet; the latter may be of the next step
        self._drafted: frozenset[int] = frozenset()  # rows that drafted in the last step
        self._tokens: dict[int, int] = {}  # tokens by row in flight
        self._read: set[int] = set()  # rows whose prompt the drafter has read
        self._start, self._life = Window(), Window()  # extra seconds of a row's first draft; tokens per request

    @property
    def sizes(self) -> tuple[int, ...]:
        """The candidate sizes, 0 first."""
        return self._sizes

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        active = sum(limit > 0 for limit in limits)
        if not active:
            return Plan((0,) * len(limits))
        timed, accepted = self._records(view)
        choice = self._choose(timed, accepted, len(limits), active)
        plan = self._plan_of(choice, limits, active, timed, accepted)
        self._chosen = [*self._chosen[-1:], (plan, choice)]
        return plan

    def _plan_of(
        self, choice: Choice, limits: Sequence[int], active: int, timed: Timings, accepted: Acceptance
    ) -> Plan:
        """The plan of a choice."""
        lengths = tuple(min(self._depth(choice.index), limit) for limit in limits)
        size = self._sizes[choice.index]
        if not self._needs.scored or not size:
            return Plan(lengths, self.confidence)
        # expand a level only if its expected tokens, P(parents) * P(child accepted), beat the throughput times its cost
        worth = timed.level.value * choice.rate / max(accepted.child_rate, 0.1)
        return Plan(lengths, self.confidence, nodes=size, level_worth=min(worth, 0.9 * active))

    def observe(self, view: View, plan: Plan, done: StepDone) -> None:
        drafting = frozenset(row for row, length in zip(view.rows, plan.lengths, strict=True) if length)
        for row, result in zip(view.rows, done.rows, strict=True):
            self._tokens[row] = self._tokens.get(row, 0) + len(result.emitted)
        chosen = next((each for each in self._chosen if each[0] == plan), None)
        if chosen is not None:
            self._chosen.remove(chosen)
            choice = chosen[1]
            timed, accepted = self._records(view)
            if not any(result.copied for result in done.rows):  # copies have their own width
                self._time(timed, choice, plan, done, drafting)
            if drafting:
                self._count(accepted, choice.index, plan, done)
        self._drafted = drafting
        self._read |= drafting

    def release(self, row: int) -> None:
        self._read.discard(row)
        self._drafted -= {row}
        if row in self._tokens:
            self._life.add(float(self._tokens.pop(row)))

    def state(self) -> dict[str, Any]:
        """The learned timings and acceptances, as JSON types."""
        return {
            "sizes": list(self._sizes),
            "seconds": {f"{rows}/{heat}": each.state() for (rows, heat), each in self._timed.items()},
            "accepted": {str(heat): each.state() for heat, each in self._accepted.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load the ``state`` of another policy; ignored if its sizes differ."""
        if state.get("sizes") != list(self._sizes):
            return
        for key, seconds in state["seconds"].items():
            rows, heat = (int(number) for number in key.split("/"))
            self._timed[rows, heat] = Timings.restored(self._sizes, seconds)
        for heat, counts in state["accepted"].items():
            self._accepted[int(heat)] = self._new_acceptance(counts)

    def _records(self, view: View) -> tuple[Timings, Acceptance]:
        """The timings and acceptances of this step's buckets."""
        heat = 0 if view.warp.greedy else 1 + (view.warp.hottest > 0.5)
        key = 1 << (len(view.rows) - 1).bit_length(), heat  # up to 1, 2, 4, 8 rows and so on
        if key not in self._timed:
            self._timed[key] = Timings(self._sizes)
        if heat not in self._accepted:
            self._accepted[heat] = self._new_acceptance()
        return self._timed[key], self._accepted[heat]

    def _new_acceptance(self, state: Sequence[Sequence[Any]] = ((), ())) -> Acceptance:
        return Acceptance(self._sizes, self._prior, state)

    def _depth(self, index: int) -> int:
        """The length of the longest path in drafts of a size."""
        return self._needs.longest if self._needs.scored and index else self._sizes[index]

    def _rates(self, timed: Timings, accepted: Acceptance, rows: int, active: int) -> list[float]:
        """Expected tokens per second of the batch, by size."""
        start = self._start.value / (self._life.value or self.LIFE)
        found = []
        for gain, seconds in zip(accepted.gains(), timed.estimates, strict=True):
            tokens = rows + active * gain
            found.append(tokens / (seconds + start * tokens if gain else seconds))
        return found

    def _choose(self, timed: Timings, accepted: Acceptance, rows: int, active: int) -> Choice:
        """The size of this step; chosen again every few steps."""
        timed.now += 1
        old = timed.choice
        broke = old.index not in (0, old.best) and timed.credit <= 0
        if timed.left and not broke:
            timed.left -= 1
            return old
        timed.estimate()
        rates = self._rates(timed, accepted, rows, active)
        best = self._best(timed, rates)
        index, count = self._trial(timed, rates, best)
        timed.choice = Choice(index, best, 1 - rates[index] / rates[best], rates[best])
        timed.left = count - 1
        return timed.choice

    def _best(self, timed: Timings, rates: Sequence[float]) -> int:
        """The best size that has been timed. Drafting does not start or stop for a small gain: a drafter that starts
        again first reads what was decoded meanwhile."""
        old = timed.choice.best

        def value(i: int) -> float:
            return rates[i] * (1 + self.SWITCH * (bool(i) == bool(old)))

        return max((i for i in range(len(rates)) if timed.known(i)), key=value, default=0)

    def _trial(self, timed: Timings, rates: Sequence[float], best: int) -> tuple[int, int]:
        """The next size and for how many steps: the best, or one whose trial is due."""
        estimates = timed.estimates
        if not timed.known(0):
            return 0, 1
        others = [i for i in range(len(rates)) if i != best]
        if not best:  # drafting does not pay: try only the most promising size
            others = [max(others, key=rates.__getitem__)]
        gaps = {i: max(1 - rates[i] / rates[best], 0.0) for i in others}

        def urgency(i: int) -> tuple[float, float]:
            patience = self.EVERY * min(1 + (gaps[i] / self.GAP) ** 2, min(timed.steps[i], Window.KEPT))
            interval = max(patience, 1) if best else self.PAUSE
            new = not timed.known(i) and gaps[i] < self.NEAR
            return (timed.now - timed.last[i]) / interval + 1e9 * new, rates[i]

        index = max(others, key=urgency)
        count = 1 if index and best else self.TRIAL
        count = count if timed.known(index) else 1 + Window.ENOUGH
        loss = count * gaps[index] * estimates[index] / estimates[0]
        if urgency(index)[0] < 1 or (index and timed.credit < max(min(loss, self.CREDIT), 0.0)):
            return best, self.HOLD  # a trial of plain steps (index 0) needs no budget
        return index, count

    def _book(self, timed: Timings, choice: Choice, seconds: float) -> None:
        """Charge the loss of a trial to the budget, in plain steps' time. The first step of a size is not charged:
        kernels are compiled in it."""
        estimates = timed.estimates
        timed.credit = min(timed.credit + self.SHARE * seconds / estimates[0], self.CREDIT)
        if choice.index != choice.best and timed.last[choice.index]:
            lost = seconds - estimates[choice.index] * (1 - choice.gap)
            timed.credit = max(timed.credit - max(lost / estimates[0], 0.0), -self.DEBT)

    def _time(self, timed: Timings, choice: Choice, plan: Plan, done: StepDone, drafting: frozenset[int]) -> None:
        """Keep the time of a step with this choice."""
        seconds = done.draft_seconds + done.verify_seconds + done.host_seconds
        index = choice.index
        self._book(timed, choice, seconds)
        reached = self._reached(index, done)
        window = timed.empty if reached is None else timed.seconds[reached]
        fresh = drafting - self._read
        if fresh and window.known:
            self._start.add(max(seconds - window.value, 0.0) / len(fresh))
        clean = drafting <= self._drafted if drafting else not self._drafted
        whole = plan.length == self._depth(index)
        if clean and whole and timed.last[index]:
            timed.add(index, reached, seconds)
            if done.levels:
                timed.level.add(done.draft_seconds / done.levels)
        timed.last[index] = timed.now

    def _reached(self, index: int, done: StepDone) -> int | None:
        """The size that the longest of a step's drafts has, by index; None if none has a token."""
        if self._needs.scored or not index:
            return index
        depth = max(result.depth for result in done.rows)  # of trees without scores too: sizes are lengths
        return bisect_left(self._sizes, depth) if depth else None

    def _count(self, accepted: Acceptance, index: int, plan: Plan, done: StepDone) -> None:
        """Count the accepted tokens within each size for the rows that drafted."""
        rows = []
        for length, result in zip(plan.lengths, done.rows, strict=True):
            ranks = sorted(result.ranks)
            if length and not self._needs.scored:
                most = [min(result.accepted, size) for size in self._sizes if size <= length]
            elif length == self._needs.longest:
                most = [bisect_right(ranks, size) for size in self._sizes[: index + 1]]
            else:
                continue
            rows.append([after - before for before, after in pairwise(most)])
        accepted.add(rows)
        drew = [result for length, result in zip(plan.lengths, done.rows, strict=True) if length]
        accepted.add_nodes(sum(each.accepted for each in drew), sum(each.refused for each in drew))
