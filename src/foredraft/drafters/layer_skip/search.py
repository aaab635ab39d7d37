"""Search for the sublayers that a layer_skip draft can skip (Draft & Verify, arXiv:2309.08168, uses Bayesian
optimisation).

Greedy first: skip one sublayer more each time, the one that costs least acceptance. Then random local search around
the best set.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from foredraft.core.options import check_bounds, option

_WIDTH = 6
"""Number of candidates, best last scores first, that a greedy round tries again."""
_SHARE = 0.75
"""The greedy phase skips at most this fraction of all sublayers."""


KINDS = ("attention", "mlp")


@dataclass(frozen=True, order=True, slots=True)
class Sublayer:
    """A sublayer that can be skipped. ``kind`` is one of ``KINDS``; the first layer is 0."""

    layer: int
    kind: str


def layers_by_kind(parts: Iterable[Sublayer]) -> dict[str, tuple[int, ...]]:
    """The layer numbers of each kind, rising."""
    ordered = sorted(parts)
    return {kind: tuple(part.layer for part in ordered if part.kind == kind) for kind in KINDS}


@dataclass(frozen=True, slots=True)
class SkipTrial:
    """Result for a set of skipped sublayers.

    ``tokens[k - 1]``: mean tokens per step, including the bonus token, at draft length k. ``cost``: weights that a
    draft step reads, as a fraction of the full model's.
    """

    without: frozenset[Sublayer]
    cost: float
    tokens: tuple[float, ...]

    @property
    def best(self) -> int:
        """The best draft length."""
        return max(range(1, len(self.tokens) + 1), key=lambda k: (self.rate(k), -k))

    def rate(self, length: int) -> float:
        """Tokens per full read of the weights: each drafted token costs ``cost``, verification 1."""
        return self.tokens[length - 1] / (1.0 + length * self.cost)

    @property
    def score(self) -> float:
        """Speed-up over plain decoding if time is proportional to weights read."""
        return self.rate(self.best)


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """Limits of a search."""

    trials: int = option(250, "number of layer sets to try.")
    seed: int = option(0, "seed of outputs and search.")

    def __post_init__(self) -> None:
        check_bounds(self, least={"trials": 1})


def search(
    parts: list[Sublayer],
    evaluate: Callable[[frozenset[Sublayer]], SkipTrial],
    budget: SearchBudget,
    report: Callable[[int, SkipTrial], None] = lambda number, best: None,
) -> SkipTrial:
    """Find the set of skipped sublayers with the most tokens per weight read.

    Args:
        evaluate: evaluates a set; see ``SkipEvaluator``.
        report: called after each trial with the number of trials and the best one.

    Returns:
        the best trial; its ``score`` is below 1 if no set pays.
    """
    trials = _Trials(evaluate, budget.trials, report)
    if not trials.full:
        _greedy(parts, trials)
    if not trials.full:
        _local_search(parts, trials, random.Random(budget.seed))
    assert trials.best is not None
    return trials.best


class _Trials:
    """Evaluates each set once, up to a limit."""

    def __init__(
        self, evaluate: Callable[[frozenset[Sublayer]], SkipTrial], limit: int, report: Callable[[int, SkipTrial], None]
    ) -> None:
        self._evaluate = evaluate
        self._limit = limit
        self._report = report
        self._tried: dict[frozenset[Sublayer], SkipTrial] = {}
        self.best: SkipTrial | None = None

    @property
    def full(self) -> bool:
        return len(self._tried) >= self._limit

    def __call__(self, without: frozenset[Sublayer]) -> SkipTrial:
        if without not in self._tried:
            trial = self._tried[without] = self._evaluate(without)
            if self.best is None or trial.score > self.best.score:
                self.best = trial
            self._report(len(self._tried), self.best)
        return self._tried[without]


def _greedy(parts: list[Sublayer], trials: _Trials) -> None:
    """Skip one sublayer more per round, even past the point where it pays: a larger set may pay again."""
    skipped: frozenset[Sublayer] = frozenset()
    scores = dict.fromkeys(parts, 0.0)  # each sublayer's last score
    for _ in range(int(_SHARE * len(parts))):
        order = sorted(scores, key=lambda part: (-scores[part], part))
        for part in order[:_WIDTH] if skipped else order:
            if trials.full:
                return
            scores[part] = trials(skipped | {part}).score
        # candidates not tried in this round had worse scores
        part = max(order[:_WIDTH] if skipped else order, key=lambda part: (scores[part], part))
        skipped |= {part}
        del scores[part]


def _local_search(parts: list[Sublayer], trials: _Trials, rng: random.Random) -> None:
    """Hill climbing from the best set: toggle one or two sublayers."""
    failures = 0
    while not trials.full and failures < 20 * len(parts):
        assert trials.best is not None
        changed = rng.sample(parts, rng.choice((1, 2)))
        before = trials.best
        without = before.without.symmetric_difference(changed)
        if without:  # with nothing skipped, a draft costs as much as the target
            trials(without)
        failures = 0 if trials.best is not before else failures + 1
