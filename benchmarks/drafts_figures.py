"""Pictures of ``benchmarks/drafts.py`` and ``benchmarks/depth.py`` for docs/results.md."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import drafts_tables
import method_tables
from drafts_tables import CHOICES, Curve, Shape
from origin import origin_line
from reading import read

from foredraft.bench.report import plots

TARGET = "sample"


class Found(NamedTuple):
    """A sentence, its values as text, and where they are from."""

    sentence: str
    facts: str
    made: str


def curves() -> list[Curve]:
    cells = read(drafts_tables.RESULTS)["hits"]
    return list(drafts_tables.curves([cell for cell in cells if cell["target"] == TARGET]))


def hits() -> Found:
    """What boosted drafts hit beside others."""
    greedy = {(each.family, each.count): each.rates for each in curves() if not each.temperature}
    gain = {family: greedy[family, 3][2] for family in ("alone", "boosted")}
    complements = "complement each other" if gain["boosted"] > gain["alone"] else "do not complement each other here"
    sentence = (
        f"Boosted drafts {complements}: with one choice each, three of them hit {gain['boosted']:.3f} of the greedy "
        f"tokens and three that were distilled each by itself {gain['alone']:.3f}; three choices of one draft hit "
        f"{greedy['alone', 1][2]:.3f}."
    )
    facts = "; ".join(
        f"T={each.temperature:g}, {each.kind}, {each.drafts}: {', '.join(f'{rate:.3f}' for rate in each.rates)}"
        for each in curves()
    )
    run = drafts_tables.runs(read(drafts_tables.RESULTS), "hits")[0]
    return Found(sentence, facts, f"bundled model, prompts of three tasks; {origin_line(run)}")


def hits_figure() -> Any:
    """Hit rate by K, greedy and sampled, one line a group of drafts."""
    figure, both = plots.canvas(7.2, 3.0, 2, sharex=True)
    for axes, (heat, kind, title) in zip(
        both,
        ((0.0, "chosen", "greedy: among the first K"), (1.0, "sampled", "T=1: one of K samples accepted")),
        strict=True,
    ):
        for each in curves():
            if (each.temperature, each.kind) != (heat, kind):
                continue
            color = plots.INK if each.count == 1 else plots.color(0 if each.family == "boosted" else 1)
            style, fill = ("--", "none") if each.count == 2 else ("-", color)
            name = each.drafts.replace("distilled each by itself", "each by itself")
            axes.plot(range(1, CHOICES + 1), each.rates, style, color=color, marker="o", mfc=fill, label=name)
        axes.set_title(title)
        axes.set_xlabel("K")
        axes.set_xticks(range(1, CHOICES + 1))
    both[0].set_ylabel("hit rate")
    both[1].legend(loc="lower right", fontsize=8)
    return figure


def latencies() -> dict[str, list[tuple[int, int, float]]]:
    """Layers, width and milliseconds of models with random weights, by series."""
    found: dict[str, list[tuple[int, int, float]]] = {}
    for run in read(method_tables.RESULTS / "depth.jsonl")["run"]:
        found.setdefault(run["series"], []).append((run["layers"], run["width"], run["milliseconds"]))
    return found


def measured() -> list[Shape]:
    """The pruned drafts of greedy rows: sampled rows' chains have siblings, which the formula does not know."""
    cells = [cell for cell in read(drafts_tables.RESULTS).get("shapes", []) if cell["target"] == TARGET]
    return [each for each in drafts_tables.shaped(cells) if not each.temperature]


def _layers(shape: Shape) -> int:
    return shape.latency["layers"]


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def shapes() -> Found:
    """Latency by shape, and what the formula says."""
    series, pairs = latencies(), measured()
    equal, deep, wide = (series[name] for name in ("equal", "by depth", "by width"))
    ratios = [each.measured / each.formula for each in pairs]
    best = sorted({each.name: each for each in sorted(pairs, key=lambda each: each.measured)}.values(), key=_layers)
    layers, rates = [str(_layers(each)) for each in best], [f"{each.measured:.0f}" for each in best]
    compared = (
        f" Pruned from the bundled model to equal parameters and distilled equally, drafts of "
        f"{_listed(layers)} layers decode {_listed(rates)} greedy tokens a second at their best length, "
        f"{min(ratios):.2f} to {max(ratios):.2f} of what the formula says (median {statistics.median(ratios):.2f})."
        if ratios
        else ""
    )
    sentence = (
        f"Of equal parameters a draft of {equal[-1][0]} layers takes {equal[-1][2] / equal[0][2]:.1f} times as long as "
        f"one of {equal[0][0]}; {deep[-1][0] // deep[0][0]} times the layers take {deep[-1][2] / deep[0][2]:.0f} times "
        f"as long, and {wide[-1][1] // wide[0][1]} times the width, with sixteen times the parameters, "
        f"{wide[-1][2] / wide[0][2]:.1f} times.{compared}"
    )
    facts = "; ".join(
        f"greedy, {each.length} tokens, {each.name}: {each.formula:.0f} by formula, {each.measured:.0f}"
        for each in pairs
    )
    made = f"random weights: {origin_line(read(method_tables.RESULTS / 'depth.jsonl')['provenance'][0])}"
    for run in drafts_tables.runs(read(drafts_tables.RESULTS), "shapes")[:1]:
        made += f"; drafts pruned from the bundled model: {origin_line(run)}"
    return Found(sentence, facts, made)


def shapes_figure() -> Any:
    """Milliseconds by layers and by width; throughput as measured by the formula's."""
    series, pairs = latencies(), measured()
    figure, (left, middle, *right) = plots.canvas(7.2, 2.8, 3 if pairs else 2)
    for number, (name, title) in enumerate(
        (("equal", "equal parameters"), ("by depth", f"width {series['by depth'][0][1]}"))
    ):
        points = [(layers, milliseconds) for layers, _, milliseconds in series[name]]
        left.plot(*zip(*points, strict=True), "o-", color=plots.color(number), label=title)
    left.set_title("ms per token by layers")
    left.set_xticks([layers for layers, _, _ in series["equal"]])
    left.set_xlabel("layers")
    left.legend(fontsize=8)
    points = [(width, milliseconds) for _, width, milliseconds in series["by width"]]
    middle.plot(*zip(*points, strict=True), "o-", color=plots.color(2))
    middle.set_title(f"ms per token by width, {series['by width'][0][0]} layers")
    middle.set_xlabel("width")
    for axes in (left, middle):
        axes.set_ylim(bottom=0)
    for axes in right:
        for number, name in enumerate(dict.fromkeys(each.name for each in pairs)):
            own = [(each.formula, each.measured) for each in pairs if each.name == name]
            axes.plot(*zip(*own, strict=True), "o", color=plots.color(number), markersize=4, alpha=0.8, label=name)
        most = 1.05 * max(max(each.formula, each.measured) for each in pairs)
        axes.plot((0, most), (0, most), **plots.DASHED)
        axes.set(xlim=(0, most), ylim=(0, most), xlabel="by formula", ylabel="measured", title="tokens per second")
        axes.legend(fontsize=8, loc="lower right")
    return figure
