"""Acceptance with shared noise against the ratio rules, by drafter, size and temperature, with bootstrap intervals.

    python benchmarks/shared_noise.py --out runs.jsonl [--prompts 12] [--new-tokens 96] [--temperatures 0.6 1.0]

One JSON line a cell: tokens per forward of the target, its 95 % interval over prompts, and how many texts equal plain
decoding's of the seed. The first line says where the numbers are from.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from origin import provenance

import foredraft
from foredraft.bench.prompts import standard_prompts
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Constant

SAMPLES = 2000
"""Of the bootstrap."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A drafter of one size and the rule that verifies it; None is shared noise."""

    drafter: str
    nodes: int
    verifier: str | None = None


ARMS = (
    *(Arm(f"eagle3,nodes={n},depth=5,top_k=8", n, rule) for n in (8, 24, 59) for rule in (None, "traversal")),
    *(Arm("eagle1,tree=eagle", 0, rule) for rule in (None, "traversal")),
    *(Arm(f"draft_model:sample-draft,num_assistant_tokens={n}", 0, rule) for n in (4, 8) for rule in (None, "block")),
    *(Arm("sequoia:sample-draft,nodes=8,depth=6,acceptance=0.5/0.15/0.1/0.06", 0, r) for r in (None, "traversal")),
    Arm("opt_tree:sample-draft,nodes=16,depth=6,top_k=8", 16),
    Arm("medusa", 0),
)


def interval(pairs: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """The 95 % bootstrap interval of the ratio of sums, over prompts."""
    source = random.Random(0)
    found = []
    for _ in range(SAMPLES):
        some = source.choices(pairs, k=len(pairs))
        found.append(sum(tokens for tokens, _ in some) / sum(forwards for _, forwards in some))
    found.sort()
    return found[int(0.025 * SAMPLES)], found[int(0.975 * SAMPLES)]


def texts(generator: Generator, prompts: Sequence[Any], temperature: float, new_tokens: int) -> list[Any]:
    """One output for each prompt, with its number as seed, decoded alone."""
    return [
        generator.batch([prompt], SamplingParams(max_new_tokens=new_tokens, temperature=temperature, seed=seed))[0]
        for seed, prompt in enumerate(prompts)
    ]


def cells(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    prompts = [prompt.prompt for prompt in standard_prompts(chat=True)][: args.prompts]
    plain = foredraft.load("sample", "none", dtype="float32", device="cpu")
    for temperature in args.temperatures:
        wanted = [result.tokens for result in texts(plain, prompts, temperature, args.new_tokens)]
        for arm in ARMS:
            drafter = foredraft.load(plain, arm.drafter, verifier=arm.verifier)
            needs = drafter.engine.drafter.needs
            drafter.engine.policy = Constant(needs.longest, 0.0, arm.nodes)
            found = texts(drafter, prompts, temperature, args.new_tokens)
            pairs = [(len(result.tokens), result.stats.target_forwards) for result in found]
            low, high = interval(pairs)
            yield {
                "drafter": arm.drafter,
                "verifier": arm.verifier or "shared noise",
                "temperature": temperature,
                "tokens_per_forward": sum(tokens for tokens, _ in pairs) / sum(forwards for _, forwards in pairs),
                "interval": [low, high],
                "equal_to_plain": sum(r.tokens == text for r, text in zip(found, wanted, strict=True)),
                "texts": len(prompts),
                "new_tokens": args.new_tokens,
            }
            drafter.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 0.8, 1.0, 1.3])
    args = parser.parse_args()
    torch.set_num_threads(1)
    given = " ".join(sys.argv[1:])
    with args.out.open("a") as file:
        file.write(json.dumps(provenance(f"python benchmarks/shared_noise.py {given}")) + "\n")
        for cell in cells(args):
            file.write(json.dumps(cell) + "\n")
            file.flush()
            print(json.dumps(cell), flush=True)


if __name__ == "__main__":
    main()
