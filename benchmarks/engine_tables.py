"""Tables of a run of ``engines.py``."""

import statistics
from collections.abc import Sequence

from reading import markdown_table, quartiles

PLAIN = "plain"
SHORT = (
    f"foredraft Q4_0 {PLAIN}",
    "foredraft Q4_0 prompt_lookup",
    f"llama.cpp Q4_0 {PLAIN}",
    "llama.cpp Q4_0 lookup",
    f"openvino Q4_1 {PLAIN}",
    "openvino Q4_1 lookup",
    f"foredraft Q8_0 {PLAIN}",
    f"llama.cpp Q8_0 {PLAIN}",
    f"transformers float32 {PLAIN}",
)


def tables(lines: dict[str, list[dict]]) -> str:
    """Two tables: each arm's figures, and tokens per second by task."""
    runs = by_arm(lines)
    one = {kind: {(line["threads"], line["arm"]): line for line in lines.get(kind, [])} for kind in ("load", "memory")}
    quality = {line["arm"]: line for line in lines.get("quality", [])}
    head = ["arm", "threads", "tokens/s", "prefill tokens/s", "first token, ms", "load, s", "peak MiB", "as plain"]
    rows = []
    for (threads, arm), own in runs.items():
        plain = f"{arm.rsplit(' ', 1)[0]} {PLAIN}"
        law = quality.get(plain, {})
        memory = one["memory"][threads, arm]["mebibytes"]
        rows.append(
            [arm, str(threads), quartiles([rate(run) for run in own])]
            + [quartiles([_prefill_rate(run) for run in own])]
            + [f"{1000 * statistics.median(run['first_seconds'] for run in own):.0f}"]
            + [f"{one['load'][threads, arm]['load_seconds']:.1f}", f"{memory:.0f}" if memory else ""]
            + [_as_plain(own, runs.get((threads, plain), []))]
            + [f"{law[name]:.{digits}f}" if name in law else "" for name, digits in (("perplexity", 2), ("kl", 4))]
        )
    lines = markdown_table([*head, "perplexity", "KL"], rows, words=(0, 1))
    return "\n".join([*lines, "", _by_task(runs)])


def in_short(lines: dict[str, list[dict]]) -> str:
    """Tokens per second by task, of the arms that readers compare, with one thread."""
    runs = by_arm(lines)
    return _by_task({(1, arm): runs[1, arm] for arm in SHORT if (1, arm) in runs})


def by_arm(lines: dict[str, list[dict]]) -> dict[tuple[int, str], list[dict]]:
    runs: dict[tuple[int, str], list[dict]] = {}
    for run in lines["run"]:
        runs.setdefault((run["threads"], run["arm"]), []).append(run)
    return runs


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
    same = sum(a["output"] == b["output"] for a, b in zip(own, plain, strict=True))
    return f"{same} of {len(own)}"


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
