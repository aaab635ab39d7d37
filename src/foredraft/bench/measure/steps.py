"""Step times, and acceptance rates in the terms of Leviathan et al. (arXiv 2211.17192)."""

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from foredraft.bench.measure.records import Run
from foredraft.core.errors import DataError


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
    runs = list(runs)
    reached = map(sum, zip_longest(*(run.drafted_by_depth for run in runs), fillvalue=0))
    accepted = map(sum, zip_longest(*(run.accepted_by_depth for run in runs), fillvalue=0))
    return [Depth(a, r) for a, r in zip_longest(accepted, reached, fillvalue=0)]


class Rate(NamedTuple):
    """An acceptance rate with bounds.

    Files have only sums over steps. With drafts of equal length these determine alpha; otherwise the number of paths
    that were accepted to the end of their draft is only known within bounds.
    """

    alpha: float
    least: float
    most: float


def rate(drafted: Sequence[int], accepted: Sequence[int]) -> Rate:
    """alpha = sum_d a_d / sum_d j_d: accepted / judged tokens, the maximum-likelihood estimate for a chain.

    n_d (``drafted``) steps had a draft, and a_d (``accepted``) an accepted path, of depth at least d = 1, 2, ...
    A token is judged if it was drafted and its parent accepted: j_1 = n_1, and j_d = a_(d-1) if all drafts are that
    deep. Otherwise j_d = a_(d-1) n_d / n_(d-1), its mean if draft length and acceptance are independent; its bounds are
    max(a_d, a_(d-1) - (n_(d-1) - n_d)) and min(a_(d-1), n_d).

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
    """Expected tokens per step, 1 + sum_d (n_d / steps) alpha^d: equation (1) averaged over draft lengths."""
    return 1.0 + sum(n * alpha**depth for depth, n in enumerate(drafted, start=1)) / steps
