"""Tables of a run of ``engines.py``."""

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kit.reading import interval, markdown_table, per_forward, quartiles, with_interval

PLAIN, DEFAULT, BEST = "plain", "default", "best"
KINDS = {
    "edit": "edits",
    "humaneval": "code",
    "mt_bench": "chat",
    "gsm8k": "maths",
    "sum": "summaries",
    "qa": "questions",
}
"""Tasks, and what a reader calls them."""
PAIRS = (
    ("foredraft int4 default", "foredraft int4"),
    ("foredraft int4 eagle3", "foredraft int4"),
    ("foredraft int8 default", "foredraft int8"),
    ("foredraft float32 default", "foredraft float32"),
    ("foredraft Q4_0 default", "foredraft Q4_0"),
    ("foredraft Q4_1 default", "foredraft Q4_1"),
    ("foredraft Q8_0 default", "foredraft Q8_0"),
    ("foredraft int4 default", "llama.cpp Q4_0"),
    ("foredraft Q4_0 default", "llama.cpp Q4_0"),
    ("foredraft Q8_0 default", "llama.cpp Q8_0"),
    ("foredraft int4 default", "openvino Q4_1"),
    ("foredraft Q4_1 default", "openvino Q4_1"),
    ("foredraft int4 default", "transformers bfloat16"),
    ("foredraft float32 default", "transformers float32"),
    ("foredraft Q4_0 plain", "llama.cpp Q4_0"),
    ("foredraft Q8_0 plain", "llama.cpp Q8_0"),
    ("foredraft Q4_1 plain", "openvino Q4_1"),
    ("foredraft float32 plain", "transformers float32"),
    *(
        (f"foredraft Q4_K_M {ours}", f"{peer} Q4_K_M")
        for ours in (DEFAULT, PLAIN)
        for peer in ("foredraft", "llama.cpp", "openvino")
        if (ours, peer) != (PLAIN, "foredraft")
    ),
    ("foredraft Q4_K_M default", "transformers bfloat16"),
)
"""What a user of foredraft gets, and what it is compared with: its own plain decoding, or the best mode of a peer."""
QUOTED = {
    "llama.cpp Q4_0": ("llama.cpp", "llama.cpp's"),
    "llama.cpp Q8_0": ("llama.cpp", "llama.cpp's"),
    "openvino Q4_1": ("OpenVINO GenAI", "OpenVINO GenAI's"),
    "transformers float32": ("transformers", "transformers'"),
}
"""Of ``sentence``: peers with our weights, their names, and whose."""
WITHDRAWN = {"llama.cpp": "its look-ups were not given the prompt"}
"""Engines whose arms with drafts did not draft before their runs said how many tokens they accepted, and why."""
LONG = 512
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
    """``PAIRS``, each peer in the mode that was chosen on other chats for the kind of chat (``best``), or else in the
    one that had the highest median rate."""
    runs = by_arm(lines) | best_runs(lines)
    for threads in sorted({threads for threads, _ in runs}):
        for ours, engine in PAIRS:
            others = modes(runs, threads, engine)
            if (threads, ours) in runs and others:
                fastest = max(others, key=lambda name: statistics.median(map(rate, runs[threads, name])))
                best = f"{engine} {BEST}"
                yield compared(runs, threads, ours, best if best in others else fastest)


