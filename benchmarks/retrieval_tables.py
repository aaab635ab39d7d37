"""Tables, sentence and picture of benchmarks/results/retrieval.jsonl, for docs/methods/triforce.md."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from origin import origin_line
from pictures import described, grounded
from reading import interval, markdown_table, read
from retrieval import BUDGETS, CHUNKS, RESULTS, TASKS, Arm

from foredraft.bench.report import plots

FIGURE = Path(__file__).resolve().parent.parent / "docs" / "figures" / "triforce.svg"
SAMPLES = 2000
"""Of the bootstrap."""
NAMES = {
    Arm("retrieval", 0): "retrieval",
    Arm("retrieval", 0, score="best"): "retrieval, `score=best`",
    Arm("retrieval", 0, whole_layers=2): "retrieval, first two layers whole",
    Arm("retrieval", 0, room=8): "retrieval, renewed every 8 tokens",
    Arm("window", 0): "window",
    Arm("window", 0, whole_layers=2): "window, first two layers whole",
    Arm("h2o", 0): "h2o",
    Arm("oracle", 0): "oracle",
}
DRAWN = {"oracle": 3, "retrieval": 0, "h2o": 1, "window": 2}
"""Caches of the picture, and the numbers of their colours."""
LAYERS = ((0, 1), (1, 2), (2, 3), (3, 10), (10, 20), (20, 30))
Runs = dict[tuple[str, int, Arm], dict[str, Any]]


def runs_of(kinds: dict[str, list[dict]]) -> Runs:
    runs = {(run["task"], run["context"], Arm(*run["arm"])): run for run in kinds["run"]}
    return dict(sorted(runs.items(), key=lambda item: (TASKS.index(item[0][0]), item[0][1])))


def length(counts: Sequence[Sequence[int]]) -> float:
    """Tokens per forward of the target."""
    return sum(count[0] for count in counts) / sum(count[1] for count in counts)


def counted(runs: Runs, task: str, arm: Arm) -> list[list[int]]:
    """The rows of an arm in all contexts of a task."""
    return [count for (name, _, each), run in runs.items() if (name, each) == (task, arm) for count in run["counts"]]


def shown(counts: Sequence[Sequence[int]]) -> str:
    if not counts:
        return ""
    low, high = interval(counts, length, SAMPLES)
    return f"{length(counts):.2f} ({low:.2f} to {high:.2f})"


def acceptance(runs: Runs) -> list[str]:
    """Acceptance length by task, context, cache and budget."""
    rows = []
    for task, context in dict.fromkeys((task, context) for task, context, _ in runs):
        for arm, name in NAMES.items():
            cells = [runs.get((task, context, arm._replace(budget=budget))) for budget in BUDGETS]
            if any(cells):
                rows.append([f"{task}, {context:,}", name, *(shown(cell["counts"]) if cell else "" for cell in cells)])
    return markdown_table(["task, tokens", "cache", *map(str, BUDGETS)], rows, words=(0, 1))


def chunks(runs: Runs) -> list[str]:
    """Acceptance length of retrieval by chunk size and budget, over all contexts of a task."""
    rows = []
    for task in TASKS:
        for chunk in CHUNKS:
            cells = [counted(runs, task, Arm("retrieval", budget, chunk)) for budget in BUDGETS]
            if any(cells):
                rows.append([task, str(chunk), *(f"{length(cell):.2f}" if cell else "" for cell in cells)])
    return markdown_table(["task", "chunk", *map(str, BUDGETS)], rows)


def losses(kinds: dict[str, list[dict]], runs: Runs, budget: int) -> list[str]:
    """Loss of the target's text over the whole cache and over parts of it."""
    arms = {name: Arm(name, budget) for name in ("window", "h2o", "retrieval", "oracle")}
    rows = []
    for text in sorted(kinds.get("text", ()), key=lambda text: (TASKS.index(text["task"]), text["context"])):
        task, context = text["task"], text["context"]
        found = [runs.get((task, context, arm)) for arm in arms.values()]
        repeated = f"{sum(text['repeated']) / sum(text['tokens']):.2f}" if text["repeated"] else ""
        cells = [f"{statistics.mean(run['loss']):.2f}" if run else "" for run in found]
        rows.append([f"{task}, {context:,}", repeated, f"{statistics.mean(text['loss']):.2f}", *cells])
    return markdown_table(["task, tokens", "repeated", "whole cache", *arms], rows)


