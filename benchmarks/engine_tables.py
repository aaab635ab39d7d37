"""Tables of a run of ``engines.py``."""

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from reading import interval, markdown_table, quartiles

PLAIN, DEFAULT = "plain", "default"
SHORT = (
    f"foredraft int4 {PLAIN}",
    f"foredraft int4 {DEFAULT}",
    f"foredraft Q4_0 {PLAIN}",
    f"foredraft Q4_0 {DEFAULT}",
    f"foredraft Q8_0 {DEFAULT}",
    f"llama.cpp Q4_0 {PLAIN}",
    "llama.cpp Q4_0 lookup",
    f"llama.cpp Q8_0 {PLAIN}",
    f"openvino Q4_1 {PLAIN}",
    "openvino Q4_1 lookup",
    "openvino Q4_1-ACCURACY lookup",
    f"transformers bfloat16 {PLAIN}",
    "transformers bfloat16 lookup",
)
"""Arms of README's table."""
PAIRS = (
    ("foredraft int4", "foredraft int4"),
    ("foredraft Q4_0", "foredraft Q4_0"),
    ("foredraft Q8_0", "foredraft Q8_0"),
    ("foredraft float32", "foredraft float32"),
    ("foredraft int4", "llama.cpp Q4_0"),
    ("foredraft Q4_0", "llama.cpp Q4_0"),
    ("foredraft Q8_0", "llama.cpp Q8_0"),
    ("foredraft int4", "openvino Q4_1"),
    ("foredraft Q4_1", "openvino Q4_1"),
    ("foredraft Q4_1", "openvino Q4_1-ACCURACY"),
    ("foredraft int4", "transformers bfloat16"),
    ("foredraft float32", "transformers float32"),
)
"""What a user of foredraft gets, and what it is compared with: its own plain decoding, or the best mode of a peer."""
SAMPLES = 2000
"""Of the bootstrap over prompts."""


class Comparison(NamedTuple):
    """An arm against another on the same prompts: ratios of tokens per second by task."""

    threads: int
    ours: str
    theirs: str
    by_task: dict[str, list[float]]

    @property
    def ratios(self) -> list[float]:
        return [ratio for some in self.by_task.values() for ratio in some]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def bounds(self) -> tuple[float, float]:
        """The 95 % interval of the ratio."""
        return interval(self.ratios, statistics.median, SAMPLES)

    @property
    def slower(self) -> dict[str, float]:
        """Medians of the tasks on which the other is faster."""
        medians = {task: statistics.median(some) for task, some in self.by_task.items()}
        return {task: ratio for task, ratio in medians.items() if ratio < 1}

    def __str__(self) -> str:
        return f"{self.ratio:.2f} ({self.bounds[0]:.2f} to {self.bounds[1]:.2f})"


def comparisons(lines: dict[str, list[dict]]) -> Iterator[Comparison]:
    """Our defaults against plain decoding and against the peers, each in the mode that had the highest median rate."""
    runs = by_arm(lines)
    for threads in sorted({threads for threads, _ in runs}):
        for ours, theirs in PAIRS:
            own, other = runs.get((threads, f"{ours} {DEFAULT}")), best_of(runs, threads, theirs)
            if own is None or other is None:
                continue
            rates, by_task = {place(run): rate(run) for run in runs[threads, other]}, dict[str, list[float]]()
            for run in own:
                if place(run) in rates:
                    by_task.setdefault(run["task"], []).append(rate(run) / rates[place(run)])
            yield Comparison(threads, f"{ours} {DEFAULT}", other, by_task)


def best_of(runs: dict[tuple[int, str], list[dict]], threads: int, engine: str) -> str | None:
    """The fastest arm of an engine with these weights; of ours, plain decoding."""
    if engine.startswith("foredraft"):
        found = [name for name in (f"{engine} {PLAIN}",) if (threads, name) in runs]
    else:
        found = [name for count, name in runs if count == threads and name.rsplit(" ", 1)[0] == engine]
    return max(found, key=lambda name: statistics.median(map(rate, runs[threads, name])), default=None)


def users(lines: dict[str, list[dict]]) -> str:
    """What a user of foredraft gets without naming a drafter, against the others."""
    rows = []
    for found in comparisons(lines):
        slower = ", ".join(f"{task} ({ratio:.2f})" for task, ratio in found.slower.items())
        rows.append([found.ours, found.theirs, str(found.threads), str(found), slower])
    head = ["foredraft", "against", "threads", "ratio of tokens/s (95 % interval)", "slower on"]
    return "\n".join(markdown_table(head, rows, words=(0, 1, 2, 4)))


