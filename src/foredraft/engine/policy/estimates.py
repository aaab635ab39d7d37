"""What the throughput policy has measured: step seconds and accepted tokens, by draft size."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add, mul
from typing import Any


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen and the best size, by index.

    ``gap`` is the expected loss of the chosen size as a share of ``rate``, the best tokens per second.
    """

    index: int
    best: int
    gap: float
    rate: float


class Window:
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


def _rising(windows: Sequence[Window]) -> list[float]:
    """Isotonic regression: the closest non-decreasing values, by pooling adjacent violators."""
    pools: list[tuple[float, int, int]] = []  # sum, weight, windows
    for each in windows:
        pools.append((each.value * each.count, each.count, 1))
        while len(pools) > 1 and pools[-2][0] * pools[-1][1] > pools[-1][0] * pools[-2][1]:
            pools[-2:] = [tuple(map(add, *pools[-2:]))]
    return [total / weight for total, weight, width in pools for _ in range(width)]


class Timings:
    """Step seconds by size for one bucket, when each size was last run, and the budget of its trials.

    A chain often ends before its size: at a token of low confidence, or without a match. So steps are timed by the size
    that their drafts reached, and the seconds of a size are a mean over those that it reaches.
    """

    FIRST = 10.0  # initial trial budget, in plain steps' time
    FADE, WEIGHT = 0.99, 2.0  # of drafts: decay per step; weight of the prior that they do not end early, in steps
    SLOPE = 0.03  # assumed extra time per unit of size, as a share of a plain step, for sizes without timings

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self.credit = self.FIRST
        self.seconds = [Window() for _ in sizes]  # by the size reached
        self.steps = [0] * len(self.seconds)  # timed steps of each chosen size
        self.empty = Window()  # of drafts that have no token
        self.level = Window()
        self.now = 0  # steps
        self.last = [0] * len(self.seconds)  # the step in which each size was run; 0 is never
        self.choice = Choice(0, 0, 0.0, 0.0)
        self.left = 0  # further steps with this choice
        self._ended = [0.0] * len(sizes)  # drafts that ended at each size though a larger one was chosen
        self._passed = [self.WEIGHT] * len(sizes)  # drafts that reached each size when a larger one was chosen
        self.estimates: list[float] = []  # seconds of a step, by size
        self.estimate()

    def known(self, i: int) -> bool:
        """Whether size ``i`` was tried often enough to be chosen."""
        return self.steps[i] >= Window.ENOUGH

    def add(self, i: int, reached: int | None, seconds: float) -> None:
        """Add a step of size ``i`` whose drafts reached another size, by index; None: they have no token.

        With drafts of a fixed size, ``reached`` is ``i``.
        """
        self.steps[i] += 1
        (self.empty if reached is None else self.seconds[reached]).add(seconds)
        end = reached or 0
        for j in range(min(end + 1, i, len(self._sizes))):
            self._ended[j] = self._ended[j] * self.FADE + (j == end)
            self._passed[j] = self._passed[j] * self.FADE + 1

    def estimate(self) -> None:
        """Update the estimates: as measured, or interpolated between the nearest measured sizes.

        Times must rise with the size; where they do not, it is noise and neighbours are averaged.
        """
        count = len(self._sizes)
        rising = self._known(range(count))
        seconds = [self._between(i, rising) for i in range(count)]
        self.estimates = seconds[:1]
        earlier, going = 0.0, 1.0  # seconds of drafts that end earlier; share of the others
        for i in range(1, count):
            ended = going * self._ended[i - 1] / self._passed[i - 1]
            earlier += ended * (seconds[i - 1] if i > 1 else max(self.empty.value, seconds[0]))
            going -= ended
            self.estimates.append(earlier + going * seconds[i])

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
        self.estimate()
        return [value if self.known(i) else None for i, value in enumerate(self.estimates)]

    @classmethod
    def restored(cls, sizes: Sequence[int], seconds: Sequence[float | None]) -> "Timings":
        timed = cls(sizes)
        timed.seconds = [Window([] if value is None else [value] * Window.ENOUGH) for value in seconds]
        timed.steps = [each.count for each in timed.seconds]
        timed.last = [int(each.known) for each in timed.seconds]
        return timed


class Acceptance:
    """Expected accepted tokens within each size.

    Stored as ratios: the gain of each size increment over the gain of the one before, from drafts at least that
    large. When smaller sizes gain less, the estimates of larger sizes fall with them.

    Args:
        sizes: of drafts, 0 first.
        prior: gain of each increment.
        state: of another one, or empty parts.
    """

    FADE = 0.99  # decay per step
    WEIGHT = 2.0  # weight of the prior, in tokens

    def __init__(
        self,
        sizes: Sequence[int],
        prior: Sequence[float],
        state: Sequence[Sequence[Any]],
    ) -> None:
        within, of = state
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
        return [0.0, *accumulate(accumulate(ratios, mul))]

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

    def add_nodes(self, accepted: int, refused: int) -> None:
        """Add a step's number of accepted nodes, and of paths that ended at a node whose children were refused."""
        self._nodes[0] = self._nodes[0] * self.FADE + accepted
        self._nodes[1] = self._nodes[1] * self.FADE + accepted + refused

    def state(self) -> list[list[Any]]:
        return [list(self._within), list(self._records)]


def expected_gains(sizes: Sequence[int], prior: float, scored: bool) -> list[float]:
    """Prior gain of each size increment: for chains with a constant acceptance rate, for trees with diminishing
    returns per node."""
    if not scored:
        return [sum(prior**d for d in range(low + 1, high + 1)) for low, high in pairwise(sizes)]
    widths = [high - low for low, high in pairwise(sizes)]
    shares = (0.6 * width / before for before, width in pairwise(widths))
    return list(accumulate(shares, mul, initial=prior))
