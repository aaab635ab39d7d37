"""Tables of benchmarks/results/policy.jsonl: each method at its best fixed size, and under the throughput policy."""

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from origin import origin_line
from reading import markdown_table

from foredraft.bench.measure.summary import temperature_label
from foredraft.files.provenance import short_commit

RESULTS = Path(__file__).parent / "results" / "policy.jsonl"
POLICY, PLAIN = "policy", "0"
TITLES = {"humaneval": "HumanEval", "gsm8k": "GSM8K", "mt_bench": "MT-bench"}
IN_SHORT = ("eagle3", "eagle1", "draft_model", "medusa", "prompt_lookup")
"""The methods of the verdict's first line."""
PAGES = {"hydra++": "hydra", "pruned": "pruned_drafts"}
"""Pages of methods that share one with another, or have another name."""

SHARED_NOISE = "2026-11-24"
"""The first day on which drafts were ranked with the noise of the target's draw."""
NO_EVIDENCE = ("partial", "triforce")
"""Their prompts here fit into the budget, so drafts read the whole cache."""


class BenchArm(NamedTuple):
    """All runs of an arm: tokens a second, tokens per forward of the target, and tokens.

    ``halves``: tokens a second on the prompts with even numbers, and on the others.
    """

    rate: float
    length: float
    tokens: int
    halves: tuple[float, float]


class Cell(NamedTuple):
    """One target, method, temperature and task.

    ``arms`` by size, with plain decoding and the policy, without those that ended early because they were far behind:
    they had fewer prompts. ``origin``: the provenance. ``agreeing``: prompts on which all arms gave the same greedy
    output, and prompts compared.
    """

    target: str
    method: str
    temperature: float
    task: str
    arms: dict[str, BenchArm]
    origin: dict[str, Any]
    agreeing: tuple[int, int]

    @property
    def best(self) -> str:
        """The fastest fixed size in hindsight, plain decoding included."""
        return max((arm for arm in self.arms if arm != POLICY), key=lambda arm: self.arms[arm].rate)

    @property
    def best_draft(self) -> str | None:
        """The fastest fixed size that drafts; None if the drafter chooses its sizes itself."""
        sizes = [arm for arm in self.arms if arm not in (POLICY, PLAIN)]
        return max(sizes, key=lambda arm: self.arms[arm].rate, default=None)

    @property
    def ahead(self) -> float:
        """Speed of the policy over the fixed size that was the best on the other half of the prompts.

        The best size in hindsight is the luckiest of many that are about as good; this one could be known before.
        """
        arms = {arm: found for arm, found in self.arms.items() if arm != POLICY}
        chosen = [max(arms.values(), key=lambda arm, other=1 - half: arm.halves[other]).halves[half] for half in (0, 1)]
        return sum(mine / best for mine, best in zip(self.arms[POLICY].halves, chosen, strict=True)) / 2

    @property
    def ratio(self) -> float:
        """Speed of the policy over the best fixed size, plain decoding included."""
        return self.arms[POLICY].rate / self.arms[self.best].rate

    def speed_up(self, arm: str) -> float:
        return self.arms[arm].rate / self.arms[PLAIN].rate

    @classmethod
    def of(cls, line: dict[str, Any], origin: dict[str, Any]) -> "Cell":
        """A cell from its line of the file and the provenance before it."""
        runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for run in line["runs"]:
            runs[run["arm"]].append(run)
        arms = {arm: _summed(own) for arm, own in runs.items() if len(own) == len(runs[POLICY])}
        outputs: dict[int, set[str]] = defaultdict(set)
        for run in line["runs"]:
            if "digest" in run:
                outputs[run["prompt"]].add(run["digest"])
        agreeing = sum(len(some) == 1 for some in outputs.values()), len(outputs)
        names = (line[key] for key in ("target", "method", "temperature", "prompts"))
        return cls(*names, arms, origin, agreeing)


def rate(runs: Sequence[dict[str, Any]]) -> float:
    """All tokens over all seconds."""
    return sum(run["tokens"] for run in runs) / sum(run["seconds"] for run in runs)


def _summed(runs: Sequence[dict[str, Any]]) -> BenchArm:
    """All tokens over all seconds and forwards."""
    tokens, forwards = (sum(run[name] for run in runs) for name in ("tokens", "forwards"))
    even, odd = ([run for run in runs if run["prompt"] % 2 == half] for half in (0, 1))
    return BenchArm(rate(runs), tokens / forwards, tokens, (rate(even), rate(odd)))


