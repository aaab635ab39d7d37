"""Why a figure of a report is not there: what the files lack, and which option would have made it."""

from collections.abc import Sequence

from foredraft.bench.measure.steps import step_times
from foredraft.bench.measure.summary import Summary
from foredraft.bench.report.figures_drafts import FEW, JUDGED, PROMPTS

Reason = tuple[bool, str]
_NO_RUNS = "there are no runs of foredraft bench in these files"
_UNWATCHED = "no drafted nodes were looked at, as bench does with --watch N"
_NO_LOG = "there is no log.jsonl of a training run among these files"


def speed_up(summary: Summary) -> str:
    return _first([*_unpaired(summary), (True, _NO_PAIRS)])


def batch(summary: Summary) -> str:
    sizes = {run.batch for run in summary.file.runs}
    one = f"all runs have batch size {max(sizes, default=1)}; bench takes several --batch-size"
    some = "no method has a speed-up on every task at two batch sizes"
    return _first([*_unpaired(summary), (len(sizes) < 2, one), (True, some)])


def depth(summary: Summary) -> str:
    deep = any(run.drafted_by_depth for run in summary.file.runs)
    few = f"no depth was drafted in {FEW} steps or more"
    return _first([*_unmeasured(summary), (not deep, "no arm in these files drafts in our own loop"), (True, few)])


def time(summary: Summary) -> str:
    return _first([*_unmeasured(summary), (True, _NOT_OURS)])


def theory(summary: Summary) -> str:
    plain = step_times([run for run in summary.file.runs if run.arm == summary.baseline])
    untimed = f"nobody has timed the steps of the baseline, {summary.baseline}; the arm none would be timed"
    drafts = "no method beside the baseline drafts in our own loop in the same settings"
    return _first([*_unpaired(summary), (plain is None, untimed), (True, drafts)])


def position(summary: Summary) -> str:
    few = f"no place in a tree was judged {JUDGED} times on {PROMPTS} prompts; bench takes a larger --watch N"
    return _first([(not summary.file.watched, _UNWATCHED), (True, few)])


def calibration(summary: Summary) -> str:
    return _first([(not summary.file.watched, _UNWATCHED), (True, "what was drafted has no confidence")])


def cost(summary: Summary) -> str:
    return "no forwards were timed, as bench does with --costs"


def loss(summary: Summary) -> str:
    return _first([(not summary.file.training, _NO_LOG), (True, "the logs hold no loss yet, see train --report N")])


def training(summary: Summary) -> str:
    validated = any("validation" in line for line in summary.file.training)
    soon = "the runs have not been validated yet, see train --validate N"
    other = "what these runs train does not draft by itself"
    return _first([(not summary.file.training, _NO_LOG), (not validated, soon), (True, other)])


_NO_PAIRS = "no prompt was given to the baseline and to a method in one file without an error"
_NOT_OURS = "no arm of our own loop was run, and transformers does not say how its time is spent"


def _unmeasured(summary: Summary) -> list[Reason]:
    runs = summary.file.runs
    return [(not runs, _NO_RUNS), (all(run.error for run in runs), "every run ended in an error")]


def _unpaired(summary: Summary) -> list[Reason]:
    none = "there is no run of plain decoding (the arm none) to compare with"
    only = all(run.arm == summary.baseline for run in summary.file.runs)
    alone = f"only the baseline, {summary.baseline}, was run"
    paired = any(cell.speed_up for key, cell in summary.cells.items() if key.arm != summary.baseline)
    return [
        *_unmeasured(summary),
        (summary.baseline is None, none),
        (only, alone),
        (not paired, _NO_PAIRS),
    ]


def _first(reasons: Sequence[Reason]) -> str:
    """The first that holds."""
    return next(said for holds, said in reasons if holds)