def chosen(lines: dict[str, list[dict]], threads: int) -> dict[tuple[str, str], str]:
    """The arm of each peer that was fastest on the other chats of a task, by engine and task."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for (count, arm), own in by_arm({"run": lines.get("choice", [])}).items():
        for run in own if count == threads else ():
            found.setdefault((engine_of(arm), run["task"]), {}).setdefault(arm, []).append(rate(run))
    return {key: max(rates, key=lambda arm: statistics.median(rates[arm])) for key, rates in found.items()}


def best_runs(lines: dict[str, list[dict]]) -> dict[tuple[int, str], list[dict]]:
    """The runs of peers in the modes that were chosen, as those of an arm ENGINE WEIGHTS best."""
    runs, found = by_arm(lines), dict[tuple[int, str], list[dict]]()
    for threads in sorted({threads for threads, _ in runs}):
        for (engine, task), arm in chosen(lines, threads).items():
            own = [run for run in runs.get((threads, arm), []) if run["task"] == task]
            found.setdefault((threads, f"{engine} {BEST}"), []).extend(own)
    return {key: own for key, own in found.items() if own}


def by_kind(lines: dict[str, list[dict]], *, intervals: bool = True) -> str:
    """Tokens per second by kind of chat with 95 % intervals, the peers in the modes that were chosen, and our ratios to
    them: a table for each type of weights that we and a peer have run with the same number of threads."""

    def shown(values: list[float]) -> str:
        return _median(values) if intervals or not values else f"{statistics.median(values):.2f}"

    runs = by_arm(lines) | best_runs(lines)
    tasks = [task for task in KINDS if any(run["task"] == task for own in runs.values() for run in own)]
    weights = sorted({(threads, engine_of(arm).split(" ")[1]) for threads, arm in runs if ours(arm)})
    parts = []
    for threads, kind in weights:
        own = [arm for count, arm in runs if count == threads and engine_of(arm) == f"foredraft {kind}"]
        peers = [arm for count, arm in runs if count == threads and not ours(arm) and _beside(arm, kind)]
        if not any(arm.endswith(f" {BEST}") for arm in peers):
            continue
        head = [f"{kind}, {threads} thread{'s' * (threads > 1)}", *(KINDS[task] for task in tasks)]
        rows = [
            [_named(arm), *(shown(_rates(runs[threads, arm], task)) for task in tasks)]
            for arm in (*own, *peers)
            if arm.rsplit(" ", 1)[1] in (PLAIN, BEST) or ours(arm)
        ]
        picked = chosen(lines, threads)
        rows += [
            [f"best mode of {engine}", *(picked.get((engine, task), " ").rsplit(" ", 1)[1] for task in tasks)]
            for engine in dict.fromkeys(map(engine_of, peers))
        ]
        for arm in own:
            for other in (
                f"foredraft {kind} {PLAIN}",
                *(each for each in peers if each.rsplit(" ", 1)[1] == _against(arm)),
            ):
                if other != arm and (threads, other) in runs:
                    found = compared(runs, threads, arm, other).by_task
                    rows.append([f"{_named(arm)} over {_named(other)}", *(shown(found.get(t, [])) for t in tasks)])
        parts.append("\n".join(markdown_table(head, rows)))
    return "\n\n".join(parts)


def heads(lines: dict[str, list[dict]]) -> str:
    """Tokens per forward of arms with drafts by kind of chat, and on the chats on which all wrote the same text; the
    forward that reads the prompt counts."""
    runs = {arm: {place(run): run for run in own} for (_, arm), own in by_arm(lines).items()}
    shared = set.intersection(*map(set, runs.values()))
    same = {at for at in shared if len({tuple(own[at]["output"]) for own in runs.values()}) == 1}
    tasks = [task for task in KINDS if any(task == at[0] for at in shared)]
    rows = []
    for arm, own in runs.items():
        chats = [[own[at] for at in sorted(shared) if at[0] == task] for task in tasks]
        chats += [[own[at] for at in sorted(some)] for some in (shared, same)]
        pairs = [[(len(run["output"]), len(run["output"]) - run["accepted"]) for run in some] for some in chats]
        rows.append([arm.split(",")[0], *(with_interval(some, per_forward, SAMPLES) if some else "" for some in pairs)])
    head = ["tokens per forward", *(KINDS[task] for task in tasks), "all", f"{len(same)} of {len(shared)} equal texts"]
    return "\n".join(markdown_table(head, rows))


def _beside(arm: str, kind: str) -> bool:
    """Whether a peer's arm is compared with ours of this type of weights: transformers has other types."""
    engine, weights, _ = arm.split(" ")
    return weights.split("-")[0] == kind or (engine == "transformers" and kind not in ("float32", "int4", "int8"))


def _named(arm: str) -> str:
    """An arm's engine and mode, and its weights if they are none of the file's."""
    engine, weights, mode = arm.split(" ")
    return f"{engine} {weights} {mode}" if engine == "transformers" or "-" in weights else f"{engine} {mode}"


def _against(arm: str) -> str:
    """Plain decoding is compared with plain decoding, drafts with a peer's best."""
    return PLAIN if arm.endswith(f" {PLAIN}") else BEST


def _rates(own: list[dict], task: str) -> list[float]:
    return [rate(run) for run in own if run["task"] == task]


def _median(values: list[float]) -> str:
    """With its interval; the value alone if there is one."""
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else ""
    return with_interval(values, statistics.median, SAMPLES)


