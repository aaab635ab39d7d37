"""The throughput policy beside every fixed size: tokens a second on the same prompts, step by step.

A cell is a target, a method, a temperature and a file of prompts. Its arms are plain decoding, every size that the
policy can choose, and the policy, each with an engine of its own on one target. The arm that has generated the fewest
tokens runs the next step, so all arms are at the same place of the same prompt, and a machine that becomes slow for a
moment is slow for all of them. Each arm continues every prompt by as many tokens; a size that is 12 % behind the best
one after 512 tokens ends there. One request before them is not counted: in it the policy tries its sizes, and methods
such as sequoia measure. A finished cell is a line of JSON and is not run again.

    python benchmarks/policy.py --prompts ../shared/data/prompts/eagle/humaneval/question.jsonl
    python benchmarks/policy.py --target ../shared/models/target-65m -d draft_model:../shared/models/draft-6m \\
        -d "hydra++=hydra:HEAD" --prompts ../shared/data/prompts/eagle/gsm8k/question.jsonl
"""

import argparse
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from origin import provenance
from policy_tables import PLAIN, POLICY, Cell, rate, read

import foredraft
from foredraft.bench.measure.arms import ArmSpec
from foredraft.bench.prompts import read_prompts
from foredraft.compose.arguments import AnyDrafter
from foredraft.core.drafter import Background
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.generator import Generator, Prompt
from foredraft.engine.policy import Constant, Policy, Throughput
from foredraft.engine.request import Sequence

DRAFTERS = ("eagle3", "eagle1", "draft_model", "medusa", "prompt_lookup")
LENGTHS = (1, 2, 3, 4, 5, 7, 11, 15, 23, 31, 47, 63)
NODES = (1, 3, 5, 7, 11, 15, 23, 31, 47, 63)
"""Fixed sizes, up to the drafter's maximum: lengths of chains, node counts of scored trees. With the root added, most
equal a node count of CPU forwards."""
TRIED, BEHIND = 512, 0.12
"""After so many tokens a size ends that is behind the best size by this share; so one size that drafts is left."""


class Arm:
    """Plain decoding, a fixed size or the policy, with the engine that runs it.

    ``tokens``: of the cell. ``results``: of its finished prompts.
    """

    def __init__(self, name: str, generator: Generator) -> None:
        self.name = name
        self.generator = generator
        self.fixed = name not in (PLAIN, POLICY)
        self.tokens = 0
        self.results: list[dict[str, Any]] = []
        self._sequence: Sequence | None = None

    def start(self, prompts: Seq[Prompt], params: SamplingParams) -> None:
        """Begin a cell, after a request that is not counted."""
        self.tokens, self.results = 0, []
        self.generator.engine.run(self.generator.submit(prompts[:1], params))

    def step(self, prompts: Seq[Prompt], params: SamplingParams) -> bool:
        """Run a step; True if a prompt ended with it."""
        engine, number = self.generator.engine, len(self.results)
        if self._sequence is None:
            prompt, own = prompts[number % len(prompts)], replace(params, seed=number)
            (self._sequence,) = self.generator.submit([prompt], own)
        sequence, before = self._sequence, len(self._sequence.tokens)
        engine.step()
        if isinstance(engine.drafter, Background):
            engine.drafter.wait()  # or its thread slows the next arm
        self.tokens += len(sequence.tokens) - before
        if sequence.finished:
            self._sequence, stats = None, sequence.stats
            result = {
                "arm": self.name,
                "prompt": number,
                "tokens": stats.tokens,
                "forwards": stats.target_forwards,
                "seconds": stats.seconds - stats.prefill_seconds,
            }
            self.results.append(result if params.temperature else {**result, "digest": _digest(sequence.tokens)})
        return sequence.finished


def arms_of(plain: Generator, spec: AnyDrafter) -> list[Arm]:
    """Plain decoding, the policy that the drafter's options ask for, and every size of it that is not 0. A drafter that
    chooses its sizes itself, such as bandit, has one arm beside plain decoding."""
    chosen = foredraft.load(plain, spec)
    arms = [Arm(PLAIN, plain), Arm(POLICY, chosen)]
    policy, needs = chosen.engine.policy, chosen.engine.drafter.needs
    if not isinstance(policy, Throughput):
        return arms
    fixed: dict[str, Policy] = {}
    most = needs.max_nodes if needs.scored else needs.longest
    for size in sorted({most, *(size for size in (NODES if needs.scored else LENGTHS) if size < most)}):
        length = needs.longest if needs.scored else size
        fixed[str(size)] = Constant(length, nodes=size if needs.scored else 0)
    return arms + [Arm(name, foredraft.load(plain, spec, policy=each)) for name, each in fixed.items()]