def layers(kinds: dict[str, list[dict]], budget: int) -> list[str]:
    """Share of attention on the selected tokens and relative error of attention's output, by layer, over all texts."""
    kinds_of = ("window", "retrieval", "best", "oracle")
    names = [f"{name} {budget}" for name in kinds_of]
    every = [line["layers"] for line in kinds.get("reconstruction", ()) if names[0] in line["layers"]]
    rows = []
    for first, end in LAYERS:
        cells = []
        for kind in ("held", "error"):
            for name in names:
                values = [value for each in every for value in each[name][kind][first:end]]
                cells.append(f"{statistics.mean(values):.2f}" if values else "")
        if any(cells):
            rows.append([str(end) if end == first + 1 else f"{first + 1} to {end}", *cells])
    head = ["window", "retrieval", "`score=best`", "oracle"]
    return markdown_table(["layer", *(f"held, {name}" for name in head), *(f"error, {name}" for name in head)], rows)


def paired(runs: Runs, task: str, first: Arm, second: Arm) -> list[tuple[list[int], list[int]]]:
    """The rows of two arms, in the contexts of a task that both have."""
    pairs = []
    for context in dict.fromkeys(context for name, context, _ in runs if name == task):
        own = [runs.get((task, context, arm)) for arm in (first, second)]
        if all(own):
            pairs += zip(*(run["counts"] for run in own if run), strict=True)
    return pairs


def ratio(pairs: Sequence[tuple[list[int], list[int]]]) -> float:
    """Acceptance length of the first arm over that of the second, on the same texts."""
    first, second = zip(*pairs, strict=True)
    return length(first) / length(second)


def ratios(runs: Runs, first: Arm, second: Arm) -> dict[str, str]:
    """By task, the range of ``ratio`` over budgets, and with how many the 95 % interval is above 1."""
    found = {}
    for task in TASKS:
        both = [paired(runs, task, *(arm._replace(budget=budget) for arm in (first, second))) for budget in BUDGETS]
        if pairs := [own for own in both if own]:
            values = [ratio(own) for own in pairs]
            better = sum(interval(own, ratio, SAMPLES)[0] > 1 for own in pairs)
            found[task] = f"{min(values):.2f} to {max(values):.2f} ({better} of {len(pairs)} above 1)"
    return found


def comparisons(runs: Runs) -> list[str]:
    """Arms against each other at equal budgets."""
    retrieval = Arm("retrieval", 0)
    pairs = {
        "retrieval / window": (retrieval, Arm("window", 0)),
        "retrieval / h2o": (retrieval, Arm("h2o", 0)),
        "oracle / retrieval": (Arm("oracle", 0), retrieval),
        "`score=best` / mean": (retrieval._replace(score="best"), retrieval),
        "first two layers whole / not": (retrieval._replace(whole_layers=2), retrieval),
        "renewed every 8 tokens / 64": (retrieval._replace(room=8), retrieval),
    }
    rows = []
    for name, arms in pairs.items():
        found = ratios(runs, *arms)
        if found:
            rows.append([name, *(found.get(task, "") for task in TASKS)])
    return markdown_table(["acceptance lengths", *TASKS], rows)


