"""The throughput policy beside every fixed size: tokens a second on the same prompts, prompt by prompt.

A cell is a target, a method, a temperature and a file of prompts. Its arms are plain decoding, every size that the
policy can choose, and the policy. Each prompt is put to every arm before the next prompt, in an order that rotates,
until every arm has generated so many tokens. A finished cell is a line of JSON and is not run again.

    python benchmarks/policy.py --target sample --prompts ../shared/data/prompts/eagle/humaneval/question.jsonl
    python benchmarks/policy.py --target ../shared/models/target-65m --draft ../shared/models/draft-6m \\
        --methods draft_model prompt_lookup --prompts ../shared/data/prompts/eagle/gsm8k/question.jsonl
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from origin import provenance
from policy_tables import PLAIN, POLICY, Cell, read

import foredraft
from foredraft.bench.prompts import read_prompts
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.generator import Generator, Prompt
from foredraft.engine.policy import Constant, Policy, Throughput

METHODS = ("eagle3", "eagle1", "draft_model", "medusa", "prompt_lookup")


def arms_of(generator: Generator, sampled: bool) -> dict[str, Policy]:
    """The policy that its options ask for, and every size of it that is not 0; drawn trees for sampled rows."""
    policy, needs = generator.engine.policy, generator.engine.drafter.needs
    assert isinstance(policy, Throughput)
    arms: dict[str, Policy] = {POLICY: policy}
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
    for number in range(args.rounds * len(prompts)):
        params = SamplingParams(max_new_tokens=args.new_tokens, temperature=temperature, eos_token_id=(), top_p=None)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            generator = plain if name == PLAIN else drafting
            if name != PLAIN:
                drafting.engine.policy = policies[name]
            sequences = generator.submit([prompts[number % len(prompts)]], params, seed=number)
            generator.engine.run(sequences)
            stats = sequences[0].stats
            said[name] += stats.tokens
            yield {
                "arm": name,
                "prompt": number,
                "tokens": stats.tokens,
                "forwards": stats.target_forwards,
                "seconds": stats.seconds - stats.prefill_seconds,
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


def spec_of(method: str, args: argparse.Namespace) -> str:
    """A method with the head or draft that was given for it."""
    path = {"eagle3": args.eagle3, "eagle1": args.eagle1, "medusa": args.medusa, "draft_model": args.draft}.get(method)
    return f"{method}:{path}" if path else method


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="sample")
    parser.add_argument("--prompts", nargs="+", required=True, help="files of prompts")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--count", type=int, default=40, help="prompts of each file")
    parser.add_argument("--rounds", type=int, default=4, help="so often are the prompts of a file used at most")
    parser.add_argument("--tokens", type=int, default=2000, help="of each arm and cell, at least")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--draft", help="draft model; by default the bundled one")
    for head in ("eagle3", "eagle1", "medusa"):
        parser.add_argument(f"--{head}", help="head; by default the bundled one")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/policy.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    cells = read(args.out)[0] if args.out.exists() else []
    done = {(cell.target, cell.method, cell.temperature, cell.task): cell for cell in cells}
    name = Path(args.target).name
    plain, *drafting = foredraft.load_many(args.target, ["none", *(spec_of(method, args) for method in args.methods)])
    with args.out.open("a", encoding="utf-8") as out:
        facts = {"target": name, "tokens": args.tokens, "new_tokens": args.new_tokens}
        origin = provenance("python benchmarks/policy.py", **facts)
        out.write(json.dumps(origin) + "\n")
        for file in args.prompts:
            task = Path(file).parent.name
            prompts = [ask.prompt for ask in read_prompts(file)][: args.count]
            for method, generator in zip(args.methods, drafting, strict=True):
                for temperature in args.temperatures:
                    cell = (name, method, temperature, task)
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
