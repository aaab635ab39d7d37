"""The figures of a report: name, title, caption and drawing function of each kind, and reasons for missing ones."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from foredraft.bench.measure.steps import step_times
from foredraft.bench.measure.summary import Summary
from foredraft.bench.report import figures_drafts, figures_speed, figures_training
from foredraft.bench.report.figures_drafts import FEW, JUDGED, PROMPTS
from foredraft.bench.report.plots import Panel, save, styled


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of figure."""

    name: str
    title: str
    caption: str
    draw: Callable[[Summary], Iterable[Panel]]


KINDS = (
    Kind(
        "speed-up",
        "Speed-up by task and method",
        "Each dot is a task: the median over pairs, with a line from the lower to the upper quartile. The bar and the "
        "number are the mean over tasks. The dashed line at 1 is the baseline: left of it, drafting is a loss.",
        figures_speed.speed_up,
    ),
    Kind(
        "depth",
        "Accepted by depth",
        "Share of the steps with a draft of this depth whose accepted path reached it, over all tasks. Near 0, drafted "
        "levels are wasted; if a line ends high, a longer draft may pay. Grey: the other methods.",
        figures_drafts.depths,
    ),
    Kind(
        "position",
        "Accepted by position",
        "EAGLE-2's figure 5, for the positions judged most, greedy if there are greedy runs. 1-2 is the second child "
        "of the first. Dots are medians over prompts, bands quartiles: where bands are wide, a static tree loses.",
        figures_drafts.positions,
    ),
    Kind(
        "calibration",
        "Confidence and acceptance",
        "EAGLE-2's figure 6. On the dashed line confidence equals acceptance; below it, the draft is overconfident. A "
        "tree grown by confidence only needs a rising line. Larger dots are more nodes.",
        figures_drafts.calibration,
    ),
    Kind(
        "time",
        "Time of a step",
        "Parts of a step after prefill, all tasks pooled; the dashed line is a baseline step. A method gains if its "
        "tokens per forward exceed the ratio of its bar to the dashed line.",
        figures_speed.step_parts,
    ),
    Kind(
        "cost",
        "Cost of a forward",
        "Speculation needs a flat line: several tokens for the time of one. The dashed line is the time to read the "
        "weights once, a lower bound for every forward.",
        figures_speed.costs,
    ),
    Kind(
        "theory",
        "Measured and predicted",
        "A point is a method on a task. The prediction is Leviathan et al.'s formula, from acceptance by depth, mean "
        "depth and draft time. It assumes that a forward of many tokens costs as much as one of one token, and that "
        "nothing else takes time; in practice both put points below the dashed line. Points lie above it if "
        "acceptances come in runs, or if the baseline has extra costs.",
        figures_speed.theory,
    ),
    Kind(
        "batch",
        "Speed-up and batch size",
        "Mean speed-up over tasks, against plain decoding at the same batch size; below the dashed line it is a loss. "
        "Larger batches leave less idle compute for drafts. Grey: the other methods.",
        figures_speed.batches,
    ),
    Kind(
        "loss",
        "Loss",
        "Loss of each reported step, its running mean, and the loss on held-out samples: if that rises while the mean "
        "falls, the run overfits. A dashed line marks where an interrupted run resumed.",
        figures_training.losses,
    ),
    Kind(
        "training",
        "Acceptance and training data",
        "Tokens per forward on held-out samples, against tokens trained on. Points of a run share its learning rate "
        "schedule, so an earlier point is an unfinished run, not a shorter one.",
        figures_training.lengths,
    ),
)


@dataclass(frozen=True, slots=True)
class FigureSet:
    """The figures of one kind: one per setting, method or model."""

    kind: Kind
    panels: tuple[Panel, ...]


@styled()
def draw_figures(summary: Summary) -> list[FigureSet]:
    """Draw all kinds; a kind without data has no panels.

    Raises:
        OptionError: matplotlib is not installed.
    """
    return [FigureSet(kind, tuple(kind.draw(summary))) for kind in KINDS]


def missing_figures(found: Iterable[FigureSet], summary: Summary) -> list[str]:
    """The titles of missing figures, one sentence per reason."""
    reasons = _reasons(summary)
    titles: dict[str, list[str]] = {}
    for each in found:
        if not each.panels:
            reason = next(sentence for holds, sentence in reasons[each.kind.name] if holds)
            titles.setdefault(reason, []).append(each.kind.title)
    return [f"{', '.join(some)}: {reason}." for reason, some in titles.items()]


def _reasons(summary: Summary) -> dict[str, Sequence[tuple[bool, str]]]:
    """Reasons why a kind may be missing: what the files lack, and the option that records it. The first holds."""
    file, baseline = summary.file, summary.baseline
    sizes = {run.batch for run in file.runs}
    methods = [cell for key, cell in summary.cells.items() if key.arm != baseline]
    measured = [
        (not file.runs, "these files have no runs of foredraft bench"),
        (all(run.error for run in file.runs), "every run ended in an error"),
    ]
    no_pairs = "no file has successful runs of the baseline and of a method on the same prompt"
    paired = [
        *measured,
        (baseline is None, "there is no plain decoding (the arm none) to compare with"),
        (not methods, f"only the baseline, {baseline}, was run"),
        (not any(cell.speed_up for cell in methods), no_pairs),
    ]
    untimed = step_times([run for run in file.runs if run.arm == baseline]) is None
    rare = f"no position was judged {JUDGED} times on {PROMPTS} prompts; use a larger bench --watch N"
    validated = any("validation" in line for line in file.training)
    watched = (not file.watched, "no acceptance by position was recorded; use bench --watch N")
    logged = (not file.training, "these files include no log.jsonl of a training run")
    return {
        "speed-up": [*paired, (True, no_pairs)],
        "depth": [
            *measured,
            (not any(run.drafted_by_depth for run in file.runs), "no arm in these files drafts in foredraft's loop"),
            (True, f"no depth was drafted in at least {FEW} steps"),
        ],
        "position": [watched, (True, rare)],
        "calibration": [watched, (True, "the drafts have no confidence scores")],
        "time": [*measured, (True, "no arm used foredraft's loop, and transformers' arms are not timed by part")],
        "cost": [(True, "no forwards were timed; use bench --costs")],
        "theory": [
            *paired,
            (untimed, f"the steps of the baseline {baseline} were not timed; use the arm none as the baseline"),
            (True, "no other method drafts in foredraft's loop in the baseline's settings"),
        ],
        "batch": [
            *paired,
            (len(sizes) < 2, f"all runs have batch size {max(sizes, default=1)}; give bench several --batch-size"),
            (True, "no method has a speed-up on every task at two batch sizes"),
        ],
        "loss": [logged, (True, "the logs have no loss yet, see train --report N")],
        "training": [
            logged,
            (not validated, "the runs have no validation yet, see train --validate N"),
            (True, "these runs measure no acceptance length"),
        ],
    }


def write_figures(found: Iterable[FigureSet], folder: Path, suffix: str = "svg") -> list[Path]:
    """Write each panel to a file, named by kind and label.

    Raises:
        OptionError: unknown suffix.
    """
    written = []
    for each in found:
        for panel in each.panels:
            label = panel.label if len(each.panels) > 1 else ""
            name = "-".join(part for part in (each.kind.name, _slug(label)) if part)
            save(panel.figure, folder / f"{name}.{suffix}")
            written.append(folder / f"{name}.{suffix}")
    return written


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