def modes(runs: dict[tuple[int, str], list[dict]], threads: int, engine: str) -> list[str]:
    """The arms of an engine with these weights; of ours, plain decoding."""
    found = [name for count, name in runs if count == threads and name.rsplit(" ", 1)[0] == engine]
    return [name for name in found if name.endswith(f" {PLAIN}") or not engine.startswith("foredraft")]


def compared(runs: dict[tuple[int, str], list[dict]], threads: int, ours: str, theirs: str) -> Comparison:
    rates, by_task = {place(run): rate(run) for run in runs[threads, theirs]}, dict[str, list[float]]()
    for run in runs[threads, ours]:
        if rates.get(place(run)):  # 0 if all tokens came at once
            by_task.setdefault(run["task"], []).append(rate(run) / rates[place(run)])
    return Comparison(threads, ours, theirs, by_task)


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
    one = {  # of processes that were started again, the first
        kind: {(line["threads"], line["arm"]): line for line in reversed(found.get(kind, []))}
        for kind in ("load", "memory")
    }
    measured = sorted(found.get("quality", []), key=lambda line: "kl" in line)  # a run without the reference has none
    quality = {line["arm"]: line for line in measured}
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
            + [
                f"{max(law[name], 0.0):.{digits}f}" if name in law else ""
                for name, digits in (("perplexity", 2), ("kl", 4))
            ]
        )
    shown = markdown_table([*head, "perplexity", "KL"], rows, words=(0, 1))
    return "\n".join([*shown, "", _by_task(runs)])


def sentence(lines: dict[str, list[dict]]) -> str:
    """What a user gets on one thread against the best mode of each peer, and where a mode of a peer is faster."""
    runs, parts, faster = by_arm(lines), list[str](), dict[str, None]()
    found = {(each.ours, each.theirs.rsplit(" ", 1)[0]): each for each in comparisons(lines) if each.threads == 1}
    for engine, (peer, name) in QUOTED.items():
        kind = engine.split()[1]
        if (best := found.get((f"foredraft {kind} {DEFAULT}", engine))) is None:
            continue
        parts.append(f"{best} times {name} in {kind}")
        for other in modes(runs, 1, engine):
            for task, ratio in compared(runs, 1, best.ours, other).slower.items():
                faster[f"{peer} ({kind}) on {task}, {1 / ratio:.2f} times ours"] = None
    rest = f"Faster than ours: {'; '.join(faster)}." if faster else "None of them is faster on any kind of chat."
    without = left_out(lines)
    mode = "in its best mode that drafted, or plain" if without else "in its best mode"
    said = f"On one thread, tokens per second by default are {', '.join(parts)}, each {mode}. {rest}"
    return " ".join([said, *without])


def long_prompts(lines: dict[str, list[dict]]) -> str:
    """How fast plain arms read prompts of LONG tokens and more on one thread, the fastest first."""
    found = {}
    for (threads, arm), own in by_arm(lines).items():
        rates = [_prefill_rate(run) for run in own if run["prompt_tokens"] >= LONG]
        if threads == 1 and rates and arm.endswith(f" {PLAIN}"):
            found[arm.removesuffix(f" {PLAIN}")] = statistics.median(rates)
    shown = ", ".join(f"{arm} {value:.0f}" for arm, value in sorted(found.items(), key=lambda item: -item[1]))
    return f"Reading of prompts of {LONG} tokens and more, tokens per second, one thread: {shown}."


def chats(lines: dict[str, list[dict]]) -> tuple[int, dict[str, int]]:
    """How many chats there are, and how many of them those engines had that ran on fewer, with the fewest threads."""
    runs = by_arm(lines)
    fewest, counts = min((threads for threads, _ in runs), default=0), dict[str, int]()
    for (threads, arm), own in runs.items():
        if threads == fewest:  # the mode that was chosen for a task runs on this task alone
            counts[engine_of(arm)] = max(counts.get(engine_of(arm), 0), len(own))
    most = max(counts.values(), default=0)
    return most, {engine: count for engine, count in counts.items() if count < most}


def by_arm(lines: dict[str, list[dict]]) -> dict[tuple[int, str], list[dict]]:
    """The runs of each arm with each number of threads, without arms that should draft and did not."""
    return {key: own for key, own in _every_arm(lines).items() if drafted(key[1], own)}


