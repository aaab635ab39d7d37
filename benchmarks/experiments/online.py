"""A draft model that learns online against the same model frozen: acceptance by request, while topics change.

The stream has three stages: chat questions, the beginnings of novels in capitals, which the draft has hardly seen,
and questions again. Prompts come from the training corpus; the results name their places in it and hold no text.
Learning is synchronous, so a run can be repeated.

    python -m benchmarks online --corpus CORPUS
"""

import itertools
import json
import lzma
import random
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import foredraft
from benchmarks.kit.experiment import RESULTS, Cell, Experiment, Line, measured, option
from benchmarks.kit.origin import origin_line
from benchmarks.kit.pictures import grounded
from benchmarks.kit.reading import markdown_table, read
from foredraft.bench.report import plots
from foredraft.drafters.online.method import Online
from foredraft.engine.policy import Constant

STAGES: tuple[tuple[str, str, Callable[[str], str]], ...] = (
    ("questions", "gsm8k_train", str),
    ("capitals", "english_novels", str.upper),
    ("questions", "gsm8k_train", str),
)
SHARES = (1, 2, 1)  # of the requests
LINES = 4000  # of a corpus file from which prompts are taken
PROMPT = 64  # tokens of a prompt; half of the text if it has fewer than twice as many
WINDOW = 32  # requests of the running mean
FIRST = 12  # requests of a stage that are not drawn: a mean of fewer is noise
ARMS = {"frozen": "", "online": "", "rejected": ",rejected=yes"}
"""With the options of online. ``rejected`` is the paper's buffer: only the laws where a drafted token was rejected."""


