"""Speed-up by batch size on a real model with the native engine, for an EAGLE-3 and an EAGLE-1 head.

    python benchmarks/batches.py --model MODEL --eagle3 HEAD --eagle1 HEAD --prompts ../shared/data/prompts

Every batch of prompts runs on every arm before the next one. ``foredraft bench`` runs a batch size at a time, so an
interrupted run continues. From LARGE rows on texts are shorter, and each task is one batch. The results file holds no
texts. Tables: `summary.py --write`.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from origin import origin_line
from reading import markdown_table, quartiles
from real_model import FIXED, beside_plain, length

from foredraft.bench.measure.records import Run, read_runs
from foredraft.bench.measure.summary import grouped, ratios
from foredraft.files.provenance import short_commit

RESULTS = Path(__file__).resolve().parent / "results" / "batches.jsonl"
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


def command(args: argparse.Namespace, size: int) -> list[str]:
    """``foredraft bench`` of one batch size: at least six prompts of each task, and one batch."""
    words = [sys.executable, "-m", "foredraft", "bench", "-m", args.model, "--weights", args.weights, "--chat"]
    for name, spec in arms(args.eagle3, args.eagle1).items():
        words += ["-d", f"{name}={spec}"]
    for task in TASKS[size >= LARGE]:
        words += ["--prompts", str(args.prompts / "eagle" / task / "question.jsonl")]
    words += [
        "--batch-size",
        str(size),
        "--count",
        str(max(size, 6)),
        "--max-new-tokens",
        str(args.tokens // (1 + (size >= LARGE))),
    ]
    return [*words, "--no-texts", "--out", str(args.work / f"batches-{size}.jsonl")]


def tables() -> str:
    """Those of both processors that were measured."""
    return "\n\n".join(map(table, (RESULTS, RESULTS.with_name("batches_xeon.jsonl"))))


def table(path: Path = RESULTS) -> str:
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
    origin, commits = file.provenance[-1], dict.fromkeys(short_commit(each["commit"]) for each in file.provenance)
    if len(commits) > 1:
        origin = {**origin, "commits": f"commits {' and '.join(commits)}"}
    made = origin_line(origin, origin["settings"]["weights"] or "float32")
    head = [
        "speed-up (quartiles over batches) / acceptance length",
        *(f"{size} row{'s' * (size > 1)}" for size in sizes),
    ]
    return "\n".join(
        [
            *markdown_table(head, lines),
            "",
            f"Greedy, chats of {setting(file.runs)}; texts equal to plain decoding's: {same} of {count}. {made}. "
            "Made by `benchmarks/batches.py`.",
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


def merged(parts: Sequence[Path], out: Path) -> None:
    """One run file of several."""
    out.write_text("".join(part.read_text(encoding="utf-8") for part in parts), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, hub name or GGUF file")
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--eagle3", required=True, help="head")
    parser.add_argument("--eagle1", help="head")
    parser.add_argument("--prompts", type=Path, required=True, help="folder of the prompt files")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--work", type=Path, default=Path("build"), help="for the run file of each size")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    for size in args.sizes:
        subprocess.run(command(args, size), check=True)
    merged(sorted(args.work.glob("batches-*.jsonl")), args.out)
    print(table(args.out))


if __name__ == "__main__":
    main()