def tables(found: dict[str, list[dict]]) -> str:
    """Each arm's figures, and tokens per second by task."""
    runs = by_arm(found)
    one = {kind: {(line["threads"], line["arm"]): line for line in found.get(kind, [])} for kind in ("load", "memory")}
    quality = {line["arm"]: line for line in found.get("quality", [])}
    head = ["arm", "threads", "tokens/s", "prefill tokens/s", "first token, ms", "load, s", "peak MiB", "as plain"]
    rows = []
    for (threads, arm), own in runs.items():
        plain = f"{arm.rsplit(' ', 1)[0]} {PLAIN}"
        law = quality.get(plain, {})
        memory, load = (one[kind].get((threads, arm), {}) for kind in ("memory", "load"))
        rows.append(
            [arm, str(threads), quartiles([rate(run) for run in own])]
            + [quartiles([_prefill_rate(run) for run in own])]
            + [f"{1000 * statistics.median(run['first_seconds'] for run in own):.0f}"]
            + [f"{load['load_seconds']:.1f}" if load else "", f"{memory['mebibytes']:.0f}" if memory else ""]
            + [_as_plain(own, runs.get((threads, plain), []))]
            + [f"{law[name]:.{digits}f}" if name in law else "" for name, digits in (("perplexity", 2), ("kl", 4))]
        )
    shown = markdown_table([*head, "perplexity", "KL"], rows, words=(0, 1))
    return "\n".join([*shown, "", _by_task(runs)])


def in_short(lines: dict[str, list[dict]]) -> str:
    """Tokens per second by task, of the arms that readers compare, with one thread and with two."""
    runs = by_arm(lines)
    return _by_task({(n, arm): runs[n, arm] for n in (1, 2) for arm in SHORT if (n, arm) in runs})


def by_arm(lines: dict[str, list[dict]]) -> dict[tuple[int, str], list[dict]]:
    runs: dict[tuple[int, str], list[dict]] = {}
    for run in lines["run"]:
        runs.setdefault((run["threads"], run["arm"]), []).append(run)
    return runs


def place(run: dict) -> tuple[str, int]:
    """Task and number of a run's prompt."""
    return run["task"], run.get("prompt", run["prompt_tokens"])


def _by_task(runs: dict[tuple[int, str], list[dict]]) -> str:
    """Medians of tokens per second."""
    tasks = list(dict.fromkeys(run["task"] for own in runs.values() for run in own))
    rows = [
        [arm, str(threads)]
        + [f"{statistics.median(rate(run) for run in own if run['task'] == task):.1f}" for task in tasks]
        for (threads, arm), own in runs.items()
    ]
    return "\n".join(markdown_table(["tokens/s", "threads", *tasks], rows, words=(0, 1)))


def rate(run: dict) -> float:
    """Tokens per second after those that came first."""
    seconds = run["seconds"] - run["first_seconds"]
    return (len(run["output"]) - run["first_tokens"]) / seconds


def _prefill_rate(run: dict) -> float:
    return run["prompt_tokens"] / run["first_seconds"]


def _as_plain(own: list[dict], plain: list[dict]) -> str:
    """How many outputs are those of the arm that drafts nothing."""
    if not plain or own[0]["arm"] == plain[0]["arm"]:
        return ""
    theirs = {place(run): run["output"] for run in plain}
    same = [run["output"] == theirs[place(run)] for run in own if place(run) in theirs]
    return f"{sum(same)} of {len(same)}"


def shapes(lines: dict[str, list[dict]]) -> str:
    """foredraft and llama.cpp on random weights: medians, and the median of the ratios on each prompt."""
    runs = by_arm(lines)
    head = ["shape", "threads", "foredraft, tokens/s", "llama.cpp, tokens/s", "ratio", "ratio of prefill"]
    rows = []
    for (threads, arm), ours in runs.items():
        engine, kind, _ = arm.split(" ")
        theirs = runs.get((threads, f"llama.cpp {kind} {PLAIN}"), [])
        if engine == "foredraft" and theirs:
            rates, prefill = ([[of(run) for run in own] for own in (ours, theirs)] for of in (rate, _prefill_rate))
            cells = [*map(quartiles, rates), _ratio(*rates), _ratio(*prefill)]
            rows.append([kind, str(threads), *cells])
    return "\n".join(markdown_table(head, rows, words=(0, 1)))


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    return f"{statistics.median(a / b for a, b in zip(ours, theirs, strict=True)):.2f}"
