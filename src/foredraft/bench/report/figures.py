"""The figures of a report: name, title, caption and drawing function of each kind, and what it needs."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from foredraft.bench.measure.summary import Summary
from foredraft.bench.report import figures_drafts, figures_speed, figures_training
from foredraft.bench.report.plots import Panel, save, styled
from foredraft.files.outputs import files_in_folder


@dataclass(frozen=True, slots=True)
class FigureKind:
    """One kind of figure; ``needs``: the data without which it is missing; ``training``: of training logs."""

    name: str
    title: str
    caption: str
    needs: str
    draw: Callable[[Summary], Iterable[Panel]]
    training: bool = False


KINDS = (
    FigureKind(
        "speed-up",
        "Speed-up by task and method",
        "Each dot is a task: the median over pairs, with a line from the lower to the upper quartile. The bar and the "
        "number are the mean over tasks. The dashed line at 1 is the baseline: left of it, drafting is a loss.",
        "successful runs of a method and of the baseline (the arm none) on the same prompt",
        figures_speed.speed_up,
    ),
    FigureKind(
        "depth",
        "Accepted by depth",
        "Share of the steps with a draft of this depth whose accepted path reached it, over all tasks. Near 0, drafted "
        "levels are wasted; if a line ends high, a longer draft may pay. Grey: the other methods.",
        f"{figures_drafts.FEW} steps of an arm that drafts in foredraft's loop",
        figures_drafts.depths,
    ),
    FigureKind(
        "position",
        "Accepted by position",
        "EAGLE-2's figure 5, for the positions judged most, greedy if there are greedy runs. 1-2 is the second child "
        "of the first. Dots are medians over prompts, bands quartiles: where bands are wide, a static tree loses.",
        f"bench --watch N, with N of {figures_drafts.PROMPTS} or more",
        figures_drafts.positions,
    ),
    FigureKind(
        "calibration",
        "Confidence and acceptance",
        "EAGLE-2's figure 6. On the dashed line confidence equals acceptance; below it, the draft is overconfident. A "
        "tree grown by confidence only needs a rising line. Larger dots are more nodes.",
        "bench --watch N, with a drafter that scores its nodes",
        figures_drafts.calibration,
    ),
    FigureKind(
        "time",
        "Time of a step",
        "Parts of a step after prefill, all tasks pooled; the dashed line is a baseline step. A method gains if its "
        "tokens per forward exceed the ratio of its bar to the dashed line.",
        "runs of foredraft's loop",
        figures_speed.step_parts,
    ),
    FigureKind(
        "cost",
        "Cost of a forward",
        "Speculation needs a flat line: several tokens for the time of one. The dashed line is the time to read the "
        "weights once, a lower bound for every forward.",
        "bench --costs",
        figures_speed.costs,
    ),
    FigureKind(
        "batch",
        "Speed-up and batch size",
        "Mean speed-up over tasks, against plain decoding at the same batch size; below the dashed line it is a loss. "
        "Larger batches leave less idle compute for drafts. Grey: the other methods.",
        "a method's speed-up on every task at two or more --batch-size",
        figures_speed.batches,
    ),
    FigureKind(
        "loss",
        "Loss",
        "Loss of each reported step, its running mean, and the loss on held-out samples: if that rises while the mean "
        "falls, the run overfits. A dashed line marks where an interrupted run resumed.",
        "the log.jsonl of a training run",
        figures_training.losses,
        training=True,
    ),
    FigureKind(
        "training",
        "Acceptance and training data",
        "Tokens per forward on held-out samples, against tokens trained on. Points of a run share its learning rate "
        "schedule, so an earlier point is an unfinished run, not a shorter one.",
        "the log.jsonl of a training run with validations",
        figures_training.lengths,
        training=True,
    ),
)


@dataclass(frozen=True, slots=True)
class FigureSet:
    """The figures of one kind: one per setting, method or model."""

    kind: FigureKind
    panels: tuple[Panel, ...]


@styled()
def draw_figures(summary: Summary) -> list[FigureSet]:
    """Draw all kinds; a kind without data has no panels.

    Raises:
        OptionError: matplotlib is not installed.
    """
    return [FigureSet(kind, tuple(kind.draw(summary))) for kind in KINDS]


def missing_figures(found: Iterable[FigureSet], summary: Summary) -> list[str]:
    """A sentence for each figure that files of these kinds can have but lack: its title, and the data that it needs."""
    file = summary.file
    kinds = {
        training
        for training, lines in ((True, file.training), (False, file.runs or file.costs or file.watched))
        if lines
    }
    missing = (each.kind for each in found if not each.panels and each.kind.training in kinds)
    return [f"{kind.title}: needs {kind.needs}." for kind in missing]


def left_out(each: FigureSet) -> list[str]:
    """A sentence for each figure of a kind that does not show all methods, and what it needs of them."""
    return [
        f"{each.kind.title}{f' ({panel.label})' if panel.label else ''} leaves out {', '.join(panel.left_out)}: needs "
        f"{each.kind.needs}."
        for panel in each.panels
        if panel.left_out
    ]


def write_figures(found: Iterable[FigureSet], folder: Path, suffix: str = "svg") -> list[Path]:
    """Write each panel to a file, named by kind and label.

    Raises:
        OptionError: unknown suffix, or a file of the same name is another's.
        OSError: the folder cannot be written.
    """
    figures = {f"{_name(each, panel)}.{suffix}": panel.figure for each in found for panel in each.panels}
    with files_in_folder(folder, "report") as partial:
        for name, figure in figures.items():
            save(figure, partial / name, "report")
    return [folder / name for name in figures]


def _name(figures: FigureSet, panel: Panel) -> str:
    label = re.sub(r"[^a-z0-9.]+", "-", panel.label.lower()).strip("-.") if len(figures.panels) > 1 else ""
    return "-".join(filter(None, (figures.kind.name, label)))
