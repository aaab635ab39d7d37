"""Speed-up by batch size on a real model with the native engine, for an EAGLE-3 and an EAGLE-1 head.

    python -m benchmarks batches --model MODEL --eagle3 HEAD --eagle1 HEAD --prompts ../shared/data/prompts

Every batch of prompts runs on every arm before the next one. ``foredraft bench`` runs a batch size at a time, so an
interrupted run continues. From LARGE rows on texts are shorter, and each task is one batch. The results file holds no
texts.
"""

import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from benchmarks.experiments.real_model import FIXED, beside_plain, length
from benchmarks.kit.experiment import RESULTS, Experiment, measured, option
from benchmarks.kit.origin import origin_line
from benchmarks.kit.reading import markdown_table, quartiles
from foredraft.bench.measure.records import Run, read_runs
from foredraft.bench.measure.summary import grouped, ratios

FILE = RESULTS / "batches.jsonl"
SIZES = (1, 2, 4, 8, 16, 32, 64)
LARGE = 32
TASKS = {False: ("mt_bench", "gsm8k"), True: ("gsm8k", "alpaca", "qa")}
"""By whether a size is large."""


def arms(eagle3: str, eagle1: str | None) -> dict[str, str]:
    """Specs by the arms' names."""
    found = {
        "none": "none",
        "hybrid": f"hybrid:eagle3:{eagle3}",
        "EAGLE-3": f"eagle3:{eagle3}",
        "EAGLE-3 chain 2": f"eagle3:{eagle3},nodes=2,depth=2,top_k=1,{FIXED}",
        "EAGLE-3 tree 8": f"eagle3:{eagle3},nodes=8,depth=4,top_k=8,{FIXED}",
    }
    return found | ({"EAGLE-1": f"eagle1:{eagle1}"} if eagle1 else {})


def command(args: Namespace, size: int) -> list[str]:
    """``foredraft bench`` of one batch size: at least six prompts of each task, and one batch."""
    words = [sys.executable, "-m", "foredraft", "bench", "-m", args.model, "--weights", args.weights, "--chat"]
    for name, spec in arms(args.eagle3, args.eagle1).items():
        words += ["-d", f"{name}={spec}"]
    for task in TASKS[size >= LARGE]:
        words += ["--prompts", str(args.prompts / "eagle" / task / "question.jsonl")]
    count, tokens = str(max(size, 6)), str(args.tokens // (1 + (size >= LARGE)))
    words += ["--batch-size", str(size), "--count", count, "--max-new-tokens", tokens]
    return [*words, "--no-texts", "--out", str(args.work / f"batches-{size}.jsonl")]


def tables() -> str:
    """Those of both processors that were measured."""
    return "\n\n".join(map(table, (FILE, FILE.with_name("batches_xeon.jsonl"))))


def table(path: Path = FILE) -> str:
    """Speed-up and acceptance length by arm and batch size."""
    file = read_runs(path)
    every = beside_plain(file)
    rates, sizes = list[str](), sorted({run.batch for run in file.runs})
    for size in sizes:
        plain = [run for run in file.runs if run.arm == "none" and run.batch == size and run.seconds]
        tokens = sum(run.tokens for run in plain) / max(sum(run.seconds - run.prefill_seconds for run in plain), 1e-9)
        rates.append(f"{tokens:.0f}")
    lines = [["plain, tokens a second", *rates]]
    for arm, own in grouped(every, lambda pair: pair.run.arm).items():
        by_size = grouped(own, lambda pair: pair.run.batch)
        cells = [by_size.get(size, []) for size in sizes]
        shown = [
            f"{quartiles(ratios(some))} / {length(pair.run for pair in some):.2f}" if some else "" for some in cells
        ]
        lines.append([str(arm), *shown])
    same = sum(
        ours.digest == plain.digest
        for pair in every
        for ours, plain in zip(pair.run.outputs, pair.baseline.outputs, strict=True)
    )
    count = sum(len(pair.run.outputs) for pair in every)
    origin = file.provenance[-1]
    made = origin_line(origin, origin["settings"]["weights"] or "float32", file.provenance)
    head = [
        "speed-up (quartiles over batches) / acceptance length",
        *(f"{size} row{'s' * (size > 1)}" for size in sizes),
    ]
    return "\n".join(
        [
            *markdown_table(head, lines),
            "",
            f"Greedy, chats of {setting(file.runs)}; texts equal to plain decoding's: {same} of {count}. {made}. "
            "Made by `python -m benchmarks batches`.",
        ]
    )


def setting(runs: Sequence[Run]) -> str:
    """Tasks and lengths by batch size, in words."""
    parts = []
    for large in (False, True):
        own = [run for run in runs if (run.batch >= LARGE) == large]
        if own:
            length = max(each.tokens for run in own for each in run.outputs)
            sizes = f" ({LARGE} rows and more)" if large else ""
            parts.append(f"{', '.join(dict.fromkeys(run.task for run in own))}, {length} new tokens{sizes}")
    return "; ".join(parts)


def make(args: Namespace) -> None:
    """One run file of those of each size."""
    for size in args.sizes:
        subprocess.run(command(args, size), check=True)
    parts = sorted(args.work.glob("batches-*.jsonl"))
    args.out.write_text("".join(part.read_text(encoding="utf-8") for part in parts), encoding="utf-8")


EXPERIMENT = Experiment(
    name="batches",
    question="speed-up by batch size on a real model: results.md",
    options={
        "model": option(str, "folder, hub name or GGUF file", required=True),
        "weights": option("int4"),
        "eagle3": option(str, "head", required=True),
        "eagle1": option(str, "head"),
        "prompts": option(Path, "folder of the prompt files", required=True),
        "sizes": option(SIZES),
        "tokens": option(64),
        "work": option(Path("build"), "for the run file of each size"),
    },
    make=make,
    shown=table,
    tables={"docs/results.md": {"batches": tables}},
    hours=0.2,
    needs=lambda inputs: (inputs.prompts, inputs.head),
    commands=lambda inputs: [
        measured("batches", "--model", inputs.smollm2, "--eagle3", inputs.head, "--prompts", inputs.prompts)
    ],
)
