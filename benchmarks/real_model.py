"""Every method at fixed sizes, and under the default policy, on a real model with the native engine.

The same as `foredraft bench` with many arms: every prompt runs on every arm before the next prompt, and a repeated
command continues an interrupted run. The results file holds no texts. Tables: `summary.py --write`.

    python benchmarks/real_model.py --model FOLDER --eagle3 HEAD --medusa HEAD --prompts ../shared/data/prompts

``--count`` prompts of each task are used; a larger one later adds prompts.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from origin import origin_line
from reading import interval, markdown_table, quartiles

from foredraft.bench.measure.records import Run, RunFile, read_runs
from foredraft.bench.measure.summary import RunPair, acceptance_length, grouped, pairs, ratios

RESULTS = Path(__file__).resolve().parent / "results" / "real_model.jsonl"
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


def repeated(tokens: Sequence[int]) -> float:
    """Share of an output's 4-grams that it has had before."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


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
            shares.setdefault(run.task, []).append(repeated(run.outputs[0].output))
    means = {task: round(statistics.mean(own), 4) for task, own in shares.items()}
    repeats_of(target).write_text(json.dumps(means) + "\n", encoding="utf-8")


def repeats_of(path: Path) -> Path:
    """The file beside a run file with the share of repeated 4-grams by task."""
    return path.with_name(f"{path.stem}_repeats.json")


# ---- tables


def length(runs: Iterable[Run]) -> float:
    """Tokens per forward of the target; 1 without forwards."""
    return acceptance_length(runs) or 1.0


def by_position(runs: Sequence[Run]) -> str:
    """The share of drafted tokens of each depth that is accepted, given that those above are."""
    depths = max((len(run.accepted_by_depth) for run in runs), default=0)
    reached = [sum(run.accepted_by_depth[d] for run in runs if len(run.accepted_by_depth) > d) for d in range(depths)]
    before = [sum(run.forwards for run in runs), *reached]
    shares = [f".{round(100 * n / m):02d}" if n < m else "1" for n, m in zip(reached, before, strict=False) if m]
    return " ".join(shares[:5])


def beside_plain(file: RunFile) -> list[RunPair]:
    """The runs of all arms that draft, each with plain decoding's of the same prompt, seed and temperature."""
    return [pair for own in pairs(file, "none").values() for pair in own if pair.run.arm != "none"]


def prompts_of(found: Iterable[RunPair]) -> int:
    """Prompts and turns of these runs."""
    return len({(pair.run.task, pair.run.prompts, pair.run.turn) for pair in found})


def methods(path: Path = RESULTS) -> str:
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
        file = read_runs(RESULTS.with_name(f"{name}.jsonl"))
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
        "Made by `benchmarks/real_model.py`."
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, hub name or GGUF file")
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="folder of the prompt files, or files")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperatures", nargs="+", default=["0", "1"])
    parser.add_argument("--only", nargs="+", help="words of which an arm's name has one")
    parser.add_argument("--out", type=Path, default=RESULTS, help="run file without texts")
    parser.add_argument("--work", type=Path, default=Path("build/real_model.jsonl"), help="run file with the texts")
    for name in NETWORKS:
        parser.add_argument(f"--{name.replace('_', '-')}", help="folder or hub name")
    args = parser.parse_args()
    found = arms({name: path for name in NETWORKS if (path := getattr(args, name))})
    if args.only:
        found = {name: spec for name, spec in found.items() if name == "none" or any(w in name for w in args.only)}
    command = [sys.executable, "-m", "foredraft", "bench", "-m", args.model, "--weights", args.weights, "--chat"]
    command += [word for name, spec in found.items() for word in ("-d", f"{name}={spec}")]
    folder, *more = args.prompts
    files = [folder / TASKS[task] for task in args.tasks] if folder.is_dir() and not more else args.prompts
    command += [word for file in files for word in ("--prompts", str(file))]
    command += [word for temperature in args.temperatures for word in ("--temperature", temperature)]
    command += ["--count", str(args.count), "--max-new-tokens", str(args.tokens), "--out", str(args.work)]
    subprocess.run(command, check=True)
    without_texts(args.work, args.out)
    print(methods(args.out))


if __name__ == "__main__":
    main()
