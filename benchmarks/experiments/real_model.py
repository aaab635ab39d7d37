"""Every method at fixed sizes, and under the default policy, on a real model with the native engine.

The same as `foredraft bench` with many arms: every prompt runs on every arm before the next prompt, and a repeated
command continues an interrupted run. The results file holds no texts.

    python -m benchmarks real --model FOLDER --eagle3 HEAD --medusa HEAD --prompts ../shared/data/prompts

``--count`` prompts of each task are used; a larger one later adds prompts.
"""

import functools
import json
import statistics
import subprocess
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.kit.claims import Claim, Row, facts_of, points_figure, rows_figure
from benchmarks.kit.experiment import (
    ALL_TASKS,
    RESULTS,
    Experiment,
    Inputs,
    command,
    measured,
    option,
    repeated,
)
from benchmarks.kit.origin import origin_line
from benchmarks.kit.reading import interval, markdown_table, quartiles
from benchmarks.kit.runs import beside_plain, by_position, length, repeats
from foredraft.bench.measure.records import RunFile, read_runs
from foredraft.bench.measure.summary import RunPair, grouped, ratios, temperature_label

FILE = RESULTS / "real_model.jsonl"
HYBRID = FILE.with_name("hybrid.jsonl")
TASKS = {
    "mt_bench": "eagle/mt_bench/question.jsonl",
    "gsm8k": "eagle/gsm8k/question.jsonl",
    "humaneval": "eagle/humaneval/question.jsonl",
    "alpaca": "eagle/alpaca/question.jsonl",
    "sum": "eagle/sum/question.jsonl",
    "qa": "eagle/qa/question.jsonl",
}
NODES = (4, 8, 24, 60)
"""Nodes of a tree, or tokens of a chain."""
DEPTH = {4: 3, 8: 4, 24: 6, 60: 8}
"""Levels of a tree of so many nodes."""
SHAPES = {4: "2x1", 8: "4x1", 24: "eagle", 60: "medusa"}
"""EAGLE-1's static trees of about so many nodes (the last two have 25 and 63)."""
FIXED = "num_assistant_tokens_schedule=constant"
HEADS = "heads"
"""In place of a size: a chain of as many tokens as there are heads."""
NETWORKS = ("eagle3", "eagle1", "medusa", "hydra", "blockwise", "draft_model")
"""Whose heads and models are options."""
SAMPLES = 2000
"""Of the bootstrap."""
Spec = Callable[[int], str]


def trees(name: str, path: str) -> Spec:
    return lambda n: f"{name}:{path},nodes={n},depth={DEPTH[n]},top_k=8,{FIXED}"


def static(name: str, path: str) -> Spec:
    return lambda n: f"{name}:{path},nodes={n},{FIXED}"


def arms(heads: dict[str, str]) -> dict[str, str]:
    """Specs by the arms' names; those of heads and draft models that are not given are left out."""
    fixed: dict[str, Spec] = {
        "prompt_lookup": lambda n: f"prompt_lookup,prompt_lookup_num_tokens={n},{FIXED}",
        "max_gram": lambda n: f"max_gram,num_assistant_tokens={n},{FIXED}",
    }
    auto, own = {"prompt_lookup": "prompt_lookup", "max_gram": "max_gram"}, {}
    if "eagle1" in heads:  # the same weights
        heads = heads | {"eagle2": heads["eagle1"]}
    for name, path in heads.items():
        auto[name] = f"{name}:{path}"
        if name == "draft_model":
            length = f"draft_model:{path},assistant_confidence_threshold=0,{FIXED},num_assistant_tokens="
            fixed[name] = lambda n, length=length: f"{length}{n}"
        elif name == "blockwise":
            own[f"blockwise {HEADS}"] = f"blockwise:{path},{FIXED}"
        elif name == "eagle1":
            fixed[name] = lambda n, path=path: f"eagle1:{path},tree={SHAPES[n]},{FIXED}"
        else:
            fixed[name] = (trees if name in ("eagle2", "eagle3") else static)(name, path)
    if "eagle3" in heads:
        path = heads["eagle3"]
        fixed["eagle3-chain"] = lambda n: f"eagle3:{path},nodes={n},depth={n},top_k=1,{FIXED}"
        fixed["hybrid-chain"] = lambda n: f"hybrid:[eagle3:{path},nodes={n},depth={n},top_k=1,{FIXED}]"
        auto["look-ups+head"] = f"bandit:prompt_lookup+eagle3:{path}"
        auto["hybrid"] = f"hybrid:eagle3:{path}"
    few = {"eagle3-chain", "hybrid-chain", "draft_model"}
    found = {"none": "none"} | {f"{name} auto": spec for name, spec in auto.items()} | own
    for name, spec in fixed.items():
        found |= {f"{name} {n}": spec(n) for n in ((2, 4, 8) if name in few else NODES)}
    return found


