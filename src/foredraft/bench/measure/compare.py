"""Is B slower than A beyond noise? Compares speed-ups, each measured within its own file, never raw speeds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from foredraft.bench.measure.records import RunFile
from foredraft.bench.measure.summary import PLAIN, THEIRS, RunPair, Setting, acceptance_length, pairs
from foredraft.core.errors import OptionError

CONFIDENCE = 0.95
FEWEST = 6
"""Fewest units for an interval: the range of five values is not yet a 95 % interval of the median."""
Verdict = Literal["slower", "faster", "the same", "too few"]


@dataclass(frozen=True, slots=True)
class Change:
    """Change of an arm's speed-up over its baseline from A to B.

    ``ratio``: median over common units of B's speed-up / A's; ``low`` and ``high``: its 95 % confidence interval, None
    with too few units.
    """

    setting: Setting
    arm: str
    baseline: str
    units: int
    ratio: float
    low: float | None
    high: float | None
    lengths: tuple[float, float]
    verdict: Verdict


def compare(before: RunFile, after: RunFile, tolerance: float = 0.05) -> list[Change]:
    """Compare every common arm against plain decoding, and plain decoding against transformers'.

    Args:
        tolerance: report a change if, with 95 % confidence, it exceeds this fraction.

    Raises:
        OptionError: bad tolerance, or no common unit with a baseline.
    """
    if not 0 <= tolerance < 1:
        raise OptionError("--tolerance must be at least 0 and below 1.")
    found: list[Change] = []
    for baseline in (PLAIN, THEIRS):
        first, second = _by_arm(before, baseline), _by_arm(after, baseline)
        for (setting, arm), old in first.items():
            comparable = arm == PLAIN if baseline == THEIRS else arm != PLAIN and not arm.startswith(THEIRS)
            new = second.get((setting, arm), {})
            units = [unit for unit in old if unit in new]
            if comparable and units:
                chosen = [(old[unit], new[unit]) for unit in units]
                found.append(_change(setting, arm, baseline, chosen, tolerance))
    if not found:
        raise OptionError("The two files share no arm on the same prompts with a baseline, so they cannot be compared.")
    return found


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Distribution-free 95 % confidence interval of the median; None for fewer than six values.

    The number of values below the median is binomial, so the interval from the r-th smallest to the r-th largest value
    contains it with probability 1 - 2 P(fewer than r).
    """
    ordered, count = sorted(values), len(values)
    tail, rank = 0.0, 0
    while rank < count // 2 and tail + math.comb(count, rank) / 2**count <= (1 - CONFIDENCE) / 2:
        tail += math.comb(count, rank) / 2**count
        rank += 1
    return (ordered[rank - 1], ordered[count - rank]) if rank else None


def _by_arm(file: RunFile, baseline: str) -> dict[tuple[Setting, str], dict[tuple[object, ...], RunPair]]:
    """Pairs by setting and arm, then by unit."""
    found: dict[tuple[Setting, str], dict[tuple[object, ...], RunPair]] = {}
    for key, some in pairs(file, baseline).items():
        own = found.setdefault((key.setting, key.arm), {})
        own |= {pair.run.unit: pair for pair in some if pair.run.speed > 0 and pair.baseline.speed > 0}
    return found


def _change(
    setting: Setting, arm: str, baseline: str, units: Sequence[tuple[RunPair, RunPair]], tolerance: float
) -> Change:
    ratios = [_speed_up(new) / _speed_up(old) for old, new in units]
    bounds = interval(ratios)
    verdict: Verdict = "the same"
    if bounds is None:
        verdict = "too few"
    elif bounds[1] < 1 - tolerance:
        verdict = "slower"
    elif bounds[0] > 1 / (1 - tolerance):
        verdict = "faster"
    first, second = (acceptance_length(pair.run for pair in side) or 0.0 for side in zip(*units, strict=True))
    low, high = bounds or (None, None)
    return Change(setting, arm, baseline, len(units), statistics.median(ratios), low, high, (first, second), verdict)


def _speed_up(pair: RunPair) -> float:
    return pair.run.speed / pair.baseline.speed
