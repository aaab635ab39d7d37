"""The policy that chooses the draft size with the most tokens per second, from timings of whole steps."""

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add, mul
from typing import Any, final

from foredraft.core.draft import Law
from foredraft.core.drafter import Needs, Plan, View
from foredraft.engine.policy.base import Policy
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

    A size is a length, a number of picked nodes, or a drawn tree (``Needs.drawn``). Drawn trees are for sampled rows
    without a seed of their own. Keeps the step times of each size, by batch size bucket and temperature bucket, and the
    accepted tokens within each size (a large draft also shows what a smaller one would have yielded). Takes the best
    size and sometimes tries another; the interval between trials grows with the square of the expected loss. A budget
    caps the time lost to all trials at ``SHARE``. A step in which the drafter first reads a prompt does not count as a
    timing of its size: its extra time is spread over the tokens of a request.

    Args:
        needs: of the drafter.
        confidence: see ``Plan``.
        prior: expected acceptance rate of the first drafted token.
    """

    SHARE = 0.012  # largest share of the time lost to trials
    FIRST, CREDIT, DEBT = 10.0, 12.0, 32.0  # trial budget, in plain steps' time: initial, largest, largest debt
    EVERY, GAP = 48, 0.05  # steps between trials of a size as good as the best; twice as many at a loss of ``GAP``
    NEAR = 0.15  # sizes without timings are tried first if their expected loss is below this
    LIFE = 64.0  # assumed tokens of a request until one has ended
    HOLD = 4  # steps for which the best size is kept before choosing again
    TRIAL, PAUSE = 3, 8  # steps of a trial that starts or interrupts drafting; steps between trials that start it

    def __init__(self, needs: Needs, confidence: float = 0.0, prior: float = NEUTRAL) -> None:
        most = needs.max_nodes if needs.scored else needs.longest
        self._needs = needs
        self.confidence = confidence
        self._sizes = (0, *(size for size in (NODES if needs.scored else LENGTHS) if size < most), most)
        self._twins = tuple(bisect_right(self._sizes, size) - 1 for size in needs.drawn)  # these come after the others
        self._prior = _expected(self._sizes, min(max(prior, 0.05), 0.95), needs.scored)
        self._timed: dict[tuple[int, int], _Timed] = {}  # by row and temperature bucket; see ``_records``
        self._accepted: dict[int, _Accepted] = {}  # by temperature
        self._credit = self.FIRST
        self._chosen: _Choice | None = None
        self._drafted: frozenset[int] = frozenset()  # rows that drafted in the last step
        self._tokens: dict[int, int] = {}  # tokens by row in flight
        self._read: set[int] = set()  # rows whose prompt the drafter has read
        self._start, self._life = _Window(), _Window()  # extra seconds of a row's first draft; tokens per request

    @property
    def sizes(self) -> tuple[int, ...]:
        """The candidate sizes but for drawn trees, 0 first."""
        return self._sizes

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        active = sum(limit > 0 for limit in limits)
        self._chosen = None
        if not active:
            return Plan((0,) * len(limits))
        timed, accepted = self._records(view)
        self._chosen = choice = self._choose(timed, accepted, len(limits), active, self._offered(view))
        drawn = choice.index - len(self._sizes)
        if drawn >= 0:
            lengths = tuple(min(self._needs.longest, limit) for limit in limits)
            return Plan(lengths, self.confidence, nodes=self._needs.drawn[drawn], drawn=True)
        size = self._sizes[choice.index]
        if not self._needs.scored or not size:
            return Plan(tuple(min(size, limit) for limit in limits), self.confidence)
        lengths = tuple(min(self._needs.longest, limit) for limit in limits)
        # expand a level only if its expected tokens, P(parents) * P(child accepted), beat the throughput times its cost
        worth = timed.level.value * choice.rate / max(accepted.child_rate, 0.1)
        return Plan(lengths, self.confidence, nodes=size, level_worth=min(worth, 0.9 * active))

    def observe(self, view: View, plan: Plan, done: StepDone) -> None:
        seconds = done.draft_seconds + done.verify_seconds + done.host_seconds
        drafting = frozenset(row for row, length in zip(view.rows, plan.lengths, strict=True) if length)
        for row, result in zip(view.rows, done.rows, strict=True):
            self._tokens[row] = self._tokens.get(row, 0) + len(result.emitted)
        if self._chosen is not None:
            timed, accepted = self._records(view)
            index = self._chosen.index
            self._book(timed, self._chosen, seconds)
            fresh = drafting - self._read
            if fresh and timed.seconds[index].known:
                self._start.add(max(seconds - timed.seconds[index].value, 0.0) / len(fresh))
            clean = drafting <= self._drafted if drafting else not self._drafted
            whole = plan.length == (self._depth(index) if index else 0)
            if clean and whole and timed.last[index]:
                timed.seconds[index].add(seconds)
                if done.levels and not plan.drawn:
                    timed.level.add(done.draft_seconds / done.levels)
            timed.last[index] = timed.now
            if drafting:
                self._count(accepted, index, plan, done)
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
            "sizes": [*self._sizes, *self._needs.drawn],
            "seconds": {f"{rows}/{heat}": each.state() for (rows, heat), each in self._timed.items()},
            "accepted": {str(heat): each.state() for heat, each in self._accepted.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load the ``state`` of another policy; ignored if its sizes differ."""
        if state.get("sizes") != [*self._sizes, *self._needs.drawn]:
            return
        for key, seconds in state["seconds"].items():
            rows, heat = (int(number) for number in key.split("/"))
            self._timed[rows, heat] = _Timed.restored(self._sizes, self._twins, seconds)
        for heat, counts in state["accepted"].items():
            self._accepted[int(heat)] = _Accepted(self._sizes, self._twins, self._prior, *counts)

    def _records(self, view: View) -> "tuple[_Timed, _Accepted]":
        """The timings and acceptances of this step's buckets."""
        heat = 0 if view.warp.greedy else 1 + (view.warp.hottest > 0.5)
        key = len(view.rows).bit_length(), heat
        if key not in self._timed:
            self._timed[key] = _Timed(self._sizes, self._twins)
        if heat not in self._accepted:
            self._accepted[heat] = _Accepted(self._sizes, self._twins, self._prior)
        return self._timed[key], self._accepted[heat]

    def _offered(self, view: View) -> list[int]:
        """The sizes for these rows, by index."""
        picked, drawn = list(range(len(self._sizes))), [len(self._sizes) + i for i in range(len(self._twins))]
        if view.warp.greedy:
            return picked
        if self._needs.law is Law.WITHOUT_REPLACEMENT:
            return [0, *drawn]
        return picked if view.seeded else picked + drawn

    def _depth(self, index: int) -> int:
        return self._needs.longest if self._needs.scored else self._sizes[index]

    def _rates(self, timed: "_Timed", accepted: "_Accepted", rows: int, active: int) -> list[float]:
        """Expected tokens per second of the batch, by size."""
        start = self._start.value / (self._life.value or self.LIFE)
        found = []
        for gain, seconds in zip(accepted.gains(), timed.estimates, strict=True):
            tokens = rows + active * gain
            found.append(tokens / (seconds + start * tokens if gain else seconds))
        return found

    def _choose(
        self, timed: "_Timed", accepted: "_Accepted", rows: int, active: int, offered: Sequence[int]
    ) -> "_Choice":
        """The size of this step, one of ``offered``; chosen again every few steps."""
        timed.now += 1
        old = timed.choice
        broke = old.index not in (0, old.best) and self._credit <= 0
        if timed.left and not broke and old.index in offered:
            timed.left -= 1
            return old
        timed.estimate()
        rates = self._rates(timed, accepted, rows, active)
        best = max((i for i in offered if timed.seconds[i].known), key=rates.__getitem__, default=0)
        index, count = self._trial(timed, rates, best, offered)
        timed.choice = _Choice(index, best, 1 - rates[index] / rates[best], rates[best])
        timed.left = count - 1
        return timed.choice

    def _trial(self, timed: "_Timed", rates: Sequence[float], best: int, offered: Sequence[int]) -> tuple[int, int]:
        """The next size and for how many steps: the best, or one whose trial is due."""
        estimates = timed.estimates
        if not timed.seconds[0].known:
            return 0, 1
        others = [i for i in offered if i != best]
        if not best:  # drafting does not pay: try only the most promising size
            others = [max(others, key=rates.__getitem__)]
        gaps = {i: max(1 - rates[i] / rates[best], 0.0) for i in others}

        def urgency(i: int) -> tuple[float, float]:
            patience = self.EVERY * min(1 + (gaps[i] / self.GAP) ** 2, timed.seconds[i].count)
            interval = max(patience, 1) if best else self.PAUSE
            new = not timed.seconds[i].known and gaps[i] < self.NEAR
            return (timed.now - timed.last[i]) / interval + 1e9 * new, rates[i]

        index = max(others, key=urgency)
        count = 1 if index and best else self.TRIAL
        count = count if timed.seconds[index].known else 1 + _Window.ENOUGH
        loss = count * gaps[index] * estimates[index] / estimates[0]
        if urgency(index)[0] < 1 or (index and self._credit < max(min(loss, self.CREDIT), 0.0)):
            return best, self.HOLD  # a trial of plain steps (index 0) needs no budget
        return index, count

    def _book(self, timed: "_Timed", choice: "_Choice", seconds: float) -> None:
        """Charge the loss of a trial to the budget, in plain steps' time. The first step of a size is not charged:
        kernels are compiled in it."""
        estimates = timed.estimates
        self._credit = min(self._credit + self.SHARE * seconds / estimates[0], self.CREDIT)
        if choice.index != choice.best and timed.last[choice.index]:
            lost = seconds - estimates[choice.index] * (1 - choice.gap)
            self._credit = max(self._credit - max(lost / estimates[0], 0.0), -self.DEBT)

    def _count(self, accepted: "_Accepted", index: int, plan: Plan, done: StepDone) -> None:
        """Count the accepted tokens within each size for the rows that drafted."""
        rows = []
        if plan.drawn:
            whole = [r.accepted for n, r in zip(plan.lengths, done.rows, strict=True) if n == self._needs.longest]
            accepted.add_drawn(index - len(self._sizes), whole)
            return
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


