"""What the throughput policy has measured: how often drafted tokens are accepted, and what steps take."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add
from typing import Any

import numpy as np

from foredraft.core.worth import Features
from foredraft.engine.step import SIZES


class AcceptanceModel:
    """The probability that a child of an accepted node is accepted: logistic regression, learned online.

    Each step is one of Newton's method, on a curvature that forgets old steps in favour of the prior: that the draft's
    own probabilities are right.
    """

    FADE = 0.998  # per step
    PRIOR = (0.0, 1.0, 0.0, 0.0)
    PRECISION = (2.0, 8.0, 4.0, 4.0)  # of the prior: about the information of so many tokens

    def __init__(self, weights: Sequence[float] = PRIOR) -> None:
        self._weights = np.array(weights, dtype=float)
        self._curvature = np.diag(self.PRECISION)

    @property
    def weights(self) -> Features:
        return Features(*self._weights.tolist())

    def learn(self, features: Sequence[Features], accepted: Sequence[bool]) -> None:
        """Learn from the children of accepted nodes of one step."""
        x = np.array(features)
        chances = 1 / (1 + np.exp(-x @ self._weights))
        prior = (1 - self.FADE) * np.diag(self.PRECISION)
        self._curvature = self.FADE * self._curvature + prior + (x.T * (chances * (1 - chances))) @ x
        slope = x.T @ (np.array(accepted) - chances) + prior @ (np.array(self.PRIOR) - self._weights)
        self._weights = self._weights + np.linalg.solve(self._curvature, slope)


class Window:
    """A robust mean of the latest values: outliers, such as stalls of the machine, count as ``STALL`` medians."""

    KEPT, STALL = 24, 1.5

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
    def value(self) -> float:
        """The mean; 0 without values."""
        if self._value is None:
            ordered = sorted(self._latest)
            most = self.STALL * ordered[(len(ordered) - 1) // 2] if ordered else 0.0
            self._value = sum(min(value, most) for value in ordered) / max(len(ordered), 1)
        return self._value


class ForwardTimes:
    """Seconds of a step without its draft, by the nodes of its forward."""

    SLOPE = 0.02  # assumed extra time of a node, as a share of a plain step, beyond the sizes that are known
    ENOUGH = 3  # steps from which on a size is known, so that a stall does not decide; plain steps are always
    STALE = 1000  # steps after which a size that was not used counts as not measured

    def __init__(self, seconds: Mapping[int, float] = {}) -> None:
        self._seconds = {size: Window([value] * (self.ENOUGH + 1)) for size, value in seconds.items()}  # exact mean
        self._last = dict.fromkeys(seconds, 0)
        self._now = 0

    def add(self, size: int, seconds: float) -> None:
        """The first step of a size is not counted: kernels are compiled in it."""
        self._now += 1
        self._last[size] = self._now
        if size in self._seconds:
            self._seconds[size].add(seconds)
        else:
            self._seconds[size] = Window()

    @property
    def steps(self) -> int:
        """Steps that were timed."""
        return self._now

    @property
    def plain(self) -> float:
        """Seconds of a step without a draft; 0 if not known."""
        return self._seconds[1].value if 1 in self._seconds else 0.0

    def measured(self) -> dict[int, float]:
        """Seconds by size, of the sizes that were used."""
        return {size: each.value for size, each in sorted(self._seconds.items()) if each.count}

    def table(self, most: int) -> dict[int, float]:
        """Seconds by size, up to the first that holds ``most`` nodes; empty before anything was measured."""
        known = {
            size: each
            for size, each in sorted(self._seconds.items())
            if (size == 1 and each.count) or (each.count >= self.ENOUGH and self._now - self._last[size] < self.STALE)
        }
        if not known:
            return {}
        sizes, rising = list(known), rising_means([(each.value, each.count) for each in known.values()])
        last = [size for size in SIZES if size < most] + [size for size in (*SIZES, most) if size >= most][:1]
        found = {size: float(np.interp(size, sizes, rising)) for size in last}
        beyond = self.SLOPE * rising[0]
        return {size: seconds + beyond * max(size - sizes[-1], 0) for size, seconds in found.items()}


def rising_means(measured: Sequence[tuple[float, int]]) -> list[float]:
    """Isotonic regression of (mean, count): larger forwards take no less time; where they do, it is noise."""
    pools: list[tuple[float, int, int]] = []  # sum, weight, entries
    for value, count in measured:
        pools.append((value * count, count, 1))
        while len(pools) > 1 and pools[-2][0] * pools[-1][1] > pools[-1][0] * pools[-2][1]:
            pools[-2:] = [tuple(map(add, *pools[-2:]))]
    return [total / weight for total, weight, entries in pools for _ in range(entries)]


@dataclass
class Pace:
    """What steps of one batch size and temperature bring and take.

    ``tokens``, ``seconds``: decayed sums over steps that draft. ``step``, ``draft``, ``level``: seconds of such a step,
    of its draft, and of a level of it. ``curve``: the mean value of the best n nodes of a row together, by n from 0 on.
    ``tried``, ``passed``: decayed numbers of accepted nodes with children, and of those with an accepted child.
    """

    FADE = 0.97
    forward: ForwardTimes = field(default_factory=ForwardTimes)
    step: Window = field(default_factory=Window)
    level: Window = field(default_factory=Window)
    draft: Window = field(default_factory=Window)
    tokens: float = 0.0
    seconds: float = 0.0
    curve: list[float] = field(default_factory=lambda: [0.0])
    tried: float = 1.0
    passed: float = 1.0
    pays: bool = True  # drafting, as far as is known
    since: int = 0  # steps since the last trial of what pays less
    trial: int = 0  # steps of this trial that are left

    @property
    def rate(self) -> float:
        """Tokens per second of steps that draft."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def drafted(self, tokens: int, seconds: float, levels: int, draft_seconds: float, *, counts: bool = True) -> None:
        """Add a step that drafted. A stall counts as two steps. ``counts``: for the rate."""
        self.step.add(seconds)
        self.draft.add(draft_seconds)
        if counts:
            self.count(tokens, min(seconds, 2 * self.step.value))
        if levels:
            self.level.add(draft_seconds / levels)

    def count(self, tokens: int, seconds: float) -> None:
        """Add a step to the rate."""
        self.tokens = self.FADE * self.tokens + tokens
        self.seconds = self.FADE * self.seconds + seconds

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

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> "Pace":
        """From a policy's ``state``."""
        forward = ForwardTimes({int(size): float(seconds) for size, seconds in saved["forward"].items()})
        level = Window([float(saved["level"])] if saved["level"] else [])
        curve = [float(value) for value in saved["curve"]]
        return cls(forward, level=level, tokens=float(saved["tokens"]), seconds=float(saved["seconds"]), curve=curve)
