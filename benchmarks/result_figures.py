"""The pictures of docs/results.md, one claim each, from the results files.

    python benchmarks/result_figures.py              # all, to docs/figures
    python benchmarks/result_figures.py engines      # one

A claim's numbers are computed from the same runs as its picture; `summary.py --write` puts both into the page. Each
file has its own dark background, so that it looks the same on light and dark pages, and its values as a description.
"""

import argparse
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import calibration
import drafts_figures
import engine_tables
import engines
import real_model
import speed_tables
from origin import origin_line
from pictures import described, grounded
from reading import read

from foredraft.bench.measure.records import read_runs
from foredraft.bench.measure.summary import grouped, ratios
from foredraft.bench.report import plots
from foredraft.bench.tune.candidates import short_spec
from foredraft.files.provenance import short_commit
from foredraft.heads.formats.tuned import read_tuned

ROOT = Path(__file__).resolve().parent.parent
HYBRID = real_model.RESULTS.with_name("hybrid.jsonl")
REAL = (HYBRID, HYBRID.with_name("hybrid_int8.jsonl"), real_model.RESULTS)
"""Runs of the real model with fixed sizes and the policy."""
FIGURES = ROOT / "docs" / "figures"
WIDTH = 7.2
PEERS = {  # engines, and what a reader calls them
    "foredraft Q4_0": "foredraft, Q4_0",
    "llama.cpp Q4_0": "llama.cpp, Q4_0",
    "foredraft int4": "foredraft, int4",
    "foredraft Q4_1": "foredraft, Q4_1",
    "llama.cpp Q4_1": "llama.cpp, Q4_1",
    "openvino Q4_1": "OpenVINO GenAI, Q4_1",
    "openvino Q4_1-ACCURACY": "OpenVINO GenAI, Q4_1, ACCURACY",
    "foredraft Q8_0": "foredraft, Q8_0",
    "llama.cpp Q8_0": "llama.cpp, Q8_0",
    "foredraft float32": "foredraft, float32",
    "transformers bfloat16": "transformers, bfloat16",
}


class Row(NamedTuple):
    """A line of a picture: its name, its value, other values around it, and whether it is highlighted."""

    name: str
    value: float
    spread: Sequence[float] = ()
    ours: bool = True


class Claim(NamedTuple):
    """What a picture shows, as a sentence; its values as text; where they are from; and how it is drawn."""

    sentence: str
    facts: str
    made: str
    draw: Callable[[], Any]


def named_rows(axes: Any, names: Sequence[str], most: float, line: float | None) -> None:
    """Dress axes of bars, the first on top: names on the left, no scale, a dashed line.

    Args:
        most: the largest value.
    """
    if line is not None:
        axes.axvline(line, color=plots.INK, linewidth=0.8, linestyle=(0, (3, 3)))
    axes.set_xlim(0, 1.12 * most)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="both", length=0)
    axes.xaxis.set_visible(False)
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)


