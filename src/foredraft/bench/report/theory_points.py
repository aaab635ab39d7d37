"""Benchmark runs as points of the theory: measured alpha, k and c, with measured and predicted speed-up.

The theory (``core/theory.py``) assumes a chain whose tokens are accepted independently with probability alpha. For a
tree, alpha is per level: the probability that the accepted path continues by one node, if the draft is deep enough.
"""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from foredraft.bench.measure.records import Run, RunFile
from foredraft.bench.measure.steps import by_depth, predicted_tokens, rate
from foredraft.bench.measure.summary import PLAIN, grouped
from foredraft.core.errors import DataError
from foredraft.core.theory import BestLength, best_length


class Point(NamedTuple):
    """An arm with one model, temperature and batch size, its tasks pooled, in the theory's terms.

    ``length``: k, drafted levels per step, including steps without a draft. ``cost``: c, seconds to draft a level /
    seconds of a plain step. ``verify``: seconds of the target's forward / seconds of a plain step, 1 in the theory.
    ``predicted_*``: the theory's values for alpha, c and the draft lengths. ``best``: the theory's best length and its
    speed-up. ``pairs``: number of runs paired with a plain run.
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


def theory_points(file: RunFile) -> list[Point]:
    """One point per drafting arm, in file order, from the runs paired with plain decoding.

    The speed-up is the median ratio over pairs (``Run.unit``); all other values are from sums. Arms without draft and
    verification times, such as transformers' own, are left out.

    Raises:
        DataError: no plain runs, none for one of the arms, or no drafts.
    """
    plain = {run.unit: run for run in file.runs if run.arm == PLAIN and _usable(run)}
    timed = [run for run in file.runs if run.arm != PLAIN and _usable(run) and run.verify_seconds > 0]
    groups = grouped(timed, lambda run: (run.arm, run.model, run.temperature, run.batch)).values()
    drafting = [runs for runs in groups if any(sum(run.drafted_by_depth) for run in runs)]
    if not drafting:
        raise DataError("This file has no drafting arm of foredraft's loop to compare with the theory.")
    if not plain:
        raise DataError(f"This file has no plain decoding: run foredraft bench with --drafter {PLAIN} as well.")
    return [_point(runs, plain) for runs in drafting]


def settings(points: Sequence[Point]) -> list[str]:
    """A label per point: those of temperature, batch and model that differ between points."""
    varies = {name: len({getattr(point, name) for point in points}) > 1 for name in ("temperature", "batch", "model")}
    return [
        ", ".join(
            [f"T={point.temperature:g}"] * varies["temperature"]
            + [f"batch {point.batch}"] * varies["batch"]
            + [point.model or "no model"] * varies["model"]
        )
        for point in points
    ]


def _usable(run: Run) -> bool:
    return not run.error and run.forwards > 0 and run.speed > 0


def _point(runs: list[Run], plain: dict[tuple, Run]) -> Point:
    first = runs[0]
    pairs = [(run, plain[run.unit]) for run in runs if run.unit in plain]
    depths = by_depth(run for run, _ in pairs)
    drafted = [depth.reached for depth in depths]
    if not sum(drafted):
        where = f"temperature {first.temperature:g}, batch {first.batch}"
        raise DataError(
            f"No drafting run of {first.arm} ({where}) has a plain run of the same prompts to compare with."
        )
    steps = sum(run.forwards for run, _ in pairs)
    plain_seconds = sum(base.seconds - base.prefill_seconds for _, base in pairs)
    step_seconds = plain_seconds / sum(base.forwards for _, base in pairs)
    found = rate(drafted, [depth.accepted for depth in depths])
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
        best=best_length(found.alpha, cost),
        pairs=len(pairs),
    )