@dataclass(frozen=True, slots=True)
class _Choice:
    """The chosen and the best size, by index.

    ``gap`` is the expected loss of the chosen size as a share of ``rate``, the best tokens per second.
    """

    index: int
    best: int
    gap: float
    rate: float


class _Window:
    """Mean of the latest values, robust against a few that are far above the median (stalls). The median of fewer than
    ``MANY`` values."""

    KEPT, ENOUGH, MANY, STALL = 32, 4, 8, 2.0

    def __init__(self, values: Sequence[float] = ()) -> None:
        self._latest = deque(values, maxlen=self.KEPT)
        self._value: float | None = None

    def add(self, value: float) -> None:
        self._latest.append(value)
        self._value = None

    @property
    def count(self) -> int:
        return len(self._latest)

    @property
    def known(self) -> bool:
        """True if there are enough values that an outlier cannot dominate."""
        return len(self._latest) >= self.ENOUGH

    @property
    def value(self) -> float:
        """The robust mean; 0 without values."""
        if self._value is None:
            self._value = self._robust_mean() if self._latest else 0.0
        return self._value

    def _robust_mean(self) -> float:
        ordered = sorted(self._latest)
        middle = ordered[(len(ordered) - 1) // 2]
        if len(ordered) < self.MANY:
            return middle
        rare, most = len(ordered) - len(ordered) // self.MANY, self.STALL * middle
        kept = ordered[:rare] + [value for value in ordered[rare:] if value <= most]
        return sum(min(value, most) for value in kept) / len(kept)


def _rising(windows: Sequence[_Window]) -> list[float]:
    """Isotonic regression: the closest non-decreasing values, by pooling adjacent violators."""
    pools: list[tuple[float, int, int]] = []  # sum, weight, windows
    for each in windows:
        pools.append((each.value * each.count, each.count, 1))
        while len(pools) > 1 and pools[-2][0] * pools[-1][1] > pools[-1][0] * pools[-2][1]:
            pools[-2:] = [tuple(map(add, *pools[-2:]))]
    return [total / weight for total, weight, width in pools for _ in range(width)]


class _Timed:
    """Step seconds by size for one bucket, and when each size was last run."""

    SLOPE = 0.03  # assumed extra time per unit of size, as a share of a plain step, for sizes without timings

    def __init__(self, sizes: Sequence[int], twins: Sequence[int]) -> None:
        self._sizes = sizes
        self._twins = twins  # for each drawn tree, the index of the picked size with as many nodes
        self.seconds = [_Window() for _ in (*sizes, *twins)]
        self.level = _Window()
        self.now = 0  # steps
        self.last = [0] * len(self.seconds)  # the step in which each size was run; 0 is never
        self.choice = _Choice(0, 0, 0.0, 0.0)
        self.left = 0  # further steps with this choice
        self.estimates: list[float] = []  # seconds of a step, by size
        self.estimate()

    def estimate(self) -> None:
        """Update the estimates: as measured, or interpolated between the nearest measured sizes.

        Times must rise with the size; where they do not, it is noise and neighbours are averaged.
        """
        count = len(self._sizes)
        rising = self._known(range(count))
        self.estimates = [self._between(i, rising) for i in range(count)]
        drawn = self._known(range(count, len(self.seconds)))
        as_twins = sum(self.estimates[self._twins[i - count]] for i in drawn)
        factor = sum(drawn.values()) / as_twins if drawn else 1.0
        for i, twin in enumerate(self._twins, start=count):
            self.estimates.append(drawn.get(i, self.estimates[twin] * factor))

    def _known(self, indices: Sequence[int]) -> dict[int, float]:
        """The measured of these sizes, in rising order of time."""
        known = [i for i in indices if self.seconds[i].known]
        return dict(zip(known, _rising([self.seconds[i] for i in known]), strict=True))

    def _between(self, i: int, known: Mapping[int, float]) -> float:
        below = max((j for j in known if j <= i), default=None)
        above = min((j for j in known if j >= i), default=None)
        if below is None or above is None:
            near = above if below is None else below
            shape = 1 + self.SLOPE * self._sizes[i]
            return shape if near is None else known[near] * shape / (1 + self.SLOPE * self._sizes[near])
        share = (self._sizes[i] - self._sizes[below]) / max(self._sizes[above] - self._sizes[below], 1)
        return known[below] + (known[above] - known[below]) * share

    def state(self) -> list[float | None]:
        return [each.value if each.known else None for each in self.seconds]

    @classmethod
    def restored(cls, sizes: Sequence[int], twins: Sequence[int], seconds: Sequence[float | None]) -> "_Timed":
        timed = cls(sizes, twins)
        timed.seconds = [_Window([] if value is None else [value] * _Window.ENOUGH) for value in seconds]
        timed.last = [int(each.known) for each in timed.seconds]
        return timed


class _Accepted:
    """Expected accepted tokens within each size.

    Stored as ratios: the gain of each size increment over the gain of the one before, from drafts at least that
    large. When smaller sizes gain less, the estimates of larger sizes fall with them. A drawn tree has a mean of its
    own; until it is known, it is that of the picked tree of its size, times what other drawn trees gain over theirs.
    """

    FADE = 0.99  # decay per step
    WEIGHT = 2.0  # weight of the prior, in tokens
    DRAWN, STEPS = 1.2, 8.0  # expected gain of drawn over picked trees; weight of that prior, in steps

    def __init__(
        self,
        sizes: Sequence[int],
        twins: Sequence[int],
        prior: Sequence[float],
        within: Sequence[float] = (),
        of: Sequence[float] = (),
        drawn: Sequence[Sequence[float]] = (),
    ) -> None:
        self._twins = twins
        self._drawn = [list(each) for each in drawn] or [[0.0, 0.0] for _ in twins]  # accepted tokens, steps
        self._prior = [after / before for before, after in pairwise((1.0, *prior))]
        widths = [1, *(high - low for low, high in pairwise(sizes))]
        self._most = [after / before for before, after in pairwise(widths)]
        self._within = list(within) or [0.0] * len(prior)
        self._records = list(of) or [0.0] * len(prior)
        self._nodes = [1.0, 1.0]  # accepted nodes; accepted nodes plus nodes whose children were all refused

    def gains(self) -> list[float]:
        """Expected accepted tokens per row, by size."""
        ratios: list[float] = []
        usual = 1.0  # ratio of the previous estimate to its prior
        for within, of, prior, most in zip(self._within, self._records, self._prior, self._most, strict=True):
            ratios.append((within + self.WEIGHT * min(usual * prior, most)) / (of + self.WEIGHT))
            usual = ratios[-1] / prior
        picked = [0.0, *accumulate(accumulate(ratios, mul))]
        usual = [picked[twin] for twin in self._twins]
        most = self.STEPS * self.DRAWN + sum(
            accepted / gain for (accepted, _), gain in zip(self._drawn, usual, strict=True)
        )
        factor = most / (self.STEPS + sum(steps for _, steps in self._drawn))
        for gain, (accepted, steps) in zip(usual, self._drawn, strict=True):
            picked.append((accepted + self.STEPS * factor * gain) / (steps + self.STEPS))
        return picked

    @property
    def child_rate(self) -> float:
        """How often a child of an accepted node was accepted."""
        return self._nodes[0] / self._nodes[1]

    def add(self, rows: Sequence[Sequence[int]]) -> None:
        """Add a step: for each row the accepted tokens by size increment, up to the size drafted."""
        for i in range(max(map(len, rows), default=0)):
            reached = [row for row in rows if len(row) > i]
            self._within[i] = self._within[i] * self.FADE + sum(row[i] for row in reached)
            self._records[i] = self._records[i] * self.FADE + sum(row[i - 1] if i else 1 for row in reached)

    def add_drawn(self, tree: int, accepted: Sequence[int]) -> None:
        """Add a step with this drawn tree: the accepted tokens of each row."""
        for each in self._drawn:
            each[:] = each[0] * self.FADE, each[1] * self.FADE
        self._drawn[tree][0] += sum(accepted)
        self._drawn[tree][1] += len(accepted)

    def add_nodes(self, accepted: int, refused: int) -> None:
        """Add a step's number of accepted nodes, and of paths that ended at a node whose children were refused."""
        self._nodes[0] = self._nodes[0] * self.FADE + accepted
        self._nodes[1] = self._nodes[1] * self.FADE + accepted + refused

    def state(self) -> list[list[Any]]:
        return [list(self._within), list(self._records), [list(each) for each in self._drawn]]


def _expected(sizes: Sequence[int], prior: float, scored: bool) -> list[float]:
    """Prior gain of each size increment: for chains with a constant acceptance rate, for trees with diminishing
    returns per node."""
    if not scored:
        return [sum(prior**d for d in range(low + 1, high + 1)) for low, high in pairwise(sizes)]
    widths = [high - low for low, high in pairwise(sizes)]
    shares = (0.6 * width / before for before, width in pairwise(widths))
    return list(accumulate(shares, mul, initial=prior))