def rows_figure(title: str, rows: Sequence[Row], label: Callable[[float], str], line: float | None = None) -> Any:
    """Bars from above, with a dot for each value of the spread."""
    figure, axes = plots.canvas(WIDTH, 0.7 + 0.27 * len(rows))
    most = max([row.value for row in rows] + [value for row in rows for value in row.spread])
    for place, row in enumerate(rows):
        axes.barh(place, row.value, height=0.62, color=plots.color(0) if row.ours else plots.FAINT)
        axes.plot(row.spread, [place] * len(row.spread), "o", color=plots.color(1), markersize=3, zorder=3)
        inside = bool(row.spread)  # beside the bar it would look like the value of a dot
        axes.annotate(
            label(row.value),
            (0 if inside else row.value, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color="white" if inside else plots.INK,
        )
    axes.set_title(title)
    named_rows(axes, [row.name for row in rows], most, line)
    return figure


def points_figure(title: str, points: Sequence[tuple[float, float]], across: str, up: str) -> Any:
    """Points and the diagonal on which both values are equal."""
    figure, axes = plots.canvas(4.6, 3.4)
    low, high = 0.9 * min(map(min, points)), 1.05 * max(map(max, points))
    axes.plot((low, high), (low, high), **plots.DASHED)
    axes.plot(*zip(*points, strict=True), "o", color=plots.color(0), markersize=4, alpha=0.8)
    axes.set_title(title)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    return figure


def facts_of(rows: Sequence[Row], form: str) -> str:
    return ", ".join(f"{row.name} {row.value:{form}}" for row in rows)


def cpu_engines() -> Claim:
    """What a user of each engine gets on one thread: plain decoding, and its drafts."""
    lines = read(ROOT / engines.RESULTS)
    found: dict[str, dict[str, float]] = {}
    for (threads, arm), runs in engine_tables.by_arm(lines).items():
        engine, mode = arm.rsplit(" ", 1)
        if threads == 1:
            found.setdefault(engine, {})[mode] = statistics.median(map(engine_tables.rate, runs))
    rows = []
    for engine, name in PEERS.items():
        modes = dict(found.get(engine, {}))
        if (plain := modes.pop(engine_tables.PLAIN, None)) is not None:
            drafts = modes[engine_tables.DEFAULT] if engine.startswith("foredraft") else max(modes.values(), default=0)
            rows.append(Row(name, plain, [drafts] * bool(drafts), engine.startswith("foredraft")))
    origin = lines["provenance"][0]
    where = "" if all(row.spread for row in rows) else ", if measured"
    title = f"Tokens/s, one thread: plain decoding, dots with drafts{where}"
    chats, _ = engine_tables.chats(lines)
    facts = ", ".join(
        f"{row.name} {row.value:.1f}" + "".join(f" / {drafts:.1f}" for drafts in row.spread) for row in rows
    )
    return Claim(
        engine_tables.sentence(lines),
        f"Plain / with drafts: {facts}",
        f"{origin['model']}, medians of {chats} chats, {origin['new_tokens']} new tokens, greedy; {origin['device']}, "
        f"commit {short_commit(origin['commit'])}, {origin['date']}",
        lambda: rows_figure(title, rows, "{:.0f}".format),
    )


def real(path: Path = HYBRID) -> Claim:
    """Speed-up of the default policy on a real model, by drafter and temperature."""
    file = read_runs(path)
    every = [pair for pair in real_model.beside_plain(file) if pair.run.arm.endswith(" auto")]
    names = {0.0: "greedy", 1.0: "T=1"}
    rows = []
    for (arm, temperature), own in grouped(every, lambda pair: (pair.run.arm, pair.run.temperature)).items():
        by_task = grouped(own, lambda pair: pair.run.task).values()
        spread = [statistics.median(ratios(some)) for some in by_task]
        drafter = arm.removesuffix(" auto").replace("look-ups+head", "bandit of both")
        name = f"{drafter}, {names.get(temperature, f'T={temperature:g}')}"
        rows.append(Row(name, statistics.median(ratios(own)), spread))
    best = max(rows, key=lambda row: row.value)
    low = [row.name for row in rows if row.value < 0.98]
    if best.value > 1:
        gains = f"the best drafter under the default policy gains {best.value:.2f}x ({best.name})"
    else:
        gains = f"no drafter gains here; the best under the default policy has {best.value:.2f} of plain ({best.name})"
    if len(low) < len(rows) / 2:
        worse = f"; below 0.98: {', '.join(low)}" if low else ""
    else:
        worse = f"; {len(low)} of {len(rows)} are below 0.98"
    origin = file.provenance[-1]
    return Claim(
        f"On a real model in 4 bits {gains}{worse}. Dots are tasks: the gain depends on the text.",
        facts_of(rows, ".2f"),
        origin_line(origin, origin["settings"].get("weights") or "float32"),
        lambda: rows_figure("Speed-up over plain decoding, default policy", rows, "{:.2f}x".format, 1.0),
    )


def policy() -> Claim:
    """The default policy against the best fixed size in hindsight, on a real model."""
    files = [read_runs(path) for path in REAL]
    points = [point for file in files for point in real_model.policy_points(file)]
    near = {share: sum(mine >= share * best for best, mine in points) for share in (0.95, 0.97)}
    safe = {share: sum(mine >= share for _, mine in points) for share in (0.95, 0.98)}
    origins = "; ".join(origin_line(file.provenance[-1], file.provenance[-1]["settings"]["weights"]) for file in files)
    return Claim(
        f"Without being told a draft size, the policy reaches 0.95 of the best one in hindsight in {near[0.95]} of "
        f"{len(points)} cells and 0.97 of it in {near[0.97]}; 0.95 of plain decoding in {safe[0.95]}, 0.98 of it in "
        f"{safe[0.98]}.",
        ", ".join(f"{best:.2f}/{mine:.2f}" for best, mine in points),
        f"SmolLM2-135M-Instruct, a cell for each drafter, temperature and task; {origins}",
        lambda: points_figure("Speed-up over plain decoding", points, "best fixed size in hindsight", "default policy"),
    )


def transformers() -> Claim:
    """Both sides in one process, paired by prompt."""
    kinds = read(speed_tables.RESULTS)
    rows = []
    for title, top, bottom in speed_tables.PAIRS:
        paired = speed_tables.paired(kinds["run"], top, bottom)
        rows.append(Row(title.replace("`", ""), statistics.median(paired), ours=not top.startswith("hf_")))
    origin = kinds["provenance"][0]
    return Claim(
        f"On the same float32 model our plain decoding is {rows[0].value:.2f} times as fast as transformers' generate, "
        f"and a draft model {rows[1].value:.2f} times as fast as its assisted generation.",
        facts_of(rows, ".2f"),
        f"{origin['target']} with {origin['draft']}, greedy, medians; {origin_line(origin)}",
        lambda: rows_figure("Ratio of tokens per second, median over prompts", rows, "{:.2f}".format, 1.0),
    )


def reliability() -> Claim:
    """What the policy expects of drafted tokens, and what is accepted."""
    found = calibration.targets()
    facts = "; ".join(
        f"{row.drafter} on {target}, T={row.temperature:g}: {calibration.error(row.learned):.3f}"
        for target, own in found.items()
        for row in own
    )
    return Claim(calibration.sentence(found), facts, calibration.origins(), lambda: calibration.figure(found))


def tune() -> Claim:
    """What tune predicted and what was measured."""
    facts = read_tuned(ROOT / "benchmarks" / "results" / "tuned.json").facts or {}
    tried = [(short_spec(each["drafter"]), each["measured"], each["predicted"]) for each in facts["tried"]]
    worst = max(abs(predicted / measured - 1) for _, measured, predicted in tried)
    origin = facts["provenance"]
    return Claim(
        f"From one run of a method, tune predicts the speed-up of its other sizes: {len(tried)} configurations were "
        f"within {100 * worst:.0f} % of what was then measured.",
        ", ".join(f"{name} {measured:.2f}/{predicted:.2f}" for name, measured, predicted in tried),
        f"bundled model; {origin['device']}, commit {origin['commit']}, {origin['time'][:10]}",
        lambda: points_figure("Speed-up", [each[1:] for each in tried], "measured", "predicted"),
    )


def several() -> Claim:
    """Hit rates of boosted drafts and of others."""
    return Claim(*drafts_figures.hits(), drafts_figures.hits_figure)


def draft_shapes() -> Claim:
    """Latency by layers and width, and throughput by formula and as measured."""
    return Claim(*drafts_figures.shapes(), drafts_figures.shapes_figure)


CLAIMS = {
    "engines": cpu_engines,
    "real": real,
    "policy": policy,
    "calibration": reliability,
    "transformers": transformers,
    "tune": tune,
    "several": several,
    "shapes": draft_shapes,
}


def path_of(name: str) -> Path:
    return FIGURES / f"results_{name}.svg"


def description(claim: Claim) -> str:
    return f"{claim.sentence}\n{claim.facts}\n{claim.made}."


@plots.styled()
def drawn(claim: Claim) -> str:
    """A picture on its own ground, with its claim and values as description, as SVG."""
    figure = claim.draw()
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    text = plots.themed_svg(figure, claim.sentence)
    text = re.sub(
        r'(id="|#)[A-Za-z0-9-]{40,}-', r"\1", text
    )  # a sentence is a long prefix, and no other picture is near
    return described(grounded(text), "", description(claim)).rstrip() + "\n"


def block(name: str) -> str:
    """Claim and picture, as Markdown."""
    claim = CLAIMS[name]()
    alt = claim.sentence.split(":")[0].rstrip(".").replace("[", "(").replace("]", ")")
    return f"**{claim.sentence}**\n\n![{alt}](figures/{path_of(name).name})\n\n<sub>{claim.made}.</sub>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", nargs="*", metavar="NAME", help=f"{', '.join(CLAIMS)}; default: all")
    names = parser.parse_args().pictures or list(CLAIMS)
    if unknown := set(names) - set(CLAIMS):
        parser.error(f"There is no picture {', '.join(sorted(unknown))}.")
    for name in names:
        path_of(name).write_text(drawn(CLAIMS[name]()), encoding="utf-8")


if __name__ == "__main__":
    main()
