"""Trained heads against plain decoding, a draft model and prompt lookup, on the bundled model, in one process.

There are two kinds of arms. Those of the first kind have the default policy and are timed: every prompt runs on
every arm before the next prompt, in rotating order, greedy and at temperature 1. Those of the second kind draft trees
of fixed sizes, to compare the acceptance of methods at equal nodes. Writes one JSON line a run; heads_summary.py makes
the tables and plots.

    python benchmarks/heads.py --prompts ../shared/data/prompts --hydra PATH --hydra-plus PATH --equal PATH
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
from origin import provenance
from recorder import Recorder

import foredraft
from foredraft.bench.prompts import read_prompts
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Constant

TASKS = {"humaneval": "human_eval/HumanEval.jsonl", "gsm8k": "eagle/gsm8k/question.jsonl"}
"""Prompt files; those of HumanEval are plain text, the others use the chat template."""
TIMED = {
    "plain": "none",
    "draft_model": "draft_model",
    "prompt_lookup": "prompt_lookup",
    "medusa": "medusa",
    "hydra": "hydra",
    "hydra++": "hydra++",
    "eagle1": "eagle1",
    "eagle2": "eagle2",
    "eagle3": "eagle3",
}
FIXED = {
    "eagle1, 25 nodes": "eagle1",
    "eagle2, 25 nodes, 6 levels, k 8": "eagle2,nodes=25,depth=6,top_k=8",
    "eagle3, 25 nodes, 6 levels, k 8": "eagle3,nodes=25,depth=6,top_k=8",
    "eagle3 of as much training as eagle2, same tree": "equal,nodes=25,depth=6,top_k=8",
    "eagle3, chain of 5": "eagle3,nodes=5,depth=5,top_k=1",
    "eagle3, 24 nodes, 5 levels, k 8": "eagle3,nodes=24,depth=5,top_k=8",
    "eagle3, 59 nodes, 7 levels, k 10": "eagle3,nodes=59,depth=7,top_k=10",
    "eagle2, 59 nodes, 7 levels, k 10": "eagle2,nodes=59,depth=7,top_k=10",
    "medusa, 24 nodes": "medusa",
    "hydra, 24 nodes": "hydra",
    "hydra++, 24 nodes": "hydra++",
}


def with_path(spec: str, args: argparse.Namespace) -> str | None:
    """The spec of an arm, with the path of a head that does not ship; None if that path was not given."""
    name, comma, options = spec.partition(",")
    given = {"hydra": ("hydra", args.hydra), "hydra++": ("hydra", args.hydra_plus), "equal": ("eagle3", args.equal)}
    if name not in given:
        return spec
    method, path = given[name]
    return None if path is None else f"{method}:{path}{comma}{options}"


def generators(args: argparse.Namespace) -> tuple[dict[str, Generator], dict[str, tuple[Generator, Recorder]]]:
    """Timed arms, and arms of fixed trees with their recorders. Each has its own target."""
    timed, fixed = {}, {}
    for name, spec in TIMED.items():
        if (full := with_path(spec, args)) is not None:
            timed[name] = foredraft.load(args.target, full)
    for name, spec in FIXED.items():
        if (full := with_path(spec, args)) is not None:
            plain = foredraft.load(args.target, full)
            recorder = Recorder(plain.engine.drafter)
            depth = plain.engine.drafter.needs.longest
            shared = foredraft.load(
                plain.engine.target, recorder, tokenizer=plain.tokenizer.inner, policy=Constant(depth)
            )
            fixed[name] = (shared, recorder)
    return timed, fixed


def run(arm: Callable[..., Any], prompt: Any, args: argparse.Namespace, temperature: float) -> dict[str, Any]:
    started = time.perf_counter()
    result = arm(prompt, max_new_tokens=args.new_tokens, temperature=temperature, seed=1)
    seconds = time.perf_counter() - started
    return {"tokens": len(result.tokens), "seconds": seconds, "stats": result.stats.as_dict(), "output": result.tokens}


def measure(args: argparse.Namespace, out: TextIO) -> None:
    timed, fixed = generators(args)
    names, turn = list(timed), 0
    for task, file in TASKS.items():
        prompts = read_prompts(args.prompts / file, chat=task != "humaneval")[: args.count]
        for number, prompt in enumerate(each.prompt for each in prompts):
            if turn == 0:
                for generator in timed.values():  # warm-up: kernels, packed weights, cost tables
                    generator.generate(prompt, max_new_tokens=args.new_tokens)
            for temperature in (0.0, 1.0):
                about = {"kind": "run", "task": task, "prompt": number, "temperature": temperature}
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    line = {**about, "arm": name, **run(timed[name].generate, prompt, args, temperature)}
                    out.write(json.dumps(line) + "\n")
                for name, (generator, recorder) in fixed.items():
                    line = {**about, "arm": name, "fixed": True, **run(generator.generate, prompt, args, temperature)}
                    line |= recorder.take()
                    out.write(json.dumps(line) + "\n")
                turn += 1
            out.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="sample")
    parser.add_argument("--prompts", type=Path, default=Path("../shared/data/prompts"))
    parser.add_argument("--hydra", help="folder of Hydra heads, which do not ship (scripts/sample-heads makes them)")
    parser.add_argument("--hydra-plus", help="folder of Hydra++ heads")
    parser.add_argument("--equal", help="EAGLE-3 head trained on as many tokens as the EAGLE head")
    parser.add_argument("--count", type=int, default=20, help="prompts a task")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/heads.jsonl"))
    args = parser.parse_args()
    if not args.prompts.is_dir():
        raise SystemExit(f"Skipped: there are no prompts in {args.prompts}.")
    torch.set_num_threads(args.threads)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w") as out:
        facts = {"target": args.target, "new_tokens": args.new_tokens, "count": args.count, "dtype": "float32"}
        out.write(json.dumps(provenance("python benchmarks/heads.py", **facts)) + "\n")
        measure(args, out)


if __name__ == "__main__":
    main()
