"""Reasons for missing figures: what the files lack, and which option records it."""

from collections.abc import Sequence

from foredraft.bench.measure.steps import step_times
from foredraft.bench.measure.summary import Summary
from foredraft.bench.report.figures_drafts import FEW, JUDGED, PROMPTS

Reason = tuple[bool, str]
_NO_RUNS = "these files have no runs of foredraft bench"
_UNWATCHED = "no acceptance by position was recorded; use bench --watch N"
_NO_LOG = "these files include no log.jsonl of a training run"


def speed_up(summary: Summary) -> str:
    return _first([*_unpaired(summary), (True, _NO_PAIRS)])


def batch(summary: Summary) -> str:
    sizes = {run.batch for run in summary.file.runs}
    one = f"all runs have batch size {max(sizes, default=1)}; give bench several --batch-size"
    some = "no method has a speed-up on every task at two batch sizes"
    return _first([*_unpaired(summary), (len(sizes) < 2, one), (True, some)])


def depth(summary: Summary) -> str:
    deep = any(run.drafted_by_depth for run in summary.file.runs)
    few = f"no depth was drafted in at least {FEW} steps"
    return _first([*_unmeasured(summary), (not deep, "no arm in these files drafts in foredraft's loop"), (True, few)])


def time(summary: Summary) -> str:
    return _first([*_unmeasured(summary), (True, _NOT_OURS)])


def theory(summary: Summary) -> str:
    plain = step_times([run for run in summary.file.runs if run.arm == summary.baseline])
    untimed = f"the steps of the baseline {summary.baseline} were not timed; use the arm none as the baseline"
    drafts = "no other method drafts in foredraft's loop in the baseline's settings"
    return _first([*_unpaired(summary), (plain is None, untimed), (True, drafts)])


def position(summary: Summary) -> str:
    few = f"no position was judged {JUDGED} times on {PROMPTS} prompts; use a larger bench --watch N"
    return _first([(not summary.file.watched, _UNWATCHED), (True, few)])


def calibration(summary: Summary) -> str:
    return _first([(not summary.file.watched, _UNWATCHED), (True, "the drafts have no confidence scores")])


def cost(summary: Summary) -> str:
    return "no forwards were timed; use bench --costs"


def loss(summary: Summary) -> str:
    return _first([(not summary.file.training, _NO_LOG), (True, "the logs have no loss yet, see train --report N")])


def training(summary: Summary) -> str:
    validated = any("validation" in line for line in summary.file.training)
    soon = "the runs have no validation yet, see train --validate N"
    other = "these runs measure no acceptance length"
    return _first([(not summary.file.training, _NO_LOG), (not validated, soon), (True, other)])


_NO_PAIRS = "no file has successful runs of the baseline and of a method on the same prompt"
_NOT_OURS = "no arm used foredraft's loop, and transformers' arms are not timed by part"


def _unmeasured(summary: Summary) -> list[Reason]:
    runs = summary.file.runs
    return [(not runs, _NO_RUNS), (all(run.error for run in runs), "every run ended in an error")]


def _unpaired(summary: Summary) -> list[Reason]:
    none = "there is no plain decoding (the arm none) to compare with"
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
    """The first reason whose condition holds."""
    return next(reason for holds, reason in reasons if holds)