def without_texts(source: Path, target: Path) -> None:
    """Copy a run file without outputs and texts; beside it, the share of repeated 4-grams of plain answers by task."""
    lines = []
    for line in source.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        for output in record.get("outputs", ()):
            output.pop("output", None), output.pop("text", None)
        lines.append(json.dumps(record))
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    shares: dict[str, list[float]] = {}
    for run in read_runs(source).runs:
        if run.arm == "none" and run.outputs and run.temperature == 0:
            shares.setdefault(run.task, []).append(repeats(run.outputs[0].output))
    means = {task: round(statistics.mean(own), 4) for task, own in shares.items()}
    repeats_of(target).write_text(json.dumps(means) + "\n", encoding="utf-8")


def repeats_of(path: Path) -> Path:
    """The file beside a run file with the share of repeated 4-grams by task."""
    return path.with_name(f"{path.stem}_repeats.json")


# ---- tables


def prompts_of(found: Iterable[RunPair]) -> int:
    """Prompts and turns of these runs."""
    return len({(pair.run.task, pair.run.prompts, pair.run.turn) for pair in found})


def methods(path: Path = FILE) -> str:
    """Speed-up and acceptance of every arm, with one table for each temperature."""
    file, parts = read_runs(path), []
    every = beside_plain(file)
    tasks = list(dict.fromkeys(run.task for run in file.runs))
    for temperature in sorted({run.temperature for run in file.runs}):
        head = ["arm", "speed-up", "acceptance length", "by position", "drafting, ms", *tasks]
        lines = []
        here = [pair for pair in every if pair.run.temperature == temperature]
        for arm, own in grouped(here, lambda pair: pair.run.arm).items():
            runs = [pair.run for pair in own]
            low, high = interval(runs, length, SAMPLES)
            drafting = 1e3 * sum(run.draft_seconds for run in runs) / sum(run.forwards for run in runs)
            row = [arm, quartiles(ratios(own)), f"{length(runs):.2f} ({low:.2f} to {high:.2f})"]
            row += [by_position(runs), f"{drafting:.1f}"]
            by_task = grouped(own, lambda pair: pair.run.task)
            for some in (by_task.get(task, []) for task in tasks):
                speed = statistics.median(ratios(some)) if some else 0.0
                row.append(f"{speed:.2f} / {length(pair.run for pair in some):.2f}" if some else "")
            lines.append(row)
        title = "Greedy:" if temperature == 0 else f"Temperature {temperature:g}, seeded, shared noise:"
        parts += [title, "", *markdown_table(head, lines), ""]
    return "\n".join([*parts, *notes(file, path)])


def policy_points(file: RunFile) -> list[tuple[float, float]]:
    """Speed-up at the best fixed size in hindsight, plain decoding included, and under the policy: for each drafter
    that ran with both, temperature and task."""

    def drafter(pair: RunPair) -> tuple[str, float, str]:
        name, _, _ = pair.run.arm.rpartition(" ")
        return name.removesuffix("-chain"), pair.run.temperature, pair.run.task

    found = []
    for cell in grouped(beside_plain(file), drafter).values():
        speeds = {arm: statistics.median(ratios(own)) for arm, own in grouped(cell, lambda pair: pair.run.arm).items()}
        mine = [speed for arm, speed in speeds.items() if arm.endswith(" auto")]
        if mine and len(speeds) > 1:
            found.append((max(1.0, *(speed for arm, speed in speeds.items() if not arm.endswith(" auto"))), *mine))
    return found


