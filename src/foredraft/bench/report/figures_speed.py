"""Figures of speed: speed-up by task and method, parts of a step, theory, batch size."""

from collections.abc import Iterator, Sequence
from typing import Any

from foredraft.bench.measure.records import Run
from foredraft.bench.measure.steps import StepTimes, predicted, step_times
from foredraft.bench.measure.summary import Cell, Setting, Summary, temperature_label
from foredraft.bench.report.panels import WIDTH, Panel, legend, multiples, pitch, wrapped
from foredraft.bench.report.plots import FAINT, INK, canvas, color, styled
from foredraft.bench.report.tables import heading

_MARKS = "osD^vP*Xph<>"


def speed_up(summary: Summary) -> Iterator[Panel]:
    """One row per method, fastest first: the mean over tasks as a bar, and each task with its quartiles."""
    for setting in summary.settings:
        rows = {arm: _cells(summary, setting, arm) for arm in summary.arms(setting) if arm != summary.baseline}
        means = {arm: _middle(cells) for arm, cells in rows.items() if cells}
        if means:
            yield Panel(heading(setting), _speed_up(summary.tasks(setting), rows, means))


def _cells(summary: Summary, setting: Setting, arm: str) -> list[Cell]:
    found = (summary.cell(setting, task, arm) for task in summary.tasks(setting))
    return [cell for cell in found if cell is not None and cell.speed_up is not None]


def _middle(cells: Sequence[Cell]) -> float:
    speeds = [cell.speed_up.median for cell in cells if cell.speed_up]
    return sum(speeds) / len(speeds)


