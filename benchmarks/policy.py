"""The throughput policy beside every fixed size: tokens a second on the same prompts, prompt by prompt.

A cell is a target, a method, a temperature and a file of prompts. Its arms are plain decoding, every size that the
policy can choose, and the policy. Each prompt is put to every arm before the next prompt, in an order that rotates,
until every arm has generated so many tokens. One request before them is not counted: in it the policy tries its sizes,
and methods such as sequoia measure. A finished cell is a line of JSON and is not run again.

    python benchmarks/policy.py --prompts ../shared/data/prompts/eagle/humaneval/question.jsonl
    python benchmarks/policy.py --target ../shared/models/target-65m -d draft_model:../shared/models/draft-6m \\
        -d "hydra++=hydra:HEAD" --prompts ../shared/data/prompts/eagle/gsm8k/question.jsonl
"""

import argparse
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from origin import provenance
from policy_tables import PLAIN, POLICY, Cell, read

import foredraft
from foredraft.bench.measure.arms import ArmSpec
from foredraft.bench.prompts import read_prompts
from foredraft.core.drafter import Background
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.generator import Generator, Prompt
from foredraft.engine.policy import Constant, Policy, Throughput

DRAFTERS = ("eagle3", "eagle1", "draft_model", "medusa", "prompt_lookup")


def arms_of(generator: Generator, sampled: bool) -> dict[str, Policy]:
    """The policy that its options ask for, and every size of it that is not 0; drawn trees for sampled rows. A drafter
    that chooses its sizes itself, such as bandit, has one arm."""
    policy, needs = generator.engine.policy, generator.engine.drafter.needs
    arms: dict[str, Policy] = {POLICY: policy}
    if not isinstance(policy, Throughput):
        return arms
    for size in policy.sizes[1:]:
        length = needs.longest if needs.scored else size
        arms[str(size)] = Constant(length, policy.confidence, nodes=size if needs.scored else 0)
    for nodes in needs.drawn if sampled else ():
        arms[f"drawn {nodes}"] = Constant(needs.longest, policy.confidence, nodes=nodes, drawn=True)
    return arms


def run_cell(
    plain: Generator, drafting: Generator, prompts: Sequence[Prompt], temperature: float, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """The results of a cell, in the order in which they were measured."""
    policies = arms_of(drafting, temperature > 0)
    names = [PLAIN, *policies]
    said: dict[str, int] = defaultdict(int)
    params = SamplingParams(max_new_tokens=args.new_tokens, temperature=temperature, eos_token_id=(), top_p=None)
    for generator in (plain, drafting):  # not counted: what a first request sets up, and the policy's first trials
        generator.engine.run(generator.submit(prompts[:1], params))
    for number in range(args.rounds * len(prompts)):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            generator = plain if name == PLAIN else drafting
            if name != PLAIN:
                drafting.engine.policy = policies[name]
            sequences = generator.submit([prompts[number % len(prompts)]], params, seed=number)
            generator.engine.run(sequences)
            if isinstance(generator.engine.drafter, Background):
                generator.engine.drafter.wait()  # or its thread slows the next arm
            stats = sequences[0].stats
            said[name] += stats.tokens
            yield {
                "arm": name,
                "prompt": number,
                "tokens": stats.tokens,
                "forwards": stats.target_forwards,
                "seconds": stats.seconds - stats.prefill_seconds,
                **({} if temperature else {"digest": _digest(sequences[0].tokens)}),
            }
        if min(said.values()) >= args.tokens:
            break
    drafting.engine.policy = policies[POLICY]


def summary(cell: Cell) -> str:
    """All tokens over all seconds: the policy against the best fixed size in hindsight, 0 included, and against 0."""
    sizes = " ".join(f"{arm}:{cell.speed_up(arm):.2f}" for arm in cell.arms if arm != POLICY)
    return (
        f"policy/best {cell.ratio:.3f} (size {cell.best}), policy/plain {cell.speed_up(POLICY):.3f}, "
        f"{cell.arms[POLICY].length:.2f} tokens a forward; {sizes}"
    )


def _digest(tokens: Sequence[int]) -> str:
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
    parser.add_argument("--rounds", type=int, default=4, help="so often are the prompts of a file used at most")
    parser.add_argument("--tokens", type=int, default=2000, help="of each arm and cell, at least")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/policy.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    cells = read(args.out)[0] if args.out.exists() else []
    done = {(cell.target, cell.method, cell.temperature, cell.task): cell for cell in cells}
    name = Path(args.target).name
    arms = args.drafter or [ArmSpec.parse(drafter) for drafter in DRAFTERS]
    plain, *drafting = foredraft.load_many(args.target, ["none", *(arm.spec for arm in arms)])
    with args.out.open("a", encoding="utf-8") as out:
        facts = {"target": name, "tokens": args.tokens, "new_tokens": args.new_tokens}
        origin = provenance("python benchmarks/policy.py", **facts)
        out.write(json.dumps(origin) + "\n")
        for file in args.prompts:
            task = Path(file).parent.name
            prompts = [ask.prompt for ask in read_prompts(file)][: args.count]
            for arm, generator in zip(arms, drafting, strict=True):
                for temperature in args.temperatures:
                    cell = (name, arm.name, temperature, task)
                    if cell not in done:
                        runs = list(run_cell(plain, generator, prompts, temperature, args))
                        keys = dict(zip(("target", "method", "temperature", "prompts"), cell, strict=True))
                        line = {"kind": "cell", **keys, "runs": runs}
                        out.write(json.dumps(line) + "\n")
                        out.flush()
                        done[cell] = Cell.of(line, origin)
                    print(*cell, summary(done[cell]), flush=True)


if __name__ == "__main__":
    main()
