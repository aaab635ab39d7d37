"""What a benchmark's run says in the letters of the theory: alpha, k, c, and tokens and speed-up beside them.

The theory (``core/theory.py``) is of a chain whose tokens are accepted independently, each with chance alpha. Of a tree
alpha is per level: the chance that the accepted path goes on by one node, where the draft goes deep enough.
"""

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from statistics import median
from typing import NamedTuple

from foredraft.bench.measure.records import Run, RunFile
from foredraft.bench.measure.summary import PLAIN
from foredraft.core.errors import DataError
from foredraft.core.theory import BestLength, best_length

_LONGEST = 64


class Rate(NamedTuple):
    """An acceptance rate, and how far from it the true one of these counts can lie at most.

    Files keep sums over steps. If all drafts had one length these say everything and the three are equal; else how
    many of the accepted paths ended with their draft, unjudged, is known within bounds alone.
    """

    alpha: float
    least: float
    most: float


class Point(NamedTuple):
    """An arm in the theory's letters. Its tasks are pooled; models, temperatures and batches are kept apart.

    ``length`` is k, drafted levels a step, steps without a draft included; ``cost`` is c, seconds of drafting a level
    over seconds of a plain step; ``verify`` the target's forward of a drafting step in plain steps, which the theory
    takes to be 1. Predicted is what the theory makes of alpha, c and the lengths of the drafts. ``best`` is the length
    that it would choose, and its speed-up. ``pairs`` counts the runs that are paired with a plain one.
    """

    arm: str
    model: str
    temperature: float
    batch: int
    alpha: float
    least_alpha: float
    most_alpha: float
    length: float
    cost: float
    verify: float
    tokens: float
    predicted_tokens: float
    speed_up: float
    predicted_speed_up: float
    best: BestLength
    pairs: int


def overlay(file: RunFile) -> list[Point]:
    """A point for each arm that has drafted, in the file's order, from the runs that are paired with plain decoding.

    The speed-up is the median ratio of speeds over pairs (``Run.unit``); all else is of sums over them. Arms that do
    not say what drafting and verifying took, such as transformers' own, have no cost and are left out.

    Raises:
        DataError: there are no plain runs, none for one of the arms, or nothing was drafted.
    """
    plain = {run.unit: run for run in file.runs if run.arm == PLAIN and _whole(run)}
    groups: dict[tuple[str, str, float, int], list[Run]] = {}
    for run in file.runs:
        if run.arm != PLAIN and _whole(run) and run.verify_seconds > 0:
            groups.setdefault((run.arm, run.model, run.temperature, run.batch), []).append(run)
    drafting = {key: runs for key, runs in groups.items() if any(map(sum, (run.drafted_by_depth for run in runs)))}
    if not drafting:
        raise DataError("No arm of this run has drafted by our loop, so there is nothing to lay over the theory.")
    if not plain:
        raise DataError(f"This run has no plain decoding (arm {PLAIN!r}), so it has no costs and no speed-ups.")
    return [_point(runs, plain) for runs in drafting.values()]


def rate(drafted: Sequence[int], accepted: Sequence[int]) -> Rate:
    """alpha = sum_d a_d / sum_d j_d: accepted tokens over judged ones, the maximum of the likelihood for a chain.

    Of the steps, n_d (``drafted``) had a draft and a_d (``accepted``) an accepted path of at least d = 1, 2, ...
    A token is judged if it was drafted and its parent accepted: j_1 = n_1, and j_d = a_(d-1) as long as all drafts
    are so deep. Where they are not, j_d is a_(d-1) n_d / n_(d-1), what it is on average if the length of a draft says
    nothing about its acceptance; in truth it is not above a_(d-1) and n_d, and not below a_d and
    a_(d-1) - (n_(d-1) - n_d).

    Raises:
        DataError: nothing was drafted.
    """
    judged, least, most = 0.0, 0, 0
    before = parents = drafted[0] if drafted else 0
    for n, a in zip_longest(drafted, accepted, fillvalue=0):
        low, high = max(a, parents - (before - n)), min(parents, n)
        judged += min(max(parents * n / before, low), high) if before else 0.0
        least, most = least + low, most + high
        before, parents = n, a
    if not judged:
        raise DataError("Nothing was drafted, so there is no acceptance rate.")
    total = sum(accepted)
    return Rate(min(total / judged, 1.0), total / most, total / least)


def predicted_tokens(alpha: float, drafted: Sequence[int], steps: int) -> float:
    """Tokens a step by the theory, 1 + sum_d (n_d / steps) alpha^d: equation (1) averaged over the drafts' lengths."""
    return 1.0 + sum(n * alpha**depth for depth, n in enumerate(drafted, start=1)) / steps


def settings(points: Sequence[Point]) -> list[str]:
    """What sets points of one arm apart, where it differs between points at all: temperature, batch, model."""
    told = {name: len({getattr(point, name) for point in points}) > 1 for name in ("temperature", "batch", "model")}
    return [
        ", ".join(
            [f"T={point.temperature:g}"] * told["temperature"]
            + [f"batch {point.batch}"] * told["batch"]
            + [point.model or "no model"] * told["model"]
        )
        for point in points
    ]


def _whole(run: Run) -> bool:
    return not run.error and run.forwards > 0 and run.speed > 0


def _point(runs: list[Run], plain: dict[tuple, Run]) -> Point:
    first = runs[0]
    pairs = [(run, plain[run.unit]) for run in runs if run.unit in plain]
    drafted = _sums(run.drafted_by_depth for run, _ in pairs)
    if not sum(drafted):
        where = f"temperature {first.temperature:g}, batch {first.batch}"
        raise DataError(
            f"No run of {first.arm} that drafted ({where}) has plain decoding of the same prompts beside it."
        )
    steps = sum(run.forwards for run, _ in pairs)
    plain_seconds = sum(base.seconds - base.prefill_seconds for _, base in pairs)
    step_seconds = plain_seconds / sum(base.forwards for _, base in pairs)
    found = rate(drafted, _sums(run.accepted_by_depth for run, _ in pairs))
    length = sum(drafted) / steps
    cost = sum(run.draft_seconds for run, _ in pairs) / sum(drafted) / step_seconds
    predicted = predicted_tokens(found.alpha, drafted, steps)
    return Point(
        arm=first.arm,
        model=first.model,
        temperature=first.temperature,
        batch=first.batch,
        alpha=found.alpha,
        least_alpha=found.least,
        most_alpha=found.most,
        length=length,
        cost=cost,
        verify=sum(run.verify_seconds for run, _ in pairs) / steps / step_seconds,
        tokens=sum(run.tokens for run, _ in pairs) / steps,
        predicted_tokens=predicted,
        speed_up=median(run.speed / base.speed for run, base in pairs),
        predicted_speed_up=predicted / (1.0 + cost * length),
        best=best_length(found.alpha, cost, _LONGEST),
        pairs=len(pairs),
    )


def _sums(counts: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]