def left_out(lines: dict[str, list[dict]]) -> list[str]:
    """For each engine a sentence that names the arms that are left out, and the reason."""
    found: dict[str, dict[str, None]] = {}
    for (_, arm), own in _every_arm(lines).items():
        if not drafted(arm, own):
            found.setdefault(arm.split(" ")[0], {})[arm.split(" ", 1)[1]] = None
    return [
        f"Left out since no drafted token was accepted{f' ({WITHDRAWN[engine]})' if engine in WITHDRAWN else ''}, "
        f"{engine} in {', '.join(arms)}; it is compared without drafts."
        for engine, arms in found.items()
    ]


def drafted(arm: str, own: list[dict]) -> bool:
    """Whether a peer's arm with drafts accepted any. True for plain arms, and for ours: our policy may stop drafts."""
    untold = 0 if arm.split(" ")[0] in WITHDRAWN else 1
    kept = arm.endswith(f" {PLAIN}") or ours(arm)
    return kept or any(run.get("accepted", untold) > 0 for run in own)


def idle(arm: str, answer: dict) -> bool:
    """Whether a peer's arm with drafts says that it drafted nothing; ours may decide so."""
    plain = arm.endswith(f" {PLAIN}") or ours(arm)
    return not plain and answer.get("drafted") == 0


def ours(arm: str) -> bool:
    return arm.startswith("foredraft ")


def engine_of(arm: str) -> str:
    """An arm's engine with its weights."""
    return arm.rsplit(" ", 1)[0]


def _every_arm(lines: dict[str, list[dict]]) -> dict[tuple[int, str], list[dict]]:
    runs: dict[tuple[int, str], list[dict]] = {}
    for run in lines["run"]:
        runs.setdefault((run["threads"], run["arm"]), []).append(run)
    return runs


def place(run: dict) -> tuple[str, int]:
    """Task and number of a run's prompt."""
    return run["task"], run["prompt"] if "prompt" in run else run["prompt_tokens"]


def _by_task(runs: dict[tuple[int, str], list[dict]]) -> str:
    """Medians of tokens per second."""
    tasks = list(dict.fromkeys(run["task"] for own in sorted(runs.values(), key=len, reverse=True) for run in own))
    rows = []
    for (threads, arm), own in runs.items():
        rates = [[rate(run) for run in own if run["task"] == task] for task in tasks]
        rows.append([arm, str(threads), *(f"{statistics.median(some):.1f}" if some else "" for some in rates)])
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


def shape_ratios(lines: dict[str, list[dict]]) -> list[float]:
    """Medians of foredraft's rates over llama.cpp's, of each shape and number of threads."""
    runs = by_arm(lines)
    found = []
    for (threads, arm), ours in runs.items():
        theirs = runs.get((threads, arm.replace("foredraft", "llama.cpp")), [])
        if arm.startswith("foredraft ") and theirs:
            found.append(statistics.median(rate(a) / rate(b) for a, b in zip(ours, theirs, strict=True)))
    return found


def beside_llama(lines: dict[str, list[dict]]) -> tuple[str, str]:
    """llama.cpp's time to start and its peak memory over ours, for the same files, one thread, as ranges."""
    found = []
    for kind, value in (("load", "start_seconds"), ("memory", "mebibytes")):
        values = {line["arm"]: line[value] for line in lines[kind] if line["threads"] == 1}
        ratios = [
            values[arm] / values[arm.replace("llama.cpp", "foredraft")]
            for arm in values
            if arm.startswith("llama.cpp ") and arm.endswith(f" {PLAIN}")
        ]
        found.append(f"{min(ratios):.1f} to {max(ratios):.1f}")
    return found[0], found[1]


def rates_by_task(lines: dict[str, list[dict]], engine: str) -> str:
    """The lowest and the highest median of tasks, tokens per second on one thread, for each mode of an engine."""
    found = []
    for (threads, arm), own in by_arm(lines).items():
        name, mode = arm.rsplit(" ", 1)
        if threads == 1 and name == engine:
            tasks = [
                statistics.median(rate(run) for run in own if run["task"] == task)
                for task in {run["task"] for run in own}
            ]
            found.append(f"{mode} {min(tasks):.0f} to {max(tasks):.0f}")
    return ", ".join(found)


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    return f"{statistics.median(a / b for a, b in zip(ours, theirs, strict=True)):.2f}"
