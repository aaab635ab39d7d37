"""Which parts of a model can a draft do without? Searched on texts of the target's own (Draft & Verify,
arXiv:2309.08168, looks for them with Bayesian optimisation).

First part after part is left out, each time the one that costs least, to see how far that goes; then parts are
exchanged at random around the best that was found.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from foredraft.bench.tune.skip_trials import Sublayer, Trial
from foredraft.core.errors import OptionError

_WIDTH = 6
"""Of the parts that could go next, so many of those that looked best the last time are tried again."""
_SHARE = 0.75
"""At most so many of all parts are left out one after another."""


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """How long to look.

    trials: sets of parts that are tried, at most.
    seed: of the random exchanges.
    """

    trials: int = 250
    seed: int = 0

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise OptionError("trials must be 1 or more.")


def search(
    parts: list[Sublayer],
    judge: Callable[[frozenset[Sublayer]], Trial],
    effort: SearchBudget,
    tell: Callable[[int, Trial], None] = lambda number, best: None,
) -> Trial:
    """The set of parts whose absence brings most tokens for the weights that are read.

    Args:
        judge: tries a set; see ``Judge``. The same set may be asked for again.
        tell: is told after each trial how many there were, and which is the best.

    Returns:
        the best trial; its ``score`` is below 1 where nothing pays.
    """
    bench = _Bench(judge, effort.trials, tell)
    if not bench.full:
        _one_after_another(parts, bench)
    if not bench.full:
        _exchange(parts, bench, random.Random(effort.seed))
    assert bench.best is not None
    return bench.best


class _Bench:
    """Tries sets, each once, until there were enough."""

    def __init__(
        self, judge: Callable[[frozenset[Sublayer]], Trial], most: int, tell: Callable[[int, Trial], None]
    ) -> None:
        self._judge = judge
        self._most = most
        self._tell = tell
        self._tried: dict[frozenset[Sublayer], Trial] = {}
        self.best: Trial | None = None

    @property
    def full(self) -> bool:
        return len(self._tried) >= self._most

    def __call__(self, without: frozenset[Sublayer]) -> Trial:
        if without not in self._tried:
            trial = self._tried[without] = self._judge(without)
            if self.best is None or trial.score > self.best.score:
                self.best = trial
            self._tell(len(self._tried), self.best)
        return self._tried[without]


def _one_after_another(parts: list[Sublayer], bench: _Bench) -> None:
    """Leave out one part more, again and again, beyond where it pays: what does not pay yet may with others."""
    gone: frozenset[Sublayer] = frozenset()
    looked = dict.fromkeys(parts, 0.0)  # the score of the set with this part gone, when it was last tried
    for _ in range(int(_SHARE * len(parts))):
        likely = sorted(looked, key=lambda part: (-looked[part], part))
        for part in likely[:_WIDTH] if gone else likely:
            if bench.full:
                return
            looked[part] = bench(gone | {part}).score
        # those that were not tried again this time were worse the last time, with more left
        part = max(likely[:_WIDTH] if gone else likely, key=lambda part: (looked[part], part))
        gone |= {part}
        del looked[part]


def _exchange(parts: list[Sublayer], bench: _Bench, chance: random.Random) -> None:
    """Climb from the best: one part or two change sides, and from what is better the search goes on."""
    fruitless = 0
    while not bench.full and fruitless < 20 * len(parts):
        assert bench.best is not None
        changed = chance.sample(parts, chance.choice((1, 2)))
        before = bench.best
        without = before.without.symmetric_difference(changed)
        if without:  # else everything is left in, and a draft costs as much as the target
            bench(without)
        fruitless = 0 if bench.best is not before else fruitless + 1
