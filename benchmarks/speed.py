"""Speed against transformers, both sides in one process: plain decoding, a draft model, prompt lookup.

Every prompt runs on every arm before the next prompt, in rotating order, so that machine drift affects all arms alike.
Both sides generate exactly the same number of tokens, greedily, in float32. Times are wall times of whole calls,
prefill included. Writes one JSON line a run, the cost of a forward by rows, and the peak memory of each side, measured
in a separate process; prints medians of paired ratios.

    python benchmarks/speed.py --models ../shared/models --prompts ../shared/data/prompts/eagle
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import torch
import transformers
from origin import provenance
from reading import read
from speed_tables import TASKS, markdown

import foredraft
from foredraft.bench.prompts import read_prompts
from foredraft.engine.cost_model import measure_costs


class TransformersArms:
    """transformers' own generate: plain, assisted, and with prompt lookup."""

    def __init__(self, target: str, draft: str | None, new_tokens: int) -> None:
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(target, dtype=torch.float32).eval()
        self.assistant = load(draft, dtype=torch.float32).eval() if draft else None
        self.length = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "do_sample": False}

    def run(self, ids: list[int], **extra: object) -> list[int]:
        inputs = torch.tensor([ids])
        out = self.model.generate(inputs, attention_mask=torch.ones_like(inputs), **self.length, **extra)
        return out[0, len(ids) :].tolist()

    def arms(self) -> dict[str, Callable[[list[int]], tuple[list[int], dict]]]:
        return {
            "hf_plain": lambda ids: (self.run(ids), {}),
            "hf_assisted": lambda ids: (self.run(ids, assistant_model=self.assistant), {}),
            "hf_lookup": lambda ids: (self.run(ids, prompt_lookup_num_tokens=10), {}),
        }


def our_arms(target: str, draft: str, new_tokens: int) -> dict[str, Callable[[list[int]], tuple[list[int], dict]]]:
    generators = {
        "plain": foredraft.load(target, drafter=None),
        "draft_model": foredraft.load(target, drafter=f"draft_model:{draft}"),
        "prompt_lookup": foredraft.load(target, drafter="prompt_lookup"),
    }

    def arm(name: str) -> Callable[[list[int]], tuple[list[int], dict]]:
        def run(ids: list[int]) -> tuple[list[int], dict]:
            result = generators[name].generate(ids, min_new_tokens=new_tokens, max_new_tokens=new_tokens)
            return result.tokens, result.stats.as_dict()

        return run

    return {name: arm(name) for name in generators}


def measure(args: argparse.Namespace, out: TextIO) -> None:
    target, draft = str(args.models / args.target), str(args.models / args.draft)
    arms = TransformersArms(target, draft, args.new_tokens).arms() | our_arms(target, draft, args.new_tokens)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    names = list(arms)
    turn = 0
    for task in TASKS:
        prompts = read_prompts(args.prompts / task / "question.jsonl", chat=True)[: args.count]
        for number, prompt in enumerate(prompts):
            chat = tokenizer.apply_chat_template(prompt.prompt, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(chat, add_special_tokens=False)["input_ids"]
            if turn == 0:
                for name in names:  # warm-up: kernels, packed weights, the cost table
                    arms[name](ids)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                started = time.perf_counter()
                tokens, stats = arms[name](ids)
                seconds = time.perf_counter() - started
                line = {"kind": "run", "task": task, "prompt": number, "prompt_tokens": len(ids), "arm": name}
                line |= {"tokens": len(tokens), "seconds": seconds, "stats": stats, "output": tokens}
                out.write(json.dumps(line) + "\n")
            out.flush()
            turn += 1


def costs(args: argparse.Namespace, out: TextIO) -> None:
    generator = foredraft.load(str(args.models / args.target), drafter=None)
    tables = [measure_costs(generator.engine.target, cached=300, budget=20.0, longest=64) for _ in range(5)]
    seconds = [statistics.median(table(rows) for table in tables) for rows in tables[0].rows]
    out.write(json.dumps({"kind": "cost", "rows": tables[0].rows, "seconds": seconds}) + "\n")


def peak_memory(args: argparse.Namespace, out: TextIO) -> None:
    """Peak resident memory of each side, each in a separate process."""
    peaks = {}
    for side in ("hf_plain", "plain", "hf_assisted", "draft_model"):
        command = [sys.executable, __file__, "--peak", side, *sys.argv[1:]]
        peaks[side] = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
    out.write(json.dumps({"kind": "memory", "mebibytes": peaks}) + "\n")


def one_side(args: argparse.Namespace) -> None:
    target, draft = str(args.models / args.target), str(args.models / args.draft)
    if args.peak.startswith("hf"):
        run = TransformersArms(target, draft if "assisted" in args.peak else None, args.new_tokens).arms()[args.peak]
    else:
        spec = f"draft_model:{draft}" if args.peak == "draft_model" else None
        generator = foredraft.load(target, drafter=spec)

        def run(ids: list[int]) -> object:
            return generator.generate(ids, min_new_tokens=args.new_tokens, max_new_tokens=args.new_tokens)

    for _ in range(3):
        run(list(range(10, 310)))
    print(_peak_mebibytes())


def _peak_mebibytes() -> float:
    """Peak resident memory of this process. getrusage would include the parent's at the time of the fork."""
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        return int(fields["VmHWM"].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2  # bytes on macOS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("../shared/models"))
    parser.add_argument("--prompts", type=Path, default=Path("../shared/data/prompts/eagle"))
    parser.add_argument("--target", default="target-65m")
    parser.add_argument("--draft", default="draft-6m")
    parser.add_argument("--count", type=int, default=8, help="prompts a task")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/speed.jsonl"))
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not (args.models / args.target).is_dir() or not args.prompts.is_dir():
        sys.exit(f"Skipped: there are no models in {args.models} or no prompts in {args.prompts}.")
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if args.peak:
        one_side(args)
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w") as out:
        facts = {"dtype": "float32", "target": args.target, "draft": args.draft, "new_tokens": args.new_tokens}
        out.write(json.dumps(provenance("python benchmarks/speed.py", **facts)) + "\n")
        measure(args, out)
        costs(args, out)
        peak_memory(args, out)
    print(markdown(read(args.out)))


if __name__ == "__main__":
    main()