def in_short() -> str:
    """Speed-ups of a few arms by task and precision, for README.md and results.md."""
    titles = {
        "mt_bench": "chat",
        "gsm8k": "maths",
        "humaneval": "code",
        "alpaca": "instructions",
        "qa": "questions",
        "sum": "summaries",
        "edits": "edits",
    }
    arms = {
        "hybrid auto": "**default**: `hybrid:eagle3`",
        "hybrid-chain 2": "`hybrid`, chains of 2",
        "eagle3-chain 2": "`eagle3`, chains of 2",
        "prompt_lookup auto": "`prompt_lookup`",
    }
    lines, made = [], []
    for name in ("hybrid", "hybrid_int8"):
        file = read_runs(FILE.with_name(f"{name}.jsonl"))
        origin = file.provenance[-1]
        weights = origin["settings"]["weights"]
        found = beside_plain(file)
        for arm, title in arms.items():
            own = [pair for pair in found if pair.run.arm == arm]
            greedy = [pair for pair in own if pair.run.temperature == 0]
            cells = [greedy, *([pair for pair in greedy if pair.run.task == task] for task in titles)]
            cells.append([pair for pair in own if pair.run.temperature == 1])
            lines.append([f"{weights}, {title}", *(f"{statistics.median(ratios(cell)):.2f}" for cell in cells)])
        made.append(f"{weights}: {prompts_of(found)} prompts, {origin_line(origin, weights)}")
    table = markdown_table(["drafter", "all", *titles.values(), "T = 1"], lines)
    return "\n".join([*table, "", f"Medians over prompts. {'; '.join(made)}. Made by `scripts/reproduce hybrid`."])


def gain(path: Path, temperature: float, arm: str = "hybrid auto") -> float:
    """The median speed-up of an arm over plain decoding."""
    pairs = beside_plain(read_runs(path))
    return statistics.median(
        ratios([pair for pair in pairs if pair.run.arm == arm and pair.run.temperature == temperature])
    )


def notes(file: RunFile, path: Path) -> list[str]:
    """What the tables rest on."""
    others = beside_plain(file)
    same = sum(pair.run.outputs[0].digest == pair.baseline.outputs[0].digest for pair in others)
    repeats = json.loads(repeats_of(path).read_text(encoding="utf-8"))
    shown = ", ".join(f"{task} {share:.2f}" for task, share in repeats.items())
    origin = file.provenance[-1]
    made = origin_line(origin, origin["settings"]["weights"] or "float32")
    return [
        f"Texts equal to plain decoding's of the same seed: {same} of {len(others)}. {prompts_of(others)} prompts "
        f"and turns. Share of repeated 4-grams in greedy answers: {shown}. {made}. "
        "Made by `python -m benchmarks real`."
    ]


ARMS_OF_PAGE = {
    **{name: (name,) for name in ("eagle1", "medusa", "hydra", "blockwise", "draft_model", "sequoia")},
    **{name: (name,) for name in ("prompt_lookup", "max_gram")},
    "eagle3": ("eagle3", "eagle3-chain"),
    "eagle2": ("eagle2", "eagle2-expanded", "eagle2-no-value", "eagle2-no-rerank", "eagle2-neither"),
    "bandit": ("look-ups+head",),
}
"""Names of a page's arms in the tables of the real model."""


def of_page(page: str) -> str:
    file = read_runs(HYBRID if page == "bandit" else FILE)
    every = [pair for pair in beside_plain(file) if pair.run.arm.split()[0] in ARMS_OF_PAGE[page]]
    arms = grouped(every, lambda pair: (pair.run.temperature, pair.run.arm))
    lines = []
    for heat in sorted({pair.run.temperature for pair in every}):
        found = {arm: own for (own_heat, arm), own in arms.items() if own_heat == heat}
        fixed = {arm: own for arm, own in found.items() if not arm.endswith(" auto")}
        best = max(fixed, key=lambda arm: statistics.median(ratios(fixed[arm])), default="")
        policy = [own for arm, own in found.items() if arm.endswith(" auto")]
        shown = f"{_speed(fixed[best])} ({best})" if best else ""
        lines.append([temperature_label(heat), shown, *map(_speed, policy)])
    if not lines:
        return ""
    head = ["on SmolLM2-135M-Instruct in 4 bits", "best fixed size", "policy"]
    where = "hybrid.md" if page == "bandit" else "../results.md#a-real-model"
    title = f"Speed-up over plain decoding / tokens per forward, medians over prompts ([all sizes by task]({where})):"
    origin = file.provenance[-1]
    return "\n".join([title, "", *markdown_table(head, lines), "", f"{origin_line(origin, 'int4')}."])


def _speed(own: Sequence[RunPair]) -> str:
    return f"{statistics.median(ratios(own)):.2f} / {length([pair.run for pair in own]):.2f}"


def hybrid() -> str:
    """Two precisions on one processor, and the lower one on another, where plain decoding is faster."""
    files = {"4 bits": "hybrid", "8 bits": "hybrid_int8", "4 bits, on another processor": "hybrid_xeon"}
    tables = {title: methods(RESULTS / f"{name}.jsonl") for title, name in files.items()}
    return "\n\n".join(f"In {title}.\n\n{table}" for title, table in tables.items())


