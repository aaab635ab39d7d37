"""Step times of runs, and the speed-up that Leviathan et al.'s formula (arXiv 2211.17192) predicts from them."""

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from foredraft.bench.measure.records import Run
from foredraft.bench.report.theory_points import predicted_tokens, rate


class StepTimes(NamedTuple):
    """Seconds per step, without prefill: drafting, the target's forward with verification, everything else."""

    draft: float
    verify: float
    other: float

    @property
    def seconds(self) -> float:
        return self.draft + self.verify + self.other


def steps(runs: Iterable[Run]) -> float:
    """Batch steps, estimated as the mean over a batch's requests; exact at batch size 1."""
    return sum((run.forwards / len(run.prompts) for run in runs if run.prompts), 0.0)


def step_times(runs: Sequence[Run]) -> StepTimes | None:
    """Mean step times; None if the parts were not timed, as with transformers' own generate."""
    timed = [run for run in runs if run.verify_seconds > 0 and run.forwards]
    count = steps(timed)
    if not count:
        return None
    draft, verify = sum(run.draft_seconds for run in timed), sum(run.verify_seconds for run in timed)
    decoding = sum(run.seconds - run.prefill_seconds for run in timed)
    return StepTimes(draft / count, verify / count, max(0.0, decoding - draft - verify) / count)


class Depth(NamedTuple):
    """Of ``reached`` steps with a draft this deep, ``accepted`` had an accepted path this deep."""

    accepted: int
    reached: int


def by_depth(runs: Iterable[Run]) -> list[Depth]:
    """Totals over all runs, for depth 1, 2, ..."""
    reached: list[int] = []
    accepted: list[int] = []
    for run in runs:
        reached = [a + b for a, b in zip_longest(reached, run.drafted_by_depth, fillvalue=0)]
        accepted = [a + b for a, b in zip_longest(accepted, run.accepted_by_depth, fillvalue=0)]
    return [Depth(a, r) for a, r in zip_longest(accepted, reached, fillvalue=0)]


def alpha(runs: Iterable[Run]) -> float | None:
    """Probability that a drafted level is accepted if the previous one was, pooled over depths (see ``rate``).

    For a tree: that one of the level's nodes is accepted. None if nothing was drafted.
    """
    depths = by_depth(runs)
    return rate([d.reached for d in depths], [d.accepted for d in depths]).alpha if depths else None


def predicted(runs: Sequence[Run], plain: Sequence[Run]) -> float | None:
    """Speed-up by Theorem 3.8, from measured acceptance and draft time.

    Takes alpha from the depths, tokens per step averaged over draft lengths, and c k: drafting time per step over the
    time of a plain step. The formula assumes independent acceptances, forwards of k + 1 rows at the cost of one, and no
    other costs.
    """
    ours, theirs, chance = step_times(runs), step_times(plain), alpha(runs)
    forwards = sum(run.forwards for run in runs)
    if ours is None or theirs is None or chance is None or not forwards:
        return None
    tokens = predicted_tokens(chance, [depth.reached for depth in by_depth(runs)], forwards)
    return tokens / (1.0 + ours.draft / theirs.seconds)
