"""Tables of docs/results.md from benchmarks/results/acceptance.jsonl, which ``acceptance.py`` writes."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from origin import origin_line
from reading import interval_of_sums, markdown_table, read
from real_model import HEADS, SAMPLES, by_position, length

from foredraft.bench.measure.records import Run
from foredraft.files.provenance import short_commit

RESULTS = Path(__file__).resolve().parent / "results" / "acceptance.jsonl"
PLAIN, SHARED, PICKED = "none", "shared noise", "picked"
"""The method that drafts nothing; rules beside the ratio rules."""
_TREE = ("traversal",)
RATIO = {
    **dict.fromkeys(("eagle3", "eagle2", "eagle1", "hydra", "medusa"), _TREE),
    "eagle1-chain": ("traversal", "recursive"),
    "eagle3-chain": (),
    "blockwise": ("block", "token"),
    "draft_model": ("block", "token"),
}
"""The ratio rules for a method's drawn drafts, the best first. EAGLE-3 draws no chains."""
TITLES = {
    "eagle3": "EAGLE-3",
    "eagle2": "EAGLE-2",
    "eagle2-expanded": "EAGLE-2, four expanded a level",
    "eagle2-no-value": "the same without value",
    "eagle2-no-rerank": "the same without re-rank",
    "eagle2-neither": "the same without both",
    "eagle1": "EAGLE-1",
    "hydra": "Hydra++",
    "medusa": "Medusa",
    "eagle3-chain": "EAGLE-3, chain",
    "eagle1-chain": "EAGLE-1, chain",
    "blockwise": "blockwise",
    "draft_model": "draft model",
    "sequoia": "Sequoia",
    "prompt_lookup": "prompt lookup",
    "max_gram": "Max-Gram",
}
ORDER = ("eagle3", "eagle2", "eagle1", "hydra", "medusa")
"""The papers', best first."""
Arm = tuple[str, str]
"""Method and size."""
Cell = tuple[str, str, str, float]
"""Method, size, rule, temperature."""


@dataclass(slots=True)
class Results:
    """A results file. ``texts``: by cell and task, of each prompt. ``nodes``: of each arm."""

    texts: dict[Cell, dict[str, list[Run]]] = field(default_factory=dict)
    nodes: dict[Arm, int] = field(default_factory=dict)
    repeated: dict[str, float] = field(default_factory=dict)
    origins: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, path: Path) -> "Results":
        """Of what ran several times, the last."""
        kinds, found = read(path), cls()
        found.origins = kinds["provenance"]
        for line in kinds.get("cell", []):
            cell = line["method"], line["size"], line["rule"], line["temperature"]
            found.texts.setdefault(cell, {})[line["task"]] = [_run(line, *text) for text in line["texts"]]
            found.nodes[cell[:2]] = line["nodes"]
            if line["temperature"] == 0 and "repeated" in line:
                found.repeated[line["task"]] = line["repeated"]
        return found

    @property
    def temperatures(self) -> list[float]:
        return sorted({cell[3] for cell in self.texts})

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(task for own in self.texts.values() for task in own))

    def size(self, arm: Arm) -> int:
        """Drafted tokens of an arm, as its name has them."""
        return self.nodes[arm] if arm[1] == HEADS else int(arm[1])

    def arms(self) -> list[Arm]:
        """All that draft, the papers' order first."""
        methods = list(TITLES)
        found = [arm for arm in self.nodes if arm[0] != PLAIN]
        return sorted(found, key=lambda arm: (methods.index(arm[0]), self.size(arm)))

    def runs(self, cell: Cell) -> list[Run]:
        return [run for own in self.texts.get(cell, {}).values() for run in own]

    def pairs(self, cell: Cell, other: Cell) -> list[tuple[Run, Run]]:
        """The texts of two cells that have the same prompt."""
        ours, theirs = self.texts.get(cell, {}), self.texts.get(other, {})
        return [pair for task in ours for pair in zip(ours[task], theirs.get(task, []), strict=False)]

    def beside_plain(self, cell: Cell) -> list[tuple[Run, Run]]:
        """The texts of a cell that should be plain decoding's, with those."""
        if cell[0] == PLAIN or cell[2] not in (SHARED, PICKED):
            return []
        return self.pairs(cell, (PLAIN, "", SHARED, cell[3]))


