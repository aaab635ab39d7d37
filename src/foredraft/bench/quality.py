"""Are two arms as good as each other? What can be said from which of the same prompts each of them answered rightly."""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

Z95 = 1.959963984540054
"""The normal law leaves 2.5% beyond this."""


@dataclass(frozen=True, slots=True)
class ShareRight:
    """Of ``judged`` answers ``right`` ones, with the Wilson score interval (1927): 95%, and sensible at 0 and at 1."""

    right: int
    judged: int

    @property
    def share(self) -> float:
        """NaN where nothing was judged."""
        return self.right / self.judged if self.judged else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """From 0 to 1 where nothing was judged."""
        n, z = self.judged, Z95
        if n == 0:
            return 0.0, 1.0
        middle = (self.right + z * z / 2) / (n + z * z)
        half = z / (n + z * z) * math.sqrt(self.right * (n - self.right) / n + z * z / 4)
        low = 0.0 if self.right == 0 else max(0.0, middle - half)
        return low, 1.0 if self.right == n else min(1.0, middle + half)


@dataclass(frozen=True, slots=True)
class ScoresCompared:
    """How often both arms were right, only one of them, or neither; each prompt counts once."""

    both: int
    only_a: int
    only_b: int
    neither: int

    @property
    def pairs(self) -> int:
        return self.both + self.only_a + self.only_b + self.neither

    @property
    def a(self) -> ShareRight:
        return ShareRight(self.both + self.only_a, self.pairs)

    @property
    def b(self) -> ShareRight:
        return ShareRight(self.both + self.only_b, self.pairs)

    @property
    def p_value(self) -> float:
        """McNemar's test (1947), exact and two-sided: are prompts that one arm alone gets right a fair coin's?

        A large value does not show that the arms are equal, least of all with few prompts; ``difference_interval``
        says how far apart they may be.
        """
        parted = self.only_a + self.only_b
        tail = sum(math.comb(parted, k) for k in range(min(self.only_a, self.only_b) + 1))
        return min(1.0, 2 * tail / 2**parted)  # integers divide exactly, however long they are

    @property
    def difference(self) -> float:
        """Share of b less that of a; NaN where there are no pairs."""
        return (self.only_b - self.only_a) / self.pairs if self.pairs else math.nan

    @property
    def difference_interval(self) -> tuple[float, float]:
        """95% for the difference of paired shares: Wald's, with half a prompt more in each cell (Agresti, Min 2005)."""
        n, a, b = self.pairs + 2, self.only_a + 0.5, self.only_b + 0.5
        middle, half = (b - a) / n, Z95 * math.sqrt(a + b - (b - a) ** 2 / n) / n
        return max(-1.0, middle - half), min(1.0, middle + half)


def share_right(scores: Mapping[Hashable, bool | None]) -> ShareRight:
    """Of one arm; prompts that nobody could judge (None) do not count."""
    judged = [right for right in scores.values() if right is not None]
    return ShareRight(sum(judged), len(judged))


def compare_scores(a: Mapping[Hashable, bool | None], b: Mapping[Hashable, bool | None]) -> ScoresCompared:
    """Two arms by prompt: what was judged in both of them counts.

    Args:
        a, b: one entry a prompt. Repeats of a prompt are no independent pairs: give one of them, or each on its own.
    """
    pairs = [(a[key], b[key]) for key in a if a[key] is not None and b.get(key) is not None]
    counted = {pair: pairs.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False))}
    return ScoresCompared(*counted.values())
