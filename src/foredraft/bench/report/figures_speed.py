"""Figures of speed: speed-up by task and method, parts of a step, batch size, cost of a forward."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from foredraft.bench.measure.records import Cost, Run
from foredraft.bench.measure.steps import StepTimes, step_times
from foredraft.bench.measure.summary import Setting, Spread, Summary, grouped
from foredraft.bench.report import plots
from foredraft.bench.report.plots import Panel, Points, color
from foredraft.bench.report.tables import heading, label


def speed_up(summary: Summary) -> Iterator[Panel]:
    """One row per method, fastest first: the mean over tasks as a bar, and each task with its quartiles."""
    for setting in summary.settings:
        found: dict[str, dict[str, Spread]] = {}
        for task in summary.tasks(setting):
            for arm in summary.arms(setting):
                cell = summary.cell(setting, task, arm)
                if arm != summary.baseline and cell is not None and cell.speed_up is not None:
                    found.setdefault(arm, {})[task] = cell.speed_up
        if found:
            absent = plots.left_out(summary.arms(setting), {*found, summary.baseline})
            yield Panel(heading(setting), _speed_up(summary.tasks(setting), found), absent)


def _speed_up(tasks: Sequence[str], found: Mapping[str, Mapping[str, Spread]]) -> Any:
    means = {arm: fmean(each.median for each in spreads.values()) for arm, spreads in found.items()}
    order = sorted(means, key=lambda arm: means[arm])
    names = [plots.wrapped(arm) for arm in order]
    figure, axes = plots.lanes(0.75 + 0.16 * (-(-len(tasks) // 3)), 0.16 + 0.055 * len(tasks), names)
    axes.barh(range(len(order)), [means[arm] for arm in order], height=0.8, color=plots.FAINT, alpha=0.22)
    lane = min(0.13, 0.6 / len(tasks))
    dots: dict[str, Any] = {}
    for number, task in enumerate(tasks):
        for place, arm in enumerate(order):
            if task in found[arm]:
                middle, low, high, _ = found[arm][task]
                y = place + lane * ((len(tasks) - 1) / 2 - number)
                axes.plot([low, high], [y, y], color=color(number), linewidth=1.1, alpha=0.75)
                dots[task] = axes.plot([middle], [y], "o", color=color(number))[0]
    for place, arm in enumerate(order):
        axes.text(1.02, place, f"{means[arm]:.2f}x", transform=axes.get_yaxis_transform(), va="center", fontsize=8.5)
    axes.axvline(1.0, **plots.DASHED)
    axes.set(xlim=(0, None), xlabel="speed-up over the baseline")
    plots.legend(figure, dots.values(), dots)
    return figure


def step_parts(summary: Summary) -> Iterator[Panel]:
    """Milliseconds per step for each method, all tasks pooled: draft, verify, other."""
    for setting in summary.settings:
        found = {arm: step_times(_runs(summary, setting, arm)) for arm in summary.arms(setting)}
        times = {arm: parts for arm, parts in found.items() if parts is not None}
        if times:
            absent = plots.left_out(summary.arms(setting), times)
            yield Panel(heading(setting), _step_parts(times, times.get(summary.baseline or "")), absent)


def _step_parts(times: Mapping[str, StepTimes], plain: StepTimes | None) -> Any:
    order = list(times)[::-1]
    figure, axes = plots.lanes(0.85, 0.3, [plots.wrapped(arm) for arm in order])
    left = [0.0] * len(order)
    bars = []
    for number, name in ((1, "draft"), (0, "verify"), (7, "other")):
        widths = [1000 * getattr(times[arm], name) for arm in order]
        bars.append(axes.barh(range(len(order)), widths, left=left, height=0.68, color=color(number)))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    totals = [f"{total:.1f}" if total < 100 else f"{total:.0f}" for total in left]
    axes.bar_label(bars[-1], totals, padding=3, fontsize=8.5)
    if plain is not None:
        axes.axvline(1000 * plain.seconds, **plots.DASHED)
    axes.set(xlabel="milliseconds per step", xlim=(0, 1.13 * max(left)))
    plots.legend(figure, bars, ["draft", "verify (the target's forward)", "other"])
    return figure


def batches(summary: Summary) -> Iterator[Panel]:
    """Mean speed-up over tasks against batch size, one small panel per method."""
    for where, settings in grouped(sorted(summary.settings), lambda setting: setting[:2]).items():
        lines: dict[str, list[tuple[float, float]]] = {}
        for setting in settings:
            for arm in summary.arms(setting):
                speed = summary.mean(setting, arm).speed_up
                if arm != summary.baseline and speed is not None:
                    lines.setdefault(arm, []).append((float(setting.batch), speed))
        lines = {arm: points for arm, points in lines.items() if len(points) > 1}
        if lines:
            arms = [arm for setting in settings for arm in summary.arms(setting)]
            yield Panel(label(*where), _batches(lines), plots.left_out(arms, {*lines, summary.baseline}))


def _batches(lines: Mapping[str, Points]) -> Any:
    figure, axes = plots.multiples(lines, "batch size", "speed-up")
    for panel in axes:
        panel.axhline(1.0, **plots.DASHED)
        plots.log_ticks(panel, sorted({batch for points in lines.values() for batch, _ in points}))
        panel.set_ylim(bottom=0)
    return figure


def costs(summary: Summary) -> Iterator[Panel]:
    """Milliseconds of a forward by tokens (batch x nodes), and the time to read the weights once."""
    timed = [cost for cost in summary.file.costs if cost.nodes]
    for model, own in grouped(timed, lambda cost: cost.model).items():
        yield Panel(model, _costs(own))


def _costs(found: Sequence[Cost]) -> Any:
    figure, axes = plots.canvas(plots.WIDTH, 2.9)
    lines: dict[str, Any] = {}
    for number, cost in enumerate(found):
        rows, times = [cost.batch * nodes for nodes in cost.nodes], [1000 * seconds for seconds in cost.seconds]
        name = f"batch {cost.batch}, {cost.cached:,} cached"
        lines[name] = axes.plot(rows, times, color=color(number), marker="o")[0]
    floors = {1000 * cost.weight_bytes / cost.bandwidth for cost in found if cost.bandwidth > 0 and cost.weight_bytes}
    for floor in sorted(floors):
        lines["weights / bandwidth"] = axes.axhline(floor, **plots.DASHED)
    plots.log_ticks(axes, plots.doublings(1, max(cost.batch * nodes for cost in found for nodes in cost.nodes)))
    axes.set(ylim=(0, None), xlabel="tokens per forward (batch size x nodes)", ylabel="milliseconds")
    plots.legend(figure, lines.values(), lines, columns=2)
    return figure


def _runs(summary: Summary, setting: Setting, arm: str) -> list[Run]:
    key = (*setting, arm)
    runs = (run for run in summary.file.runs if not run.error)
    return [run for run in runs if (run.model, run.temperature, run.batch, run.arm) == key]