def _run(line: dict[str, Any], tokens: int, forwards: int, reached: Sequence[int], digest: str = "") -> Run:
    return Run(digest, line["task"], (), tokens=tokens, forwards=forwards, accepted_by_depth=tuple(reached))


def _rate(sums: np.ndarray) -> np.ndarray:
    return sums[0] / sums[1]


def length_with_interval(runs: Sequence[Run]) -> str:
    """The acceptance length with its interval."""
    low, high = interval_of_sums([(run.tokens, run.forwards) for run in runs], _rate, SAMPLES)
    return f"{length(runs):.2f} ({low:.2f} to {high:.2f})"


def difference(pairs: Sequence[tuple[Run, Run]]) -> tuple[float, float, float]:
    """How much longer the first ones' acceptance length is, with the interval of the bootstrap over pairs."""
    rows = [(ours.tokens, ours.forwards, theirs.tokens, theirs.forwards) for ours, theirs in pairs]
    ours, theirs = zip(*pairs, strict=True)
    return length(ours) - length(theirs), *interval_of_sums(rows, lambda s: _rate(s[:2]) - _rate(s[2:]), SAMPLES)


Comparison = tuple[str, tuple[str, str], tuple[str, str]]
"""A title, and two methods, each with its rule."""


def orders() -> list[Comparison]:
    """The orderings of the papers, at every temperature."""
    found = []
    for better, worse in itertools.pairwise(ORDER):
        title = f"{TITLES[better]} over {TITLES[worse]}"
        title += ": a dynamic tree over a static one, same weights" * (better == "eagle2")
        found.append((title, (better, SHARED), (worse, SHARED)))
    found.append(("EAGLE-3: tree over chain", ("eagle3", SHARED), ("eagle3-chain", SHARED)))
    for title, without in (("value", "no-value"), ("re-rank", "no-rerank"), ("both", "neither")):
        found.append((f"EAGLE-2: {title} over none", ("eagle2-expanded", SHARED), (f"eagle2-{without}", SHARED)))
    found.append(("draft model: Sequoia over chain", ("sequoia", SHARED), ("draft_model", SHARED)))
    return found


def rules() -> list[Comparison]:
    """Comparisons of rules, above temperature 0."""
    found = []
    for method in ORDER:
        title, (best,) = TITLES[method], RATIO[method]
        found.append((f"{title}: shared noise over {best}", (method, SHARED), (method, best)))
        found.append((f"{title}: drawn, {best}, over picked", (method, best), (method, PICKED)))
        found.append((f"{title}: shared noise over picked", (method, SHARED), (method, PICKED)))
    for method in ("eagle1-chain", "blockwise", "draft_model"):
        block, token = RATIO[method]
        found.append((f"{TITLES[method]}: block over token verification", (method, block), (method, token)))
    return found


def differences(results: Results, comparisons: Sequence[Comparison]) -> str:
    """Comparisons by temperature and number of nodes, as far as both sides were run; empty if none was."""
    sizes, lines = sorted({results.size(arm) for arm in results.arms()}), []
    names = {(arm[0], results.size(arm)): arm[1] for arm in results.arms()}
    for title, ours, theirs in comparisons:
        for temperature in results.temperatures:
            row = []
            for size in sizes:
                cells = [(method, names.get((method, size), ""), rule, temperature) for method, rule in (ours, theirs)]
                pairs = results.pairs(*cells)
                middle, low, high = difference(pairs) if pairs else (0.0, 0.0, 0.0)
                row.append(f"{middle:+.2f} ({low:+.2f} to {high:+.2f})" if pairs else "")
            if any(row):
                lines.append([title, f"{temperature:g}", *row])
    head = ["difference in acceptance length", "T", *(f"{size} nodes" for size in sizes)]
    return "\n".join(markdown_table(head, lines)) if lines else ""