@styled
def _speed_up(tasks: list[str], rows: dict[str, list[Cell]], means: dict[str, float]) -> Any:
    lane = min(0.13, 0.6 / len(tasks))
    order = sorted(means, key=lambda arm: means[arm])
    names = [wrapped(arm) for arm in order]
    height = len(order) * pitch(names, 0.16 + 0.055 * len(tasks))
    figure, axes = canvas(WIDTH, 0.75 + height + 0.16 * (-(-len(tasks) // 3)))
    axes.barh(range(len(order)), [means[arm] for arm in order], height=0.8, color=FAINT, alpha=0.22)
    dots: dict[str, Any] = {}
    for place, arm in enumerate(order):
        for cell in rows[arm]:
            middle, low, high, _ = cell.speed_up or (0.0, 0.0, 0.0, 0)
            number = tasks.index(cell.key.task)
            y = place + lane * ((len(tasks) - 1) / 2 - number)
            axes.plot([low, high], [y, y], color=color(number), linewidth=1.1, alpha=0.75)
            dots[cell.key.task] = axes.plot([middle], [y], "o", color=color(number))[0]
        right = axes.get_yaxis_transform()
        axes.text(1.02, place, f"{means[arm]:.2f}x", transform=right, va="center", fontsize=8.5)
    axes.axvline(1.0, color=INK, linewidth=0.9, linestyle=(0, (4, 2)))
    axes.set_yticks(range(len(order)), names, fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.set(xlim=(0, None), ylim=(-0.6, len(order) - 0.4), xlabel="speed-up over the baseline")
    named = [task for task in tasks if task in dots]
    legend(figure, [dots[task] for task in named], named)
    return figure


def step_parts(summary: Summary) -> Iterator[Panel]:
    """Milliseconds per step for each method, all tasks pooled: draft, verify, other."""
    for setting in summary.settings:
        found = {arm: step_times(_runs(summary, setting, arm)) for arm in summary.arms(setting)}
        times = {arm: parts for arm, parts in found.items() if parts is not None}
        if times:
            yield Panel(heading(setting), _step_parts(times, times.get(summary.baseline or "")))


@styled
def _step_parts(times: dict[str, StepTimes], plain: StepTimes | None) -> Any:
    order = list(reversed(times))
    names = [wrapped(arm) for arm in order]
    figure, axes = canvas(WIDTH, 0.85 + len(order) * pitch(names, 0.3))
    left = [0.0] * len(order)
    bars = []
    for number, name in ((1, "draft"), (0, "verify"), (7, "other")):
        widths = [1000 * getattr(times[arm], name) for arm in order]
        bars.append(axes.barh(range(len(order)), widths, left=left, height=0.68, color=color(number)))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, total in enumerate(left):
        axes.annotate(
            f"{total:.1f}" if total < 100 else f"{total:.0f}",
            (total, place),
            (3, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
        )
    if plain is not None:
        axes.axvline(1000 * plain.seconds, color=INK, linewidth=0.9, linestyle=(0, (4, 2)))
    axes.set_yticks(range(len(order)), names, fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.set(xlabel="milliseconds per step", xlim=(0, 1.13 * max(left)), ylim=(-0.6, len(order) - 0.4))
    legend(figure, bars, ["draft", "verify (the target's forward)", "other"])
    return figure


def theory(summary: Summary) -> Iterator[Panel]:
    """One point per method and task: predicted and total measured speed-up."""
    for setting in summary.settings:
        points: dict[str, list[tuple[float, float]]] = {}
        for arm in summary.arms(setting):
            for task in summary.tasks(setting):
                point = _point(summary, setting, task, arm)
                if arm != summary.baseline and point is not None:
                    points.setdefault(arm, []).append(point)
        if points:
            yield Panel(heading(setting), _theory(points))


def _point(summary: Summary, setting: Setting, task: str, arm: str) -> tuple[float, float] | None:
    cell = summary.cell(setting, task, arm)
    if cell is None or cell.total_speed_up is None or summary.baseline is None:
        return None
    prediction = predicted(_runs(summary, setting, arm, task), _runs(summary, setting, summary.baseline, task))
    return None if prediction is None else (prediction, cell.total_speed_up)


@styled
def _theory(points: dict[str, list[tuple[float, float]]]) -> Any:
    figure, axes = canvas(WIDTH, 3.9 + 0.16 * (-(-len(points) // 3)))
    marks = []
    for number, some in enumerate(points.values()):
        marks += axes.plot(*zip(*some, strict=True), _MARKS[number % len(_MARKS)], color=color(number), markersize=5)
    values = [value for some in points.values() for point in some for value in point]
    near, far = min(values) - 0.1 * max(values), 1.06 * max(values)
    axes.plot([near, far], [near, far], color=INK, linewidth=0.9, linestyle=(0, (4, 2)), zorder=1)
    axes.set(
        xlim=(near, far), ylim=(near, far), aspect="equal", xlabel="predicted speed-up", ylabel="measured speed-up"
    )
    axes.locator_params(nbins=6)
    axes.grid(axis="both", visible=True)
    legend(figure, marks, [wrapped(arm, 14) for arm in points])
    return figure


def batches(summary: Summary) -> Iterator[Panel]:
    """Mean speed-up over tasks against batch size, one small panel per method."""
    groups: dict[tuple[str, float], list[Setting]] = {}
    for setting in sorted(summary.settings):
        groups.setdefault((setting.model, setting.temperature), []).append(setting)
    for (model, temperature), settings in groups.items():
        lines: dict[str, list[tuple[float, float]]] = {}
        for setting in settings:
            for arm in summary.arms(setting):
                speed = summary.mean(setting, arm).speed_up
                if arm != summary.baseline and speed is not None:
                    lines.setdefault(arm, []).append((float(setting.batch), speed))
        lines = {arm: points for arm, points in lines.items() if len(points) > 1}
        if lines:
            label = ", ".join(part for part in (model, temperature_label(temperature)) if part)
            yield Panel(label, _batches(lines))


@styled
def _batches(lines: dict[str, list[tuple[float, float]]]) -> Any:
    figure, axes = multiples(lines)
    sizes = sorted({batch for points in lines.values() for batch, _ in points})
    for panel in axes:
        panel.axhline(1.0, color=INK, linewidth=0.8, linestyle=(0, (4, 2)))
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [f"{size:g}" for size in sizes])
        panel.minorticks_off()
        panel.set_ylim(bottom=0)
    figure.supxlabel("batch size", fontsize=9)
    figure.supylabel("speed-up", fontsize=9)
    return figure


def _runs(summary: Summary, setting: Setting, arm: str, task: str | None = None) -> list[Run]:
    key = (*setting, arm)
    return [
        run
        for run in summary.file.runs
        if not run.error
        and (run.model, run.temperature, run.batch, run.arm) == key
        and (task is None or run.task == task)
    ]