def texts(corpus: Path, file: str) -> list[str]:
    """The first texts of a file."""
    with lzma.open(corpus / f"{file}.jsonl.xz", "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for _, line in zip(range(LINES), lines, strict=False)]


def stream(corpus: Path, requests: int, encode: Callable[[str], list[int]]) -> Iterator[tuple[str, int, list[int]]]:
    """Topic, place in the file, and token ids of each prompt; no text comes twice."""
    orders: dict[str, Iterator[tuple[int, str]]] = {}
    for (topic, file, change), share in zip(STAGES, SHARES, strict=True):
        if file not in orders:
            numbered = list(enumerate(texts(corpus, file)))
            random.Random(0).shuffle(numbered)
            orders[file] = iter(numbered)
        wanted = requests * share // sum(SHARES)
        while wanted:
            place, text = next(orders[file])
            ids = encode(change(text[:1500]))
            if len(ids) >= PROMPT:
                yield topic, place, ids[: min(PROMPT, len(ids) // 2)]
                wanted -= 1


def serve(arm: str, temperature: float, args: Namespace) -> Iterator[dict]:
    """Run the stream, ``--together`` requests at a time; one line per request, then one per version of the draft."""
    inner = f"draft_model:{args.draft}"
    spec = inner if arm == "frozen" else f"online:[{inner}],background=no,{args.options}{ARMS[arm]}"
    g = foredraft.load(args.target, spec, dtype="float32", device=args.device, policy=Constant(args.length))
    online = g.engine.drafter if isinstance(g.engine.drafter, Online) else None
    requests = list(stream(args.corpus, args.requests, g.encode))
    started = time.perf_counter()
    for begin in range(0, len(requests), args.together):
        part = requests[begin : begin + args.together]
        results = g.generate(
            [ids for _, _, ids in part],
            max_new_tokens=args.new_tokens,
            min_new_tokens=args.new_tokens,
            temperature=temperature,
            seed=begin,
        )
        for number, ((topic, place, ids), result) in enumerate(zip(part, results, strict=True), start=begin):
            stats = result.stats
            yield {
                "kind": "run",
                "arm": arm,
                "temperature": temperature,
                "request": number,
                "topic": topic,
                "place": place,
                "prompt_tokens": len(ids),
                "tokens": stats.tokens,
                "target_forwards": stats.target_forwards,
                "drafted": stats.drafted,
                "accepted": stats.accepted,
                "version": online.version if online else 0,
                "since_start": round(time.perf_counter() - started, 2),
            }
    for report in online.reports if online else ():
        yield {"kind": "version", "arm": arm, "temperature": temperature, **report.as_dict()}
    g.close()


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    """An arm is written when it is finished."""
    torch.manual_seed(0)
    for cell in cells:
        yield from list(serve(cell["arm"], cell["temperature"], args))


def running(runs: list[dict]) -> list[float]:
    """Acceptance length over the last requests of the same stage."""
    means = []
    for end in range(1, len(runs) + 1):
        last = [run for run in runs[max(0, end - WINDOW) : end] if run["stage"] == runs[end - 1]["stage"]]
        means.append(acceptance(last))
    return means


def acceptance(runs: list[dict]) -> float:
    return sum(run["tokens"] for run in runs) / sum(run["target_forwards"] for run in runs)


def by_arm(kinds: dict[str, list[dict]], temperature: float) -> dict[str, list[dict]]:
    """The runs of each arm in order, each with the number of its stage."""
    chosen = [run for run in kinds["run"] if run["temperature"] == temperature]
    arms = {arm: [run for run in chosen if run["arm"] == arm] for arm in ARMS}
    for runs in arms.values():
        stage = 0
        for before, run in itertools.pairwise([*runs[:1], *runs]):
            stage += run["topic"] != before["topic"]
            run["stage"] = stage
    return {arm: runs for arm, runs in arms.items() if runs}


def temperatures(kinds: dict[str, list[dict]]) -> list[float]:
    return sorted({run["temperature"] for run in kinds["run"]})


@plots.styled()
def picture() -> str:
    """Acceptance by request, a panel for each temperature."""
    kinds = read(RESULTS / "online.jsonl")
    heats = temperatures(kinds)
    figure, _ = plots.canvas(6.4, 2.6 * len(heats))
    figure.clear()
    panels = figure.subplots(len(heats), 1, sharex=True, squeeze=False)[:, 0]
    for axes, heat in zip(panels, heats, strict=True):
        _draw(axes, by_arm(kinds, heat))
        axes.set_title("greedy" if heat == 0 else f"T={heat:g}", loc="left")
    panels[-1].set_xlabel("request")
    panels[0].legend(loc="lower right")
    figure.supylabel(f"acceptance length, last {WINDOW} requests")
    return grounded(plots.themed_svg(figure, "Acceptance while topics change"))


def _draw(axes: Any, arms: dict[str, list[dict]]) -> None:
    for number, (arm, runs) in enumerate(arms.items()):
        means, places = running(runs), [run["request"] + 1 for run in runs]
        for stage in sorted({run["stage"] for run in runs}):
            of = [i for i, run in enumerate(runs) if run["stage"] == stage][FIRST:]
            label = arm if not stage else None
            axes.plot([places[i] for i in of], [means[i] for i in of], color=plots.color(number), label=label)
    runs = arms["frozen"]
    for run, after in itertools.pairwise(runs):
        if run["stage"] != after["stage"]:
            axes.axvline(after["request"] + 0.5, color=plots.FAINT, linewidth=0.8)
    for stage in sorted({run["stage"] for run in runs}):
        own = [run for run in runs if run["stage"] == stage]
        middle = (own[0]["request"] + own[-1]["request"]) / 2 + 1
        axes.annotate(own[0]["topic"], (middle, 1.0), xycoords=("data", "axes fraction"), ha="center", va="bottom")


def summary(kinds: dict[str, list[dict]]) -> Iterator[str]:
    """By temperature and half of each stage: acceptance lengths, and how many requests were better and worse than
    frozen; then the updates of each arm."""
    lines, learners = [], [arm for arm in ARMS if arm in {run["arm"] for run in kinds["run"]}]
    for heat in temperatures(kinds):
        arms = by_arm(kinds, heat)
        for stage in sorted({run["stage"] for run in arms["frozen"]}):
            whole = {arm: [run for run in runs if run["stage"] == stage] for arm, runs in arms.items()}
            middle = len(whole["frozen"]) // 2
            for half, part in (("first", slice(None, middle)), ("second", slice(middle, None))):
                own = {arm: runs[part] for arm, runs in whole.items()}
                title = f"{stage + 1}. {own['frozen'][0]['topic']}, {half} half"
                cells = [compared(own["frozen"], own[arm], arm) if arm in own else "" for arm in learners]
                lines.append(["greedy" if heat == 0 else f"T={heat:g}", title, *cells])
    yield from markdown_table(["temperature", "stage", *learners], lines, words=(0, 1))
    yield "\nAcceptance lengths; in brackets, the requests with fewer and with more forwards of the target than frozen."
    for arm, heat in itertools.product(learners[1:], temperatures(kinds)):
        own = [line for line in kinds["version"] if (line["arm"], line["temperature"]) == (arm, heat)]
        if own:
            outcomes = [line["outcome"] for line in own]
            counted = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in sorted(set(outcomes)))
            laws = sum(line["laws"] for line in own)
            yield f"Updates, {arm}, {'greedy' if heat == 0 else f'T={heat:g}'}: {counted}, on {laws:,} laws."


def compared(frozen: list[dict], runs: list[dict], arm: str) -> str:
    """Acceptance length, and against the same requests with the frozen draft."""
    if arm == "frozen":
        return f"{acceptance(runs):.2f}"
    gains = [a["target_forwards"] - b["target_forwards"] for a, b in zip(frozen, runs, strict=True)]
    return f"{acceptance(runs):.2f} ({sum(gain > 0 for gain in gains)} / {sum(gain < 0 for gain in gains)})"


def table() -> str:
    kinds = read(RESULTS / "online.jsonl")
    origin = kinds["provenance"][0]
    return "\n".join([*summary(kinds), "", f"Made by `{origin['command']}`: {origin_line(origin)}."])


EXPERIMENT = Experiment(
    name="online",
    question="online distillation while topics change: methods/online.md",
    options={
        "corpus": option(Path("../shared/data/corpus"), "folder with NAME.jsonl.xz"),
        "arms": option(list(ARMS), choices=list(ARMS)),
        "target": option("sample"),
        "draft": option("sample-draft"),
        "options": option("interval=8,lr=2e-4", "of online"),
        "requests": option(384),
        "together": option(8, "requests in flight"),
        "new_tokens": option(64),
        "length": option(5, "num_assistant_tokens"),
        "temperatures": option([0.0, 1.0]),
        "device": option("cpu"),
    },
    cells=lambda args: [
        {"kind": "run", "arm": arm, "temperature": heat} for arm in args.arms for heat in args.temperatures
    ],
    measure=measure,
    facts=lambda args: {
        "num_assistant_tokens": args.length,
        "stages": [[topic, file] for topic, file, _ in STAGES],
        **{name: getattr(args, name) for name in ("target", "draft", "options", "new_tokens", "together")},
    },
    shown=lambda path: "\n".join(summary(read(path))),
    tables={"docs/methods/online.md": {"measured": table}},
    figures={"online": picture},
    hours=1.0,
    needs=lambda inputs: (inputs.corpus,),
    commands=lambda inputs: [measured("online", "--corpus", inputs.corpus)],
)
