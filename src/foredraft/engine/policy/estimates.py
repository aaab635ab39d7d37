"""What the throughput policy has measured: how often drafted tokens are accepted, and what steps take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add
from typing import Any

import numpy as np

from foredraft.core.worth import Features
from foredraft.engine.fitting import SIZES

DROPPED = 0
"""The size of a forward whose draft was dropped: one node, but it takes longer than a plain step."""
EVERY = (*range(1, 9), *(size for size in SIZES if size > 8))
"""Sizes that a target of any width is asked for."""


class AcceptanceModel:
    """The probability that a child of an accepted node is accepted: logistic regression, learned online.

    A step of Newton's method for each batch of children, on a curvature that forgets old ones in favour of the prior.
    Batches grow with what is known, since a few more children change it little.

    Args:
        prior: weights to start from; by default the draft's own probabilities are right.
    """

    FADE, BATCH, MOST = 0.9996, 12, 96  # per child; children of the first batches, and of later ones
    PRIOR = Features(0.0, 1.0, 0.0, 0.0)
    PRECISION = np.diag([2.0, 8.0, 4.0, 4.0])  # of the prior: about the information of as many tokens

    def __init__(self, prior: Features = PRIOR) -> None:
        self.weights = self._prior = prior
        self._curvature, self._learned = self.PRECISION, 0
        self._seen: list[tuple[Features, bool]] = []  # children of the next batch, and whether they were accepted

    def learn(self, features: Features, *, accepted: bool) -> None:
        """Learn from a child of an accepted node."""
        self._seen.append((features, accepted))
        if len(self._seen) < min(max(self.BATCH, self._learned // 8), self.MOST):
            return
        (x, right), weights = map(np.array, zip(*self._seen, strict=True)), np.array(self.weights)
        fade = self.FADE ** len(self._seen)
        chances, prior = 1 / (1 + np.exp(-x @ weights)), (1 - fade) * self.PRECISION
        self._curvature = fade * self._curvature + prior + (x.T * (chances * (1 - chances))) @ x
        slope = x.T @ (right - chances) + prior @ (np.array(self._prior) - weights)
        self.weights = Features(*(weights + np.linalg.solve(self._curvature, slope)).tolist())
        self._learned += len(self._seen)
        self._seen = []


class Seconds:
    """A running estimate that falls fast and rises slowly, since a busy machine makes steps longer and nothing makes
    them shorter: about the 0.2 expectile of the latest values."""

    FALLS, RISES = 0.3, 0.08

    def __init__(self, value: float = 0.0) -> None:
        self.value, self.count = value, int(value > 0)

    def add(self, value: float) -> None:
        self.count += 1
        if self.count == 1:
            self.value = value
        self.value += (self.FALLS if value < self.value else self.RISES) * (min(value, 2 * self.value) - self.value)


class ForwardTimes:
    """Seconds of a step without its draft, by the nodes of its forward.

    ``means``: of the sizes that were used. ``hint``: seconds that a node is expected to add, until two sizes were used.
    """

    SLOPE = 0.05  # least extra time of a node beyond the sizes that are known, as a share of a plain step
    HOPE = 0.03  # a size that was not measured is expected to take so much less than its neighbours say, so it is tried
    FEW = 8  # nodes of a usual draft
    SURE = 12  # times after which a size's own mean counts alone, and not what its neighbours say
    STALE, FRESH = 1000, 8  # steps after which an unused size counts as not measured; steps between tables

    def __init__(self, seconds: Mapping[int, float] = {}, sizes: Sequence[int] = SIZES) -> None:
        self.means = {size: Seconds(value) for size, value in seconds.items()}
        self._sizes = sizes
        self.hint = 0.0
        self._last = dict.fromkeys(seconds, 0)
        self.steps = 0  # all, so that unused sizes age
        self._before, self._table_step, self._table = 0, 0, dict[int, float]()

    def add(self, size: int, seconds: float, *, timed: bool = True) -> None:
        """Add a step. A plain one counts after another: between drafts it takes longer.

        Args:
            timed: False if it takes longer than usual: then it counts if it drafted and is the first of its size.
        """
        before, self._before = self._before, size
        self.steps += 1
        if (size == 1 and before != 1) or (not timed and (size == 1 or size in self.means)):
            return
        if size not in self.means:
            self.means[size], self._table_step = Seconds(), 0
        self._last[size] = self.steps
        self.means[size].add(seconds)

    @property
    def plain(self) -> float:
        """Seconds of a step without a draft, no more than those of steps whose draft was dropped, which have the same
        forward; 0 if not known."""
        if 1 not in self.means:
            return 0.0
        dropped = self.means.get(DROPPED)
        return min(self.means[1].value, dropped.value) if dropped else self.means[1].value

    def table(self, most: int) -> dict[int, float]:
        """Seconds by size, up to the first that holds ``most`` nodes, rising; empty before a plain step was timed."""
        if not self.plain or (self._table_step and self.steps - self._table_step < self.FRESH):
            return self._table
        known = {
            size: mean
            for size, mean in sorted(self.means.items())
            if mean.count and (size == 1 or (size != DROPPED and self.steps - self._last[size] < self.STALE))
        }
        sure = {size: mean.value for size, mean in known.items() if size == 1 or mean.count >= self.SURE}
        means = []
        for size, mean in known.items():
            value = self.plain if size == 1 else mean.value
            if size < max(sure) and mean.count < self.SURE:  # it was timed few times, perhaps in a slow moment
                between = float(np.interp(size, [*sure], [*sure.values()]))
                value = between + (value - between) * mean.count / self.SURE
            means.append((value, min(mean.count, 24)))
        sizes, rising = [*known], rising_means(means)
        asked = [size for size in self._sizes if size < most] + [size for size in (*SIZES, most) if size >= most][:1]
        measured = (rising[-1] - rising[0]) / (sizes[-1] - 1) if len(sizes) > 1 else self.hint
        slope = max(self.SLOPE * rising[0], measured)
        inside = np.interp(asked, sizes, rising).tolist()
        self._table = {
            size: (t + slope * max(size - sizes[-1], 0)) * (1 - self.HOPE * (size not in known))
            for size, t in zip(asked, inside, strict=True)
        }
        self._table_step = self.steps
        return self._table

    @property
    def slope(self) -> float:
        """Seconds that a node adds up to the largest size that was used."""
        used = {size: mean.value for size, mean in self.means.items() if size != DROPPED and mean.count}
        most = max(used, default=1)
        return max(used[most] - self.plain, 0.0) / (most - 1) if most > 1 and self.plain else self.hint

    @property
    def node(self) -> float:
        """Seconds that a node adds to a forward of few nodes."""
        few = [size for size in self._table if 1 < size <= self.FEW]
        return (self._table[few[-1]] - self._table[few[0]]) / (few[-1] - few[0]) if len(few) > 1 else 0.0


def rising_means(measured: Sequence[tuple[float, int]]) -> list[float]:
    """Isotonic regression of (mean, count): larger forwards take no less time; where they do, it is noise."""
    pools: list[tuple[float, int, int]] = []  # sum, weight, entries
    for value, count in measured:
        pools.append((value * count, count, 1))
        while len(pools) > 1 and pools[-2][0] * pools[-1][1] > pools[-1][0] * pools[-2][1]:
            pools[-2:] = [tuple(map(add, *pools[-2:]))]
    return [total / weight for total, weight, entries in pools for _ in range(entries)]


@dataclass
class Drafting:
    """Decayed sums over steps that drafted: their ``tokens``, the ``levels`` of their drafts, ``extra`` seconds, in
    which drafters read prompts, and ``widths``, the numbers of forwards by their nodes."""

    tokens: float = 0.0
    levels: float = 0.0
    extra: float = 0.0
    widths: dict[int, float] = field(default_factory=dict)

    @property
    def steps(self) -> float:
        return sum(self.widths.values())

    def add(self, other: "Drafting", fade: float = 1.0) -> None:
        """Multiply by ``fade``, then add."""
        self.tokens, self.levels = fade * self.tokens + other.tokens, fade * self.levels + other.levels
        self.extra = fade * self.extra + other.extra
        for width in self.widths:
            self.widths[width] *= fade
        for width, count in other.widths.items():
            self.widths[width] = self.widths.get(width, 0.0) + count

    def scaled(self, factor: float) -> "Drafting":
        widths = {width: factor * count for width, count in self.widths.items()}
        return Drafting(factor * self.tokens, factor * self.levels, factor * self.extra, widths)


@dataclass
class Pace:
    """What steps of one batch size and temperature bring and take.

    Of steps that drafted, ``latest`` are those of the present outputs, and ``usual`` those of many: with these each
    output begins, since texts differ in how well they are drafted, and the latest one says little about the next. Times
    are those of ``forward`` and ``level``, so an estimate that was wrong at first does no lasting harm. ``curve``: the
    mean value of the best n nodes of a row together, by n from 0 on. ``tried``, ``passed``: decayed numbers of accepted
    nodes with children, and of those with an accepted child.
    """

    FADE = 0.97  # of ``latest``, per step
    CLEAR, KNOWN = 8, 24  # steps that draft until the rate is known: if it is bad or all were dropped, and in any case
    BAD = 0.8  # of plain decoding
    SLOW, OPENING = 0.998, 12  # decay of ``usual``, and its weight at the beginning of an output, in steps
    forward: ForwardTimes = field(default_factory=ForwardTimes)
    level: Seconds = field(default_factory=Seconds)
    resumption: Seconds = field(default_factory=Seconds)  # what a draft takes more after steps without one
    reading: Seconds = field(default_factory=Seconds)  # and for each row that was not drafted for: it reads the prompt
    latest: Drafting = field(default_factory=Drafting)
    usual: Drafting = field(default_factory=Drafting)
    steps: int = 0  # that drafted
    curve: list[float] = field(default_factory=lambda: [0.0])
    tried: float = 1.0
    passed: float = 1.0
    pays: bool = True  # drafting, as far as is known
    since: int = 0  # steps since the last trial of what pays less
    wait: int = 16  # most steps to the next one, times the plain steps that it takes to begin it; doubles each time
    trial: int = 0  # steps of this trial that are left
    paused: bool = True  # the latest step did not draft

    @property
    def dropped(self) -> bool:
        """Whether all latest drafts were dropped, since no node was worth its price."""
        return set(self.latest.widths) == {DROPPED}

    @property
    def rate(self) -> float:
        """Tokens per second of the latest steps that drafted; 0 before there were some."""
        means, latest = self.forward.means, self.latest
        seconds = latest.extra + latest.levels * self.level.value
        seconds += sum([count * means[width].value for width, count in latest.widths.items()])
        return latest.tokens / seconds if seconds else 0.0

    def opened(self, share: float) -> None:
        """Outputs began, in this share of the rows."""
        if known := self.usual.steps:
            latest = self.usual.scaled(share * min(self.OPENING / known, 1.0))
            latest.add(self.latest.scaled(1 - share))
            self.latest = latest

    def drafted(self, step: Drafting, extra: float) -> None:
        """Add a step that drafted. ``extra``: seconds in which drafters read prompts. They are spent before it is known
        how well an output is drafted, so they count for the next one."""
        self.latest.add(step, self.FADE)
        self.usual.add(step, self.SLOW)
        self.usual.extra += extra

    def tested(self, accepted: int, *, refused: bool) -> None:
        """Add a row: how many nodes were accepted, and whether the last one's children were refused."""
        self.passed = self.FADE * self.passed + accepted
        self.tried = self.FADE * self.tried + accepted + refused

    def valued(self, values: Sequence[float]) -> None:
        """Add the values of a row's drafted nodes."""
        for n, total in enumerate(accumulate(sorted(values, reverse=True)), start=1):
            if n == len(self.curve):
                self.curve.append(total)
            self.curve[n] += (1 - self.FADE) * (total - self.curve[n])

    def state(self) -> dict[str, Any]:
        """As JSON types."""
        seconds = {str(size): mean.value for size, mean in sorted(self.forward.means.items()) if mean.count}
        widths = {str(size): count for size, count in self.latest.widths.items()}
        sums = {"tokens": self.latest.tokens, "levels": self.latest.levels, "widths": widths}
        return {"forward": seconds, "level": self.level.value, **sums, "curve": self.curve}

    @classmethod
    def restored(cls, saved: Mapping[str, Any], sizes: Sequence[int] = SIZES) -> "Pace":
        """From ``state``; ``sizes``: of ``ForwardTimes``."""
        forward = ForwardTimes({int(size): float(seconds) for size, seconds in saved["forward"].items()}, sizes)
        widths = {int(size): float(count) for size, count in saved["widths"].items()}
        curve, level = [float(value) for value in saved["curve"]], Seconds(float(saved["level"]))
        latest = Drafting(float(saved["tokens"]), float(saved["levels"]), 0.0, widths)
        return cls(
            forward, level, latest=latest, usual=latest.scaled(1.0), steps=cls.KNOWN if widths else 0, curve=curve
        )
