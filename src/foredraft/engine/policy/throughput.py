"""The policy that chooses how much to draft by tokens a second, from whole steps that were timed."""

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add, mul
from typing import Any, final

from foredraft.core.drafter import Needs, Plan, View
from foredraft.engine.policy.base import Policy
from foredraft.engine.step import StepDone

LENGTHS = (1, 2, 3, 4, 5, 7, 11, 15, 23, 31, 47, 63)
NODES = (1, 3, 5, 7, 11, 15, 23, 31, 47, 63)
"""Sizes that are tried, up to what a drafter can: lengths, and nodes of scored trees. With the root, most are numbers
of nodes that a forward on a CPU is run with."""
NEUTRAL = 0.65
"""How often the first drafted token is accepted, where nothing is known."""


@final
class Throughput(Policy):
    """The size of drafts, 0 included, with the most tokens a second.

    It keeps how long steps of each size took, by about how many rows and what temperature they had, and how many tokens
    are accepted within each size: a large draft tells what a smaller one would have brought. It takes the best size,
    and now and then tries another; the interval grows with the square of how much worse that is. All trials together
    may lose ``SHARE`` of the time. A step in which the drafter first reads a prompt is not timed as one of its size:
    what it takes longer is spread over the tokens of a request.

    Args:
        needs: of the drafter.
        confidence: see ``Plan``.
        prior: how often the first drafted token is accepted, as far as is known beforehand.
    """

    SHARE = 0.012  # of the time, which trials may lose
    FIRST, CREDIT, DEBT = 10.0, 12.0, 32.0  # plain steps' time for trials: at first, saved at most, owed at most
    EVERY, GAP = 48, 0.05  # steps between trials of a size as good as the best; one so much worse waits twice as long
    NEAR = 0.15  # a size that was not timed yet is, where it seems to be no more than so much worse
    LIFE = 64.0  # tokens of a request, as long as none has ended
    HOLD = 4  # steps of the best size until it is thought about again
    TRIAL, PAUSE = 3, 8  # steps of a trial that begins or interrupts drafting; steps between two that begin it

    def __init__(self, needs: Needs, confidence: float = 0.0, prior: float = NEUTRAL) -> None:
        most = needs.max_nodes if needs.scored else needs.longest
        self._needs = needs
        self.confidence = confidence
        self._sizes = (0, *(size for size in (NODES if needs.scored else LENGTHS) if size < most), most)
        self._prior = _expected(self._sizes, min(max(prior, 0.05), 0.95), needs.scored)
        self._timed: dict[tuple[int, int], _Timed] = {}  # by rows and temperature; see ``_of``
        self._accepted: dict[int, _Accepted] = {}  # by temperature
        self._credit = self.FIRST
        self._chosen: _Choice | None = None
        self._drafted: frozenset[int] = frozenset()  # rows of the last step that drafted
        self._tokens: dict[int, int] = {}  # of rows in flight
        self._read: set[int] = set()  # rows whose prompt the drafter has read
        self._start, self._life = _Window(), _Window()  # extra seconds of a row's first draft; tokens of a request

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        active = sum(limit > 0 for limit in limits)
        self._chosen = None
        if not active:
            return Plan((0,) * len(limits))
        timed, accepted = self._of(view)
        self._chosen = choice = self._choose(timed, accepted, len(limits), active)
        size = self._sizes[choice.index]
        if not self._needs.scored or not size:
            return Plan(tuple(min(size, limit) for limit in limits), self.confidence)
        lengths = tuple(min(self._needs.longest, limit) for limit in limits)
        worth = timed.level.value * choice.rate / max(accepted.goes_on, 0.1)  # parents promise so much of their own
        return Plan(lengths, self.confidence, nodes=size, level_worth=min(worth, 0.9 * active))

    def observe(self, view: View, plan: Plan, done: StepDone) -> None:
        seconds = done.draft_seconds + done.verify_seconds + done.host_seconds
        drafting = frozenset(row for row, length in zip(view.rows, plan.lengths, strict=True) if length)
        for row, result in zip(view.rows, done.rows, strict=True):
            self._tokens[row] = self._tokens.get(row, 0) + len(result.emitted)
        if self._chosen is not None:
            timed, accepted = self._of(view)
            index = self._chosen.index
            self._book(timed, self._chosen, seconds)
            fresh = drafting - self._read
            if fresh and timed.seconds[index].known:
                self._start.add(max(seconds - timed.seconds[index].value, 0.0) / len(fresh))
            clean = drafting <= self._drafted if drafting else not self._drafted
            whole = plan.length == (self._depth(index) if index else 0)
            if clean and whole and timed.last[index]:
                timed.seconds[index].add(seconds)
                if done.levels:
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
        """What was learned, as numbers, lists and dictionaries for JSON."""
        return {
            "sizes": list(self._sizes),
            "seconds": {f"{rows}/{heat}": each.state() for (rows, heat), each in self._timed.items()},
            "accepted": {str(heat): each.state() for heat, each in self._accepted.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Begin with what another policy has learned; nothing happens where its sizes were others."""
        if state.get("sizes") != list(self._sizes):
            return
        for key, seconds in state["seconds"].items():
            rows, heat = (int(number) for number in key.split("/"))
            self._timed[rows, heat] = _Timed.restored(self._sizes, seconds)
        for heat, (within, of) in state["accepted"].items():
            self._accepted[int(heat)] = _Accepted(self._sizes, self._prior, within, of)

    def _of(self, view: View) -> "tuple[_Timed, _Accepted]":
        """What is known of steps like this one."""
        heat = 0 if view.warp.greedy else 1 + (view.warp.hottest > 0.5)
        key = len(view.rows).bit_length(), heat
        if key not in self._timed:
            self._timed[key] = _Timed(self._sizes)
        if heat not in self._accepted:
            self._accepted[heat] = _Accepted(self._sizes, self._prior)
        return self._timed[key], self._accepted[heat]

    def _depth(self, index: int) -> int:
        size = self._sizes[index]
        return self._needs.longest if self._needs.scored else size

    def _rates(self, timed: "_Timed", accepted: "_Accepted", rows: int, active: int) -> list[float]:
        """Tokens a second of all rows by size."""
        start = self._start.value / (self._life.value or self.LIFE)
        found = []
        for gain, seconds in zip(accepted.gains(), timed.estimates, strict=True):
            tokens = rows + active * gain
            found.append(tokens / (seconds + start * tokens if gain else seconds))
        return found

    def _choose(self, timed: "_Timed", accepted: "_Accepted", rows: int, active: int) -> "_Choice":
        """The size of this step; it is thought about every few steps."""
        timed.now += 1
        old = timed.choice
        broke = old.index not in (0, old.best) and self._credit <= 0
        if timed.left and not broke:
            timed.left -= 1
            return old
        timed.estimate()
        rates = self._rates(timed, accepted, rows, active)
        best = max((i for i, each in enumerate(timed.seconds) if each.known), key=rates.__getitem__, default=0)
        index, count = self._trial(timed, rates, best)
        timed.choice = _Choice(index, best, 1 - rates[index] / rates[best], rates[best])
        timed.left = count - 1
        return timed.choice

    def _trial(self, timed: "_Timed", rates: Sequence[float], best: int) -> tuple[int, int]:
        """Which size comes next and for how many steps: the best, or one that is due to be tried."""
        estimates = timed.estimates
        if not timed.seconds[0].known:
            return 0, 1
        others = [i for i in range(len(rates)) if i != best]
        if not best:  # of sizes that do not pay, only the best is worth a look
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
            return best, self.HOLD  # what is owed does not keep plain steps from being timed
        return index, count

    def _book(self, timed: "_Timed", choice: "_Choice", seconds: float) -> None:
        """What trials lose, in plain steps' time; the very first step of a size, in which kernels are made, is not a
        measure of anything."""
        estimates = timed.estimates
        self._credit = min(self._credit + self.SHARE * seconds / estimates[0], self.CREDIT)
        if choice.index != choice.best and timed.last[choice.index]:
            lost = seconds - estimates[choice.index] * (1 - choice.gap)
            self._credit = max(self._credit - max(lost / estimates[0], 0.0), -self.DEBT)

    def _count(self, accepted: "_Accepted", index: int, plan: Plan, done: StepDone) -> None:
        """How many tokens were accepted within each size, of the rows that drafted."""
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


@dataclass(frozen=True, slots=True)
class _Choice:
    """The size of a step and the best size, both by index.

    ``gap`` is how much less the one brings, as a share of the ``rate`` of the best, in tokens a second.
    """

    index: int
    best: int
    gap: float
    rate: float


class _Window:
    """The mean of the latest numbers, where the few that are far above the median hardly count: machines stall. Of less
    than ``MANY`` it is the median."""

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
        """Whether there are enough numbers that one of them cannot mislead."""
        return len(self._latest) >= self.ENOUGH

    @property
    def value(self) -> float:
        """0 where there is no number."""
        if self._value is None:
            self._value = self._typical() if self._latest else 0.0
        return self._value

    def _typical(self) -> float:
        ordered = sorted(self._latest)
        middle = ordered[(len(ordered) - 1) // 2]
        if len(ordered) < self.MANY:
            return middle
        rare, most = len(ordered) - len(ordered) // self.MANY, self.STALL * middle
        kept = ordered[:rare] + [value for value in ordered[rare:] if value <= most]
        return sum(min(value, most) for value in kept) / len(kept)


def _rising(windows: Sequence[_Window]) -> list[float]:
    """The closest values that do not fall: neighbours that do are pooled."""
    pools: list[tuple[float, int, int]] = []  # sum, weight, windows
    for each in windows:
        pools.append((each.value * each.count, each.count, 1))
        while len(pools) > 1 and pools[-2][0] * pools[-1][1] > pools[-1][0] * pools[-2][1]:
            pools[-2:] = [tuple(map(add, *pools[-2:]))]
    return [total / weight for total, weight, width in pools for _ in range(width)]


class _Timed:
    """Seconds of steps by size, for one kind of step, and when each size was last run."""

    SLOPE = 0.03  # what a size of one more adds to a step, as a share of a plain one, where nothing is known

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self.seconds = [_Window() for _ in sizes]
        self.level = _Window()
        self.now = 0  # steps
        self.last = [0] * len(sizes)  # the step in which each size was run; 0 is never
        self.choice = _Choice(0, 0, 0.0, 0.0)
        self.left = 0  # steps for which it holds
        self.estimates: list[float] = []  # seconds of a step of each size
        self.estimate()

    def estimate(self) -> None:
        """Settle the estimates: as measured, or on the line between the two nearest sizes that were.

        They rise with the size: where they do not, it is noise, and the mean is taken.
        """
        known = [i for i, each in enumerate(self.seconds) if each.known]
        rising = dict(zip(known, _rising([self.seconds[i] for i in known]), strict=True))
        self.estimates = [self._between(i, rising) for i in range(len(self._sizes))]

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
    def restored(cls, sizes: Sequence[int], seconds: Sequence[float | None]) -> "_Timed":
        made = cls(sizes)
        made.seconds = [_Window([] if value is None else [value] * _Window.ENOUGH) for value in seconds]
        made.last = [int(each.known) for each in made.seconds]
        return made


class _Accepted:
    """How many drafted tokens are accepted within each size.

    Kept are ratios: what a step to the next larger size brings for each token that the step before it brings, from
    drafts that were at least so large. So what larger sizes brought once is worth less where smaller ones bring less.
    """

    FADE = 0.99  # a step
    WEIGHT = 2.0  # the prior counts for so many tokens

    def __init__(
        self, sizes: Sequence[int], prior: Sequence[float], within: Sequence[float] = (), of: Sequence[float] = ()
    ) -> None:
        self._prior = [after / before for before, after in pairwise((1.0, *prior))]
        widths = [1, *(high - low for low, high in pairwise(sizes))]
        self._most = [after / before for before, after in pairwise(widths)]
        self._within = list(within) or [0.0] * len(prior)
        self._of = list(of) or [0.0] * len(prior)
        self._nodes = [1.0, 1.0]  # accepted nodes, and these with the nodes where a path was refused

    def gains(self) -> list[float]:
        """Tokens that a draft of each size brings a row, beyond the one that comes without."""
        ratios: list[float] = []
        usual = 1.0  # how much better the size before is than the prior says
        for within, of, prior, most in zip(self._within, self._of, self._prior, self._most, strict=True):
            ratios.append((within + self.WEIGHT * min(usual * prior, most)) / (of + self.WEIGHT))
            usual = ratios[-1] / prior
        return [0.0, *accumulate(accumulate(ratios, mul))]

    @property
    def goes_on(self) -> float:
        """How often one of the children of an accepted node was accepted."""
        return self._nodes[0] / self._nodes[1]

    def add(self, rows: Sequence[Sequence[int]]) -> None:
        """What was accepted of the drafts of a step, for each row from one size to the next, up to what it drafted."""
        for i in range(max(map(len, rows), default=0)):
            reached = [row for row in rows if len(row) > i]
            self._within[i] = self._within[i] * self.FADE + sum(row[i] for row in reached)
            self._of[i] = self._of[i] * self.FADE + sum(row[i - 1] if i else 1 for row in reached)

    def add_nodes(self, accepted: int, refused: int) -> None:
        """How many nodes of a step were accepted, and how many of them, or roots, had children that were not."""
        self._nodes[0] = self._nodes[0] * self.FADE + accepted
        self._nodes[1] = self._nodes[1] * self.FADE + accepted + refused

    def state(self) -> list[list[float]]:
        return [list(self._within), list(self._of)]


def _expected(sizes: Sequence[int], prior: float, scored: bool) -> list[float]:
    """Tokens from one size to the next, before anything was seen: of chains with the same acceptance everywhere, and of
    trees whose nodes bring ever less."""
    if not scored:
        return [sum(prior**d for d in range(low + 1, high + 1)) for low, high in pairwise(sizes)]
    widths = [high - low for low, high in pairwise(sizes)]
    shares = (0.6 * width / before for before, width in pairwise(widths))
    return list(accumulate(shares, mul, initial=prior))