def real(path: Path = HYBRID) -> Claim:
    """Speed-up of the default policy on a real model, by drafter and temperature."""
    file = read_runs(path)
    every = [pair for pair in beside_plain(file) if pair.run.arm.endswith(" auto")]
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
    files = [read_runs(path) for path in (HYBRID, HYBRID.with_name("hybrid_int8.jsonl"), FILE)]
    points = [point for file in files for point in policy_points(file)]
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


# ---- measurement


def make(args: Namespace) -> None:
    found = arms({name: path for name in NETWORKS if (path := getattr(args, name))})
    if args.only:
        found = {name: spec for name, spec in found.items() if name == "none" or any(w in name for w in args.only)}
    words = ["bench", "-m", args.model, "--weights", args.weights, "--chat"]
    words += repeated("-d", [f"{name}={spec}" for name, spec in found.items()])
    folder, *more = args.prompts
    files = [folder / TASKS[task] for task in args.tasks] if folder.is_dir() and not more else args.prompts
    words += [*repeated("--prompts", list(map(str, files))), *repeated("--temperature", args.temperatures)]
    words += ["--count", str(args.count), "--max-new-tokens", str(args.tokens), "--out", str(args.work)]
    subprocess.run(command("foredraft", *words), check=True)
    without_texts(args.work, args.out)


def _real(inputs: Inputs) -> list[list[str]]:
    """With a reader's model or prompts, those."""
    words = ["--model", inputs.own_model or inputs.smollm2, "--count", "3"]
    words += ["--prompts", *(inputs.own_prompts or [inputs.prompts])]
    words += [] if inputs.own_model else ["--eagle3", inputs.head]
    if inputs.own:
        words += ["--out", inputs.state / "own.jsonl"]
    work = inputs.state / ("own_work.jsonl" if inputs.own else "real_model_work.jsonl")
    return [measured("real", *words, "--work", work)]


def _hybrid(inputs: Inputs) -> list[list[str]]:
    """Look-ups beside a head, on chats and on edits."""
    edits, state = inputs.state / "edits.jsonl", inputs.state
    words = ["--model", inputs.smollm2, "--eagle3", inputs.head, "--prompts", *inputs.questions(*ALL_TASKS), edits]
    int8 = ["--weights", "int8", "--count", "4", "--only", "hybrid", "eagle3-chain", "eagle3 auto", "prompt_lookup"]
    int4 = ["--only", "hybrid", "eagle3-chain 2", "eagle3 auto", "prompt_lookup auto", "look-ups+head"]
    eight = HYBRID.with_name("hybrid_int8.jsonl")
    return [
        command("benchmarks.edits", edits),
        measured("real", *words, *int4, "--out", HYBRID, "--work", state / "hybrid_work.jsonl"),
        measured("real", *words, *int8, "--out", eight, "--work", state / "hybrid_int8.jsonl"),
    ]


EXPERIMENT = Experiment(
    name="real",
    question="a real model, every size and the policy: results.md",
    options={
        "model": option(str, "folder, hub name or GGUF file", required=True),
        "weights": option("int4"),
        "prompts": option([], "folder of the prompt files, or files", type=Path, required=True),
        "tasks": option(list(TASKS), choices=list(TASKS)),
        "count": option(8),
        "tokens": option(128),
        "temperatures": option(["0", "1"]),
        "only": option([], "words of which an arm's name has one"),
        "work": option(Path("build/real_model.jsonl"), "run file with the texts"),
        **{name: option(str, "folder or hub name") for name in NETWORKS},
    },
    make=make,
    shown=methods,
    tables={"docs/results.md": {"default": in_short, "real": methods}, "README.md": {"results": in_short}}
    | {f"docs/methods/{page}.md": {"measured": functools.partial(of_page, page)} for page in ARMS_OF_PAGE},
    claims={"real": real, "policy": policy},
    rank=1,
    hours=0.5,
    needs=lambda i: (*map(Path, i.own_prompts or [i.prompts]), *([] if i.own_model else [i.head])),
    commands=_real,
    results=("real_model.jsonl", "real_model_repeats.json"),
    own=True,
)
LOOKUPS = Experiment(
    name="hybrid",
    question="look-ups beside a head on a real model: README, results.md, methods/hybrid.md",
    tables={"docs/methods/hybrid.md": {"measured": hybrid}},
    rank=6,
    hours=0.3,
    needs=lambda inputs: (inputs.prompts, inputs.head),
    commands=_hybrid,
    results=("hybrid.jsonl", "hybrid_repeats.json", "hybrid_int8.jsonl", "hybrid_int8_repeats.json"),
)
