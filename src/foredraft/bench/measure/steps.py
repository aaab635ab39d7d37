"""What a step is made of, and what Leviathan et al.'s formula (arXiv 2211.17192) promises for such steps."""

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from foredraft.bench.measure.records import Run
from foredraft.bench.report.theory_points import predicted_tokens, rate


class StepTimes(NamedTuple):
    """Seconds a step, prefill not among them: drafting, the target's forward with its verdict, everything else."""

    draft: float
    verify: float
    other: float

    @property
    def seconds(self) -> float:
        return self.draft + self.verify + self.other


def steps(runs: Iterable[Run]) -> float:
    """Steps of the whole batch. Each text counts its own, so this is their mean; exact for one text a call."""
    return sum((run.forwards / len(run.prompts) for run in runs if run.prompts), 0.0)


def step_times(runs: Sequence[Run]) -> StepTimes | None:
    """None where nobody took the time of the parts, as with transformers' own generate."""
    timed = [run for run in runs if run.verify_seconds > 0 and run.forwards]
    count = steps(timed)
    if not count:
        return None
    draft, verify = sum(run.draft_seconds for run in timed), sum(run.verify_seconds for run in timed)
    decoding = sum(run.seconds - run.prefill_seconds for run in timed)
    return StepTimes(draft / count, verify / count, max(0.0, decoding - draft - verify) / count)


class Depth(NamedTuple):
    """Of ``reached`` steps whose draft was so deep, in how many the accepted path was, too."""

    accepted: int
    reached: int


def by_depth(runs: Iterable[Run]) -> list[Depth]:
    """For depth 1, 2, ..., all runs together."""
    reached: list[int] = []
    accepted: list[int] = []
    for run in runs:
        reached = [a + b for a, b in zip_longest(reached, run.drafted_by_depth, fillvalue=0)]
        accepted = [a + b for a, b in zip_longest(accepted, run.accepted_by_depth, fillvalue=0)]
    return [Depth(a, r) for a, r in zip_longest(accepted, reached, fillvalue=0)]


def alpha(runs: Iterable[Run]) -> float | None:
    """The chance that a drafted level is accepted if the one above it was; one number for all depths, see ``rate``.

    Of a tree it is the chance that one of the level's nodes is accepted. None where nothing was drafted.
    """
    depths = by_depth(runs)
    return rate([d.reached for d in depths], [d.accepted for d in depths]).alpha if depths else None


def predicted(runs: Sequence[Run], plain: Sequence[Run]) -> float | None:
    """Speed-up by Theorem 3.8, from what was measured apart from it.

    alpha from the depths; tokens a step averaged over the lengths of the drafts; c k, the time of drafting in a step
    over a whole step of plain decoding. The formula takes acceptances to be independent, a forward of k + 1 rows to
    cost what one row costs, and everything else to cost nothing.
    """
    ours, theirs, chance = step_times(runs), step_times(plain), alpha(runs)
    forwards = sum(run.forwards for run in runs)
    if ours is None or theirs is None or chance is None or not forwards:
        return None
    tokens = predicted_tokens(chance, [depth.reached for depth in by_depth(runs)], forwards)
    return tokens / (1.0 + ours.draft / theirs.seconds)