def read(path: Path = RESULTS) -> list[Cell]:
    """The finished cells of a file."""
    cells: list[Cell] = []
    origin: dict[str, Any] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["kind"] == "cell":
            cells.append(Cell.of(line, origin))
        else:
            origin = line
    return cells


def origin_of(cells: Sequence[Cell]) -> dict[str, Any]:
    """The provenance of these cells: the latest one's, with all machines; ``commits`` says that others may differ."""
    latest = max((cell.origin for cell in cells), key=lambda origin: origin["date"])
    devices = sorted({cell.origin["device"] for cell in cells})
    several = {"commits": "commits in docs/results.md"} if len({cell.origin["commit"] for cell in cells}) > 1 else {}
    return {**latest, "device": " and ".join(devices), **several}


def by_cell(cells: Sequence[Cell]) -> str:
    """A row per cell: the best fixed size that drafts, the policy, and the policy against the best size of all."""
    head = ["target", "method", "T", "task", "best fixed size", "at that size", "under the policy", "policy / best"]
    head += ["chosen ahead", "commit"]
    lines = []
    for cell in cells:
        task, size = TITLES.get(cell.task, cell.task), cell.best_draft
        best = f"{cell.ratio:.2f}" + (" (plain)" if cell.best == PLAIN else "")
        fixed, against = ["", ""], ["", ""]
        if size is not None:
            fixed, against = [size, _shown(cell, size)], [best, f"{cell.ahead:.2f}"]
        setting = [cell.target, cell.method, f"{cell.temperature:g}", task]
        lines.append([*setting, *fixed, _shown(cell, POLICY), *against, short_commit(cell.origin["commit"])])
    return "\n".join(markdown_table(head, lines, words=(0, 1, 3, 9)))


def verdict(cells: Sequence[Cell]) -> str:
    """How often the policy is close to the best fixed size, and to plain decoding."""
    few = [cell for cell in cells if cell.method in IN_SHORT]
    same, of = (sum(cell.agreeing[part] for cell in cells) for part in (0, 1))
    return "\n".join(
        [
            f"- {_near(few)}, for {', '.join(IN_SHORT)}. By target: {_by_target(few)}.",
            f"- {_near([cell for cell in cells if cell.best_draft is not None])}, for all methods with fixed sizes.",
            f"- Cells of all methods below 0.95 of plain decoding under the policy: {_below_plain(cells) or 'none'}.",
            "- The best size in hindsight is also the luckiest of about ten. Chosen ahead is the size that was the "
            f"best on the other half of the prompts. {_luck(cells)}",
            f"- Greedy: all arms of a cell gave the same tokens on {same} of the {of} prompts that were compared.",
            f"- The policy and the best size have at least {_tokens(few)} tokens each in the first line and "
            f"{_tokens(cells)} in the second.",
        ]
    )


def _near(cells: Sequence[Cell]) -> str:
    """How many of the cells are near the best fixed size, the one chosen ahead, and plain decoding; and the means."""
    ratios, ahead = [cell.ratio for cell in cells], [cell.ahead for cell in cells]
    near, fair, safe = (
        sum(ratio >= 0.95 for ratio in some) for some in (ratios, ahead, [cell.speed_up(POLICY) for cell in cells])
    )
    return (
        f"The policy reaches 0.95 of the best fixed size (plain decoding included) in {near} of {len(cells)} cells, "
        f"0.95 of the size chosen ahead in {fair}, and 0.95 of plain decoding in {safe}; its mean is "
        f"{statistics.mean(ratios):.2f} of the first and {statistics.mean(ahead):.2f} of the second"
    )


def _by_target(cells: Sequence[Cell]) -> str:
    """How many of each target's cells are near the best fixed size."""
    targets = {target: [cell.ratio for cell in cells if cell.target == target] for target in {c.target for c in cells}}
    near = (f"{name} {sum(ratio >= 0.95 for ratio in own)} of {len(own)}" for name, own in sorted(targets.items()))
    return ", ".join(near)


def _below_plain(cells: Sequence[Cell]) -> str:
    """The names of the cells where the policy is slower than plain decoding by more than five in a hundred."""
    low = sorted((cell.speed_up(POLICY), cell) for cell in cells if cell.speed_up(POLICY) < 0.95)
    return ", ".join(
        f"{cell.method} on {cell.target}, {TITLES.get(cell.task, cell.task)}, T={cell.temperature:g} ({speed:.2f})"
        for speed, cell in low
    )


