"""Records a drafter's steps at its largest size: drafted nodes, accepted path, times.

Smaller drafts are derived from the same steps: a tree of n nodes and depth d is the best n drafted nodes down to d, and
its accepted path is a prefix of the recorded one.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np

from foredraft.core.drafter import Plan, View
from foredraft.engine.policy import Policy
from foredraft.engine.step import StepResult


class DraftSize(NamedTuple):
    """Size limits of a draft; 0 is unlimited."""

    nodes: int = 0
    depth: int = 0


class StepOutcome(NamedTuple):
    """A step's tokens including the bonus, verified nodes without the root, and drafted levels."""

    tokens: int
    nodes: int
    levels: int


@dataclass(frozen=True, slots=True)
class ProbeStep:
    """One row of one step.

    ``depths`` and ``scores``: of the drafted nodes; without scores, nodes are in order of depth. ``path``: indices of
    the accepted nodes. ``short``: the draft was limited to a few levels, to measure their cost. ``first``: the draft
    time includes the drafter's prefill. ``copied``: the draft is a copy (``Drafter.copies``), whose length no size
    limits.
    """

    depths: tuple[int, ...]
    scores: tuple[float, ...]
    path: tuple[int, ...]
    levels: int
    draft_seconds: float
    verify_seconds: float
    short: bool
    first: bool
    copied: bool = False

    def under(self, shape: DraftSize) -> StepOutcome:
        """The outcome with a smaller draft.

        A shallower tree of the same size would hold other nodes in place of the deep ones; they count as rejected.
        """
        if self.copied:
            return StepOutcome(1 + len(self.path), len(self.depths), self.levels)
        deepest = shape.depth or self.levels
        allowed = [place for place, depth in enumerate(self.depths) if depth <= deepest]
        if self.scores and shape.nodes:
            allowed = sorted(allowed, key=lambda place: -self.scores[place])
        kept = set(allowed[: shape.nodes or len(allowed)])
        accepted = 0
        while accepted < len(self.path) and self.path[accepted] in kept:
            accepted += 1
        nodes = min(shape.nodes, len(self.depths)) if self.scores and shape.nodes else len(kept)
        return StepOutcome(1 + accepted, nodes, min(self.levels, deepest))


@final
class Probe(Policy):
    """A policy that always drafts the largest size, or ``short`` levels if set, and records each step.

    Do not change ``short`` within a request: after a fully accepted short draft, the next draft starts inside an easy
    span and looks better than it is.

    Args:
        longest: of the same loop's drafter, see ``Needs``.
        confidence: the confidence threshold of the method's options.
    """

    def __init__(self, longest: int, confidence: float = 0.0) -> None:
        self._longest = longest
        self._confidence = confidence
        self._known: set[int] = set()
        self.short = 0
        self.steps: list[ProbeStep] = []

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        longest = min(self.short or self._longest, self._longest)
        return Plan(tuple(min(longest, limit) for limit in limits), self._confidence)

    def observe(self, view: View, plan: Plan, step: StepResult) -> None:
        first = not self._known.issuperset(view.rows)
        self._known.update(view.rows)
        copied = any(plan.copies)
        if step.tree is None or (self._longest and not plan.length and not copied):
            return  # end of the request: no room for a draft
        for result in step.rows:
            depths, scores = _depths(result.nodes.parents), result.nodes.scores
            drafted = [node for node in range(1, len(depths)) if depths[node] > 0]
            places = {node: place for place, node in enumerate(drafted)}
            probed = ProbeStep(
                depths=tuple(depths[node] for node in drafted),
                scores=() if scores is None else tuple(scores[node] for node in drafted),
                path=tuple(places[node] for node in result.path),
                levels=step.levels,
                draft_seconds=step.draft_seconds,
                verify_seconds=step.verify_seconds,
                short=self.short > 0,
                first=first,
                copied=copied,
            )
            self.steps.append(probed)

    def release(self, row: int) -> None:
        self._known.discard(row)


_MIN_SAMPLES = 4


@dataclass(frozen=True, slots=True)
class Fit:
    """Linear interpolation of measured points; constant outside their range."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    def __call__(self, x: int | float) -> float:
        return float(np.interp(x, self.xs, self.ys)) if self.xs else 0.0

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> "Fit":
        """Fit (x, y) measurements: the typical y at each x with enough samples, or at every x if none has enough."""
        groups: dict[float, list[float]] = {}
        for x, y in points:
            groups.setdefault(x, []).append(y)
        known = {x: typical(ys) for x, ys in groups.items() if len(ys) >= _MIN_SAMPLES}
        known = known or {x: typical(ys) for x, ys in groups.items()}
        return cls(tuple(sorted(known)), tuple(known[x] for x in sorted(known)))


def typical(values: Sequence[float]) -> float:
    """The mean, with values clipped at three times the median to discount stalls of the machine."""
    most = 3 * statistics.median(values)
    return statistics.fmean(min(value, most) if most > 0 else value for value in values)


def _depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node: 0 for the root, -1 for padding."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1 if parent >= 0 else -1)
    return depths