def run_cell(
    arms: Seq[Arm], prompts: Seq[Prompt], temperature: float, tokens: int, new_tokens: int
) -> Iterator[dict[str, Any]]:
    """The results of a cell, in the order in which they were measured."""
    params = SamplingParams(max_new_tokens=new_tokens, temperature=temperature, eos_token_id=(), top_p=None)
    for arm in arms:
        arm.start(prompts, params)
    whole = -(-tokens // new_tokens) * new_tokens  # with eos_token_id=() all outputs are this long
    racing = list(arms)
    while (arm := min(racing, key=lambda arm: arm.tokens)).tokens < whole:
        if not arm.step(prompts, params):
            continue
        yield arm.results[-1]
        rates = {each: rate(each.results) for each in racing if each.fixed and each.tokens >= TRIED}
        if arm in rates and rates[arm] < (1 - BEHIND) * max(rates.values()):
            racing.remove(arm)


def summary(cell: Cell) -> str:
    """All tokens over all seconds: the policy against the best fixed size in hindsight, 0 included, and against 0."""
    sizes = " ".join(f"{arm}:{cell.speed_up(arm):.2f}" for arm in cell.arms if arm != POLICY)
    return (
        f"policy/best {cell.ratio:.3f} (size {cell.best}), policy/plain {cell.speed_up(POLICY):.3f}, "
        f"{cell.arms[POLICY].length:.2f} tokens a forward; {sizes}"
    )


def _digest(tokens: Seq[int]) -> str:
    """A short name of an output, by which the arms' greedy outputs are compared."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="sample")
    parser.add_argument("--prompts", nargs="+", required=True, help="files of prompts")
    drafter_help = "drafter of the bundled or given target: SPEC, or NAME=SPEC as in foredraft bench; repeatable"
    parser.add_argument("-d", "--drafter", action="append", type=ArmSpec.parse, help=drafter_help)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--count", type=int, default=40, help="prompts of each file")
    parser.add_argument("--tokens", type=int, default=2000, help="of each arm and cell, at least")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/policy.jsonl"))
    args = parser.parse_args()
    if args.tokens <= args.new_tokens:
        parser.error("--tokens must be more than --new-tokens: the halves of a cell's prompts are compared.")
    torch.set_num_threads(args.threads)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    cells = read(args.out) if args.out.exists() else []
    done = {(cell.target, cell.method, cell.temperature, cell.task): cell for cell in cells}
    name = Path(args.target).name
    drafters = args.drafter or [ArmSpec.parse(method) for method in DRAFTERS]
    plain = foredraft.load(args.target, "none")
    with args.out.open("a", encoding="utf-8") as out:
        facts = {"target": name, "tokens": args.tokens, "new_tokens": args.new_tokens}
        origin = provenance("python benchmarks/policy.py", **facts)
        out.write(json.dumps(origin) + "\n")
        pairs: itertools.product[tuple[ArmSpec, float]] = itertools.product(drafters, args.temperatures)
        for drafter, temperature in pairs:
            arms: list[Arm] = []  # of all files: the policy keeps what it has learned
            for file in args.prompts:
                cell = (name, drafter.name, temperature, Path(file).parent.name)
                if cell not in done:
                    arms = arms or arms_of(plain, drafter.spec)
                    prompts = [ask.prompt for ask in read_prompts(file)][: args.count]
                    runs = list(run_cell(arms, prompts, temperature, args.tokens, args.new_tokens))
                    keys = dict(zip(("target", "method", "temperature", "prompts"), cell, strict=True))
                    line = {"kind": "cell", **keys, "runs": runs}
                    out.write(json.dumps(line) + "\n")
                    out.flush()
                    done[cell] = Cell.of(line, origin)
                print(*cell, summary(done[cell]), flush=True)
            for arm in arms[1:]:
                arm.generator.close()


if __name__ == "__main__":
    main()