def by_arm(results: Results, temperature: float) -> tuple[str, str]:
    """A title, and every arm at a temperature with the rules that were run there; an empty table if no arm was."""
    run = {cell[2] for cell in results.texts if cell[3] == temperature}
    picked, drawn = PICKED in run, bool(run - {SHARED, PICKED})
    tasks, lines = results.tasks, []
    for arm in results.arms():
        runs = results.runs((*arm, SHARED, temperature))
        if not runs:
            continue
        row = [TITLES[arm[0]], str(results.nodes[arm]), length_with_interval(runs)]
        ratio = [(*arm, rule, temperature) for rule in RATIO.get(arm[0], ())]
        if drawn:
            row.append(
                "; ".join(f"{cell[2]} {length_with_interval(own)}" for cell in ratio if (own := results.runs(cell)))
            )
        if picked:
            own = results.runs((*arm, PICKED, temperature))
            row.append(length_with_interval(own) if own else "")
        row.append(by_position(runs))
        for task in tasks:
            shown = [
                f"{length(own):.2f}"
                for cell in ((*arm, SHARED, temperature), *ratio)
                if (own := results.texts.get(cell, {}).get(task))
            ]
            row.append(" / ".join(shown))
        lines.append(row)
    first = "shared noise" if drawn or picked else "acceptance length"
    head = ["method", "nodes", first, *["drawn, ratio rule"] * drawn, *["picked"] * picked, "by position", *tasks]
    beside = " (by task: shared noise / ratio rule)" if drawn else ", shared noise"
    title = "Greedy:" if temperature == 0 else f"Temperature {temperature:g}{beside}:"
    return title, "\n".join(markdown_table(head, lines)) if lines else ""


def notes(results: Results) -> str:
    """What the tables rest on."""
    shown = ", ".join(f"{task} {share:.2f}" for task, share in results.repeated.items())
    commits = list(dict.fromkeys(short_commit(each["commit"]) for each in results.origins))
    origin = results.origins[-1] | ({"commits": f"commits {', '.join(commits)}"} if len(commits) > 1 else {})
    if origin.get("replayed"):
        texts = "With shared noise and picked, drafters are replayed on plain decoding's texts, from recorded states."
    else:
        same = [ours.arm == plain.arm for cell in results.texts for ours, plain in results.beside_plain(cell)]
        texts = "Texts equal to plain decoding's of the same seed, with shared noise and picked: "
        texts += f"{sum(same)} of {len(same)}."
    return (
        f"{texts} "
        f"Share of repeated 4-grams in greedy answers: {shown}. {origin_line(origin, origin['dtype'])}. Made by "
        "`benchmarks/acceptance.py`, with the options in "
        "[acceptance.jsonl](../benchmarks/results/acceptance.jsonl)."
    )


def tables(path: Path = RESULTS) -> str:
    """The orderings, and one table for each temperature."""
    results = Results.of(path)
    counts = {len(own) for by_task in results.texts.values() for own in by_task.values()}
    most, tokens = max(counts), results.origins[-1]["new_tokens"]
    size = f"{most} prompt{'s' * (most > 1)} a task"
    titles = {"Orderings, with intervals over the same prompts:": orders(), "Rules at temperatures above 0:": rules()}
    parts = [(title, differences(results, comparisons)) for title, comparisons in titles.items()]
    parts += [by_arm(results, temperature) for temperature in results.temperatures]
    about = f"Acceptance on {size}, {tokens} new tokens."
    return "\n\n".join([about, *(f"{title}\n\n{part}" for title, part in parts if part), notes(results)])
