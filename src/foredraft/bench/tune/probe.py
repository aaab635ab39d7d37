"""A drafter at its largest, step by step: what was drafted, how far it was accepted, where the time went.

What a smaller draft would have brought is read off the same steps: a tree of n nodes and depth d is the best n of the
drafted nodes down to d, and its accepted path is a beginning of the path that was accepted.
"""

import bisect
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from foredraft.bench.measure.recording_drafter import Onlooker
from foredraft.core.draft import Draft, Verdict
from foredraft.core.drafter import Plan, View
from foredraft.engine.policy import Policy
from foredraft.engine.step import StepDone


class Shape(NamedTuple):
    """How large a draft may be; 0 is as large as the drafter makes it."""

    nodes: int = 0
    depth: int = 0


class Outcome(NamedTuple):
    """What a step of some shape brings: tokens with the bonus, nodes that the target reads besides the root, levels."""

    tokens: int
    nodes: int
    levels: int


@dataclass(frozen=True, slots=True)
class Step:
    """One row's share of one step. ``scores`` and ``depths`` are of all drafted nodes (no scores: they were listed by
    depth), ``path`` are the accepted ones of them, by their places there. ``short``: only a few levels were asked for,
    to see what levels cost. ``first``: the drafter had a prompt to read, so its time says nothing."""

    depths: tuple[int, ...]
    scores: tuple[float, ...]
    path: tuple[int, ...]
    levels: int
    draft_seconds: float
    verify_seconds: float
    short: bool
    first: bool

    def under(self, shape: Shape) -> Outcome:
        """What it would have been with a smaller draft.

        Nodes that stood too deep make room for others in a smaller tree: these are counted, though not known.
        """
        deepest = shape.depth or self.levels
        allowed = [place for place, depth in enumerate(self.depths) if depth <= deepest]
        if self.scores and shape.nodes:
            allowed = sorted(allowed, key=lambda place: -self.scores[place])
        kept = set(allowed[: shape.nodes or len(allowed)])
        accepted = 0
        while accepted < len(self.path) and self.path[accepted] in kept:
            accepted += 1
        nodes = min(shape.nodes, len(self.depths)) if self.scores and shape.nodes else len(kept)
        return Outcome(1 + accepted, nodes, min(self.levels, deepest))


@final
class Tap(Onlooker):
    """Keeps the last draft and verdict, as they are: to look at them takes no time here."""

    last: tuple[Draft, Verdict] | None = None

    def _see(self, draft: Draft, verdict: Verdict) -> None:
        self.last = draft, verdict


@final
class Probe(Policy):
    """Always the largest draft (around plain decoding none), or while ``short`` is set one of so many levels; and a
    record of each step.

    The two are not mixed in one text: a step after a short one that was accepted whole begins in the middle of what
    the draft gets right, and would be taken for better than it is.

    Args:
        tap: around the drafter of the same loop.
        confidence: as the method's options have it.
    """

    def __init__(self, tap: Tap, confidence: float = 0.0) -> None:
        self._tap = tap
        self._confidence = confidence
        self._known: set[int] = set()
        self.short = 0
        self.steps: list[Step] = []

    @property
    def learns(self) -> bool:
        return False

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        longest = min(self.short or self._tap.needs.longest, self._tap.needs.longest)
        return Plan(tuple(min(longest, limit) for limit in limits), self._confidence)

    def observe(self, view: View, plan: Plan, done: StepDone) -> None:
        first = not self._known.issuperset(view.rows)
        self._known.update(view.rows)
        if self._tap.last is None or (self._tap.needs.longest and not plan.length):
            return  # the end of a text: there was no room for a draft
        draft, verdict = self._tap.last
        parents, paths = draft.tree.parents.tolist(), verdict.path.tolist()
        scores = None if draft.scores is None else draft.scores.tolist()
        for row in range(len(view.rows)):
            depths = _depths(parents[row])
            drafted = [node for node in range(1, len(depths)) if depths[node] > 0]
            places = {node: place for place, node in enumerate(drafted)}
            step = Step(
                depths=tuple(depths[node] for node in drafted),
                scores=() if scores is None else tuple(scores[row][node] for node in drafted),
                path=tuple(places[node] for node in paths[row] if node in places),
                levels=done.levels,
                draft_seconds=done.draft_seconds,
                verify_seconds=done.verify_seconds,
                short=self.short > 0,
                first=first,
            )
            self.steps.append(step)

    def release(self, row: int) -> None:
        self._known.discard(row)


_FEW = 4


@dataclass(frozen=True, slots=True)
class Fit:
    """Straight lines from one measured point to the next; level beyond them, where nothing was seen."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    def __call__(self, x: int | float) -> float:
        if not self.xs:
            return 0.0
        if x <= self.xs[0] or len(self.xs) == 1:
            return self.ys[0]
        right = min(bisect.bisect_left(self.xs, x), len(self.xs) - 1)
        (x0, x1), (y0, y1) = self.xs[right - 1 : right + 1], self.ys[right - 1 : right + 1]
        return y0 + (y1 - y0) * min((x - x0) / (x1 - x0), 1.0)

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> "Fit":
        """Of (x, y) measurements: what is typical at each x that was seen more than a few times, or else at any."""
        groups: dict[float, list[float]] = {}
        for x, y in points:
            groups.setdefault(x, []).append(y)
        known = {x: typical(ys) for x, ys in groups.items() if len(ys) >= _FEW}
        known = known or {x: typical(ys) for x, ys in groups.items()}
        return cls(tuple(sorted(known)), tuple(known[x] for x in sorted(known)))


def typical(values: Sequence[float]) -> float:
    """The mean, but no value counts for more than three times the median: a machine's stall is not the work's."""
    most = 3 * statistics.median(values)
    return statistics.fmean(min(value, most) if most > 0 else value for value in values)


def _depths(parents: Sequence[int]) -> list[int]:
    """The depth of each node, the root's being 0; -1 for padding."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1 if parent >= 0 else -1)
    return depths
