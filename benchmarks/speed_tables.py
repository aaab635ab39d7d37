"""Tables of benchmarks/results/speed.jsonl: our loop against transformers, both sides in one process."""

import statistics
from pathlib import Path

from origin import origin_line
from policy_tables import TITLES
from reading import markdown_table, quartiles

RESULTS = Path(__file__).resolve().parent / "results" / "speed.jsonl"
TASKS = tuple(TITLES)
PAIRS = (  # title, faster arm, slower arm
    ("plain decoding / transformers' `generate`", "plain", "hf_plain"),
    ("draft model / transformers' assisted generation", "draft_model", "hf_assisted"),
    ("draft model / transformers' `generate`", "draft_model", "hf_plain"),
    ("draft model / our plain decoding", "draft_model", "plain"),
    ("prompt lookup / our plain decoding", "prompt_lookup", "plain"),
    ("transformers' assisted generation / its `generate`", "hf_assisted", "hf_plain"),
    ("transformers' prompt lookup / its `generate`", "hf_lookup", "hf_plain"),
)


def markdown(kinds: dict[str, list[dict]]) -> str:
    """All results of a run, as Markdown."""
    runs, origin = kinds["run"], kinds["provenance"][0]
    prompts = {(run["task"], run["prompt"]) for run in runs}
    tasks = [TITLES[task] for task in TASKS]
    speeds, rates, lengths = [], [], []
    for title, top, bottom in PAIRS:
        speeds.append([title, *_ratios(runs, top, bottom)])
    for arm in dict.fromkeys(run["arm"] for run in runs):
        own = [_of(runs, arm, task) for task in TASKS]
        rates.append([arm, *(quartiles([r["tokens"] / r["seconds"] for r in each]) for each in own)])
        if arm in ("draft_model", "prompt_lookup"):
            means = [statistics.mean(r["stats"]["acceptance_length"] for r in each) for each in own]
            lengths.append([arm, *(f"{mean:.2f}" for mean in means)])
    lines = [*markdown_table(["speed-up, median (quartiles)", *tasks], speeds), ""]
    lines += [*markdown_table(["tokens per second, median (quartiles)", *tasks], rates), ""]
    lines += [*markdown_table(["acceptance length", *tasks], lengths), ""]
    lines += [*_costs(kinds), *_memory(kinds), ""]
    lines.append(
        f"All arms produced the same tokens on {_agreeing(runs)} of {len(prompts)} prompts. {origin['target']} with "
        f"{origin['draft']}, greedy, {origin['new_tokens']} new tokens, prefill included, {origin_line(origin)}. Made "
        f"by `{origin['command']}`; every run is in `benchmarks/results/speed.jsonl`."
    )
    return "\n".join(lines)


def _of(runs: list[dict], arm: str, task: str) -> list[dict]:
    return [run for run in runs if run["arm"] == arm and run["task"] == task]


def _ratios(runs: list[dict], top: str, bottom: str) -> list[str]:
    """Median and quartiles of each task."""
    return [quartiles(paired([run for run in runs if run["task"] == task], top, bottom)) for task in TASKS]


def paired(runs: list[dict], top: str, bottom: str) -> list[float]:
    """Ratios of paired prompts, so that a slow minute of the machine cancels out."""
    slow = {(run["task"], run["prompt"]): run["seconds"] for run in runs if run["arm"] == bottom}
    return [slow[run["task"], run["prompt"]] / run["seconds"] for run in runs if run["arm"] == top]


def _agreeing(runs: list[dict]) -> int:
    outputs: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    for run in runs:
        outputs.setdefault((run["task"], run["prompt"]), set()).add(tuple(run["output"]))
    return sum(len(texts) == 1 for texts in outputs.values())


def _costs(kinds: dict[str, list[dict]]) -> list[str]:
    lines = []
    for cost in kinds.get("cost", []):
        ratios = [seconds / cost["seconds"][0] for seconds in cost["seconds"]]
        head = ["rows in a forward", *map(str, cost["rows"])]
        times = ["milliseconds", *(f"{1e3 * seconds:.1f}" for seconds in cost["seconds"])]
        lines += [*markdown_table(head, [times, ["relative to one row", *(f"{ratio:.2f}" for ratio in ratios)]]), ""]
    return lines


def _memory(kinds: dict[str, list[dict]]) -> list[str]:
    lines = []
    for memory in kinds.get("memory", []):
        peak = memory["mebibytes"]
        for ours, theirs in (("plain", "hf_plain"), ("draft_model", "hf_assisted")):
            ratio = peak[ours] / peak[theirs]
            lines.append(
                f"Peak memory of {ours}: {peak[ours]:.0f} MiB, {ratio:.2f} of {theirs}'s {peak[theirs]:.0f} MiB."
            )
    return lines
