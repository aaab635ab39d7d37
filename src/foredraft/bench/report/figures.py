"""All kinds of figures of a report: what each is called, what it shows, and what makes its data."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from foredraft.bench.measure.summary import Summary
from foredraft.bench.report import (
    figures_costs,
    figures_drafts,
    figures_speed,
    figures_training,
    missing_figures as absent,
)
from foredraft.bench.report.panels import Panel
from foredraft.bench.report.plots import save


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of figure. ``caption`` says what to see, ``missing`` why it is not there, where nothing was drawn."""

    name: str
    title: str
    caption: str
    draw: Callable[[Summary], Iterable[Panel]]
    missing: Callable[[Summary], str]


KINDS = (
    Kind(
        "speed-up",
        "Speed-up by task and method",
        "Each dot is a task: the median over pairs, the line through it from the lower to the upper quartile. The bar "
        "and the number are the mean of the tasks. The dashed line at 1 is the baseline: left of it drafting costs "
        "more than it brings.",
        figures_speed.speed_up,
        absent.speed_up,
    ),
    Kind(
        "depth",
        "Accepted by depth",
        "Of the steps whose draft reached a depth, the share whose accepted path reached it, too, over all tasks. "
        "Where a line is near the bottom, levels are drafted in vain; where it ends high, a longer draft may pay. "
        "Grey: the other methods.",
        figures_drafts.depths,
        absent.depth,
    ),
    Kind(
        "position",
        "Accepted by position",
        "EAGLE-2's figure 5. 1-2 is the second choice below the first; greedy where there are greedy runs, the places "
        "judged most. The dot is the median over prompts, the band its quartiles: a wide band is what a tree of fixed "
        "shape cannot follow.",
        figures_drafts.positions,
        absent.position,
    ),
    Kind(
        "calibration",
        "Confidence and acceptance",
        "EAGLE-2's figure 6. On the dashed line a draft is as sure as it is right; below it is too sure. A rising line "
        "is all that a tree grown by confidence needs. Larger dots are more nodes.",
        figures_drafts.calibration,
        absent.calibration,
    ),
    Kind(
        "time",
        "Where a step's time goes",
        "Of one step after prefill, all tasks together; the dashed line is a step of the baseline. A method gains "
        "if it brings more tokens a forward than its bar is times as long.",
        figures_speed.step_parts,
        absent.time,
    ),
    Kind(
        "cost",
        "What a forward costs",
        "A flat line is what speculation lives on: more rows for the price of one. The dashed line is the time in "
        "which the memory can hand over the weights once; no forward is faster.",
        figures_costs.costs,
        absent.cost,
    ),
    Kind(
        "theory",
        "Measured and promised",
        "A point is a method on a task. The promise is Leviathan et al.'s formula, from acceptance by depth, mean "
        "depth and the time of drafting; it lets a forward of many rows cost what one row costs, and all else "
        "nothing. Below the dashed line is what these two cost; above it acceptance comes in longer stretches than "
        "independent coins would give, or the baseline has costs of its own.",
        figures_speed.theory,
        absent.theory,
    ),
    Kind(
        "batch",
        "Speed-up and batch size",
        "The mean of the tasks against plain decoding of the same batch; below the dashed line it is a loss. More "
        "texts leave less idle arithmetic for drafts. Grey: the other methods.",
        figures_speed.batches,
        absent.batch,
    ),
    Kind(
        "loss",
        "Loss",
        "Each step that was reported, their running mean, and the loss on held-out texts, which are never trained on: "
        "where it rises while the mean falls, the texts are learned by heart. A dashed line is where a run that was "
        "cut off went on.",
        figures_training.losses,
        absent.loss,
    ),
    Kind(
        "training",
        "Acceptance and training text",
        "Tokens that each forward brings on held-out texts, against the tokens trained on. Points of one run share "
        "its schedule, so the earlier ones stand for an unfinished run, not for a smaller one.",
        figures_training.lengths,
        absent.training,
    ),
)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A kind, and its figures: one for each setting, method or model."""

    kind: Kind
    panels: tuple[Panel, ...]


def drawn(summary: Summary) -> list[Drawn]:
    """All kinds; where there is nothing to show there are no panels.

    Raises:
        OptionError: matplotlib is not installed.
    """
    return [Drawn(kind, tuple(kind.draw(summary))) for kind in KINDS]


def not_drawn(found: Iterable[Drawn], summary: Summary) -> list[str]:
    """A sentence for each reason why figures are not there."""
    why: dict[str, list[str]] = {}
    for each in found:
        if not each.panels:
            why.setdefault(each.kind.missing(summary), []).append(each.kind.title)
    return [f"{', '.join(titles)}: {reason}." for reason, titles in why.items()]


def write_figures(found: Iterable[Drawn], folder: Path, suffix: str = "svg") -> list[Path]:
    """A file for each panel, for papers, named by kind and label.

    Raises:
        OptionError: the suffix is none that figures are written as.
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