def _luck(cells: Sequence[Cell]) -> str:
    """How much chance there is in cells whose arms sample texts of their own."""
    spreads = []
    for cell in cells:
        if cell.method == "draft_model" and cell.temperature:
            lengths = [arm.length for name, arm in cell.arms.items() if name not in (POLICY, "0", "1", "2")]
            if len(lengths) > 1:
                spreads.append(100 * statistics.stdev(lengths) / statistics.mean(lengths))
    return (
        f"At T=1 the arms of draft_model sample texts of their own, and with these the tokens per forward of its sizes "
        f"from 3 on, which hardly differ otherwise, have a standard deviation of {min(spreads):.0f} to "
        f"{max(spreads):.0f} %. "
        if spreads
        else ""
    )


def _tokens(cells: Sequence[Cell]) -> str:
    """The fewest tokens of the policy, or of the best size."""
    least = min(cell.arms[arm].tokens for cell in cells for arm in (POLICY, cell.best))
    return f"{least // 100 * 100:,}"


def by_method(cells: Sequence[Cell]) -> str:
    """A row per method: means over tasks at the best fixed size of each task, and under the policy."""
    settings = list(dict.fromkeys((cell.target, cell.temperature) for cell in cells))
    names = [f"{target}, {temperature_label(heat)}" for target, heat in settings]
    head = [column for name in names for column in (f"{name}: best size", "policy")]
    lines = []
    for method in dict.fromkeys(cell.method for cell in cells):
        columns = []
        for target, heat in settings:
            own = [c for c in cells if (c.target, c.method, c.temperature) == (target, method, heat)]
            columns += _both(own)
        lines.append([method, *columns])
    return "\n".join(markdown_table(["method", *head], lines))


def of_page(cells: Sequence[Cell], page: str) -> str:
    """What was measured for the methods of a page, a row each, and how old it is; empty without a cell."""
    lines = []
    cells = [cell for cell in cells if cell.method not in NO_EVIDENCE and PAGES.get(cell.method, cell.method) == page]
    for method, target, heat in dict.fromkeys((cell.method, cell.target, cell.temperature) for cell in cells):
        own = [c for c in cells if (c.method, c.target, c.temperature) == (method, target, heat)]
        lines.append([method, target, temperature_label(heat), *_both(own)])
    if not lines:
        return ""
    head = ["drafter", "target", "temperature", "best fixed size", "policy"]
    title = "Speed-up over plain decoding / tokens per forward of the target, means over [tasks](../results.md):"
    return "\n".join([title, "", *markdown_table(head, lines, words=(0, 1, 2)), "", _age(cells)])


def _age(cells: Sequence[Cell]) -> str:
    """Where these cells are from, and which of them are older than shared noise."""
    rows: dict[str, bool] = {}  # whether a row has a cell that old
    for cell in cells:
        name = f"{cell.method} on {cell.target}, {temperature_label(cell.temperature)}"
        rows[name] = rows.get(name, False) or cell.origin["date"] < SHARED_NOISE
    commits = ", ".join(dict.fromkeys(short_commit(cell.origin["commit"]) for cell in cells))
    origin = {**origin_of(cells), "commits": f"commit{'s' if ',' in commits else ''} {commits}"}
    newer = "; ".join(name for name, old in rows.items() if not old)
    return (
        "**Older than [shared noise](shared_noise.md) and the present [policy](../schedules.md)**, and not measured "
        f"again{f' (with shared noise: {newer})' if newer else ''}. {origin_line(origin)}."
    )


def _shown(cell: Cell, arm: str) -> str:
    return f"{cell.speed_up(arm):.2f} / {cell.arms[arm].length:.2f}"


def _both(cells: Sequence[Cell]) -> list[str]:
    """Means at the best fixed size of each cell, and under the policy."""
    fixed = [(cell, cell.best_draft) for cell in cells if cell.best_draft is not None]
    return [_mean(fixed), _mean([(cell, POLICY) for cell in cells])]


def _mean(chosen: Sequence[tuple[Cell, str]]) -> str:
    if not chosen:
        return ""
    speeds = [cell.speed_up(arm) for cell, arm in chosen]
    lengths = [cell.arms[arm].length for cell, arm in chosen]
    return f"{sum(speeds) / len(speeds):.2f} / {sum(lengths) / len(lengths):.2f}"