def sentence(path: Path = RESULTS) -> str:
    """What the paper claims, and what was found here."""
    kinds = read(path)
    runs, origin = runs_of(kinds), kinds["provenance"][-1]
    parts = []
    for task, name in zip(
        TASKS, ("on planted facts", "on copies of far passages", "on a text that goes on"), strict=True
    ):
        cells = {cache: counted(runs, task, Arm(cache, 512)) for cache in ("retrieval", "window", "h2o", "oracle")}
        if cells["retrieval"]:
            values = ", ".join(f"{cache} {length(own):.2f}" for cache, own in cells.items() if own)
            parts.append(f"{name} {values}")
    contexts = sorted({context for _, context, _ in runs})
    longest = " and ".join(f"{context:,}" for context in contexts)
    return (
        "The paper claims that chunks retrieved by the query draft better than a window or heavy hitters of the same "
        "size, and that few tokens suffice in all layers but the first two. "
        f"Found here ({origin['model']}, {longest} tokens, 512 kept), tokens per forward: {'; '.join(parts)}."
    )


def table(path: Path = RESULTS) -> str:
    """All tables, with the picture."""
    kinds = read(path)
    runs, origin = runs_of(kinds), kinds["provenance"][-1]
    texts = kinds.get("text", [])
    rows = sum(len(text["tokens"]) for text in texts)
    tokens = sum(sum(text["tokens"]) for text in texts)
    name = Path(FIGURE).name
    return "\n".join(
        [
            f"{origin['model']}, greedy, drafts of {origin['gamma']} tokens. Ratios at equal budgets: the range over "
            f"{', '.join(map(str, BUDGETS))} tokens, and with how many the 95 % interval is above 1:",
            "",
            *comparisons(runs),
            "",
            f"![Acceptance length on planted facts by budget: oracle, retrieval, h2o, window](../figures/{name})",
            "",
            "Acceptance length (95 % bootstrap interval over texts) by budget:",
            "",
            *acceptance(runs),
            "",
            "By the tokens of a chunk, all contexts together:",
            "",
            *chunks(runs),
            "",
            "Loss of the target's texts, nats per token, over the whole cache and over 512 tokens selected once; the "
            "share of tokens that repeat what stands far back:",
            "",
            *losses(kinds, runs, 512),
            "",
            "By layer, 512 tokens selected by the same query: the share of attention that they hold, and the relative "
            "error of the attention's output:",
            "",
            *layers(kinds, 512),
            "",
            f"{rows} texts, {tokens:,} tokens. The oracle keeps, for each query, layer and group of heads, the tokens "
            "with the most attention; no drafter can, since it would read the whole cache. Made by "
            f"`{origin['command']}`: {origin_line(origin)}.",
        ]
    )


def values(path: Path = RESULTS) -> dict[str, list[tuple[int, float]]]:
    """Acceptance length on planted facts by budget, for the caches of the picture."""
    runs = runs_of(read(path))
    found = {name: [(budget, counted(runs, "planted", Arm(name, budget))) for budget in BUDGETS] for name in DRAWN}
    return {name: [(budget, length(own)) for budget, own in points if own] for name, points in found.items()}


def facts(path: Path = RESULTS) -> str:
    """The values of the picture and where they are from, as text."""
    origin = read(path)["provenance"][-1]
    rows = [f"{name}: " + ", ".join(f"{b} {v:.2f}" for b, v in own) for name, own in values(path).items()]
    return "\n".join([*rows, f"{origin['model']}, planted facts, greedy; {origin_line(origin)}."])


@plots.styled()
def plot(path: Path = RESULTS, figure_path: Path = FIGURE) -> None:
    """Draw acceptance by budget on planted facts."""
    figure, axes = plots.canvas(5.6, 3.2)
    for name, own in values(path).items():
        if not own:
            continue
        axes.plot(*zip(*own, strict=True), "o-", color=plots.color(DRAWN[name]), markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(BUDGETS, map(str, BUDGETS))
    axes.set_ylim(1, 8)
    axes.set_yticks(range(1, 9), map(str, range(1, 9)))
    axes.set_xlabel("tokens kept of the cache")
    axes.set_title("Acceptance length, planted facts")
    axes.legend(frameon=False)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    text = grounded(plots.themed_svg(figure, "Acceptance length on planted facts by budget"))
    figure_path.write_text(described(text, "", facts(path)).rstrip() + "\n", encoding="utf-8")
