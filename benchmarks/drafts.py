"""Draft models as three papers use them: several for one tree, of one size and several shapes, one behind another.

    python benchmarks/drafts.py train --data FILE.jsonl.xz --tokens 4000000 --device cuda
    python benchmarks/drafts.py hits --prompts FILE         # SpecInfer: is the target's token among the first K?
    python benchmarks/drafts.py trees --prompts FILE        # SpecInfer: merged trees of one to three drafts
    python benchmarks/drafts.py shapes --prompts FILE       # deep and wide drafts of as many parameters
    python benchmarks/drafts.py cascades --prompts FILE     # calls of every model by drafter, and time

``train`` makes the models in --folder, all on as many tokens: three boosted drafts, of which the first learns all
tokens as drafts alone do; two more that are distilled each by itself; and one pruned draft of each shape. --only
trains some of them, so that several processes share the work. The others write a line of JSON a cell into --out. Cells
come in rounds of --texts prompts; a finished cell is not run again, and --part-of 0/4 takes every fourth round.
"""

import argparse
import itertools
import json
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from depth import Draft
from origin import provenance
from reading import read
from seeded_texts import in_turns, run_texts
from transformers import AutoModelForCausalLM

import foredraft
from foredraft.bench.check import draft_always
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.generator import Generator
from foredraft.engine.request import Sequence as Request
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.loading.load import load_model
from foredraft.train.drafts.prune import PrunedShape
from foredraft.train.drafts.run import DRAFTS, run_drafts
from foredraft.train.options import LoopOptions
from foredraft.train.run_context import Data

RESULTS = Path(__file__).resolve().parent / "results" / "drafts.jsonl"
FAMILIES = {"alone": ("boosted/1", "alone/2", "alone/3"), "boosted": ("boosted/1", "boosted/2", "boosted/3")}
"""Folders of the drafts. The first boosted draft learns all tokens, so it is the first one alone, too."""
SHAPES = {
    "sample": {
        "wide": "layers=2",
        "middle": "layers=4,hidden=324,intermediate=594",
        "deep": "layers=8,hidden=252,intermediate=528,kv_heads=1",
    },
    "target-65m": {
        "wide": "layers=2,hidden=440,intermediate=1300",
        "middle": "layers=4,hidden=384,intermediate=800,kv_heads=4",
        "deep": "layers=12,hidden=256,intermediate=624,kv_heads=2",
    },
}
"""By target: shapes with equal numbers of parameters, embeddings included."""
EXPANSIONS = {
    12: {1: ("3x1x1x1", "2x1x2x1"), 2: ("1x1x2x1", "2x1x1"), 3: ("1x1x1x1", "1x1x2")},
    24: {1: ("6x1x1x1", "4x1x2x1", "3x1x3x1"), 2: ("3x1x1x1", "2x1x2x1"), 3: ("2x1x1x1", "1x1x3x1")},
}
"""By nodes before merging and number of drafts: the expansion of each draft."""
CHOICES = 6  # the largest K of hit rates
RANKS = "0123456789"  # the last stands for all that follow
DECODING = 16
"""Most tokens of a forward that is not a prompt's."""


def named(args: argparse.Namespace) -> str:
    return Path(args.target).name


def trainings(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Arguments of ``run_drafts`` by name of the training."""
    if args.start == "new":
        starts = [new_draft(args, number) for number in (1, 2, 3)]
    else:
        starts = [args.start or args.draft] * 3
    found: dict[str, dict[str, Any]] = {"boosted": {"method": "boost", "drafts": tuple(starts), "seed": 1}}
    for number, start in enumerate(starts[1:], start=2):
        found[f"alone/{number}"] = {"method": "draft", "drafts": (start,), "seed": number}
    for name, shape in SHAPES[named(args)].items():
        found[f"shape/{name}"] = {"method": "prune", "shape": PrunedShape.parse(shape), "seed": 1}
    return found


def new_draft(args: argparse.Namespace, number: int) -> str:
    """A folder with a model of the draft's shape and random weights."""
    folder = args.folder / "new" / str(number)
    if not (folder / "config.json").exists():
        source = load_model(args.draft, dtype="float32", device="cpu")
        torch.manual_seed(number)
        AutoModelForCausalLM.from_config(source.model.config).save_pretrained(folder)
        assert source.tokenizer is not None
        source.tokenizer.inner.save_pretrained(folder)
    return str(folder)


def train(args: argparse.Namespace) -> None:
    """Train what is not finished. The data's tokens are read once, and the target's states of those with one seed."""
    data = Data(sources=tuple(args.data), cache=str(args.folder / "cache"), store=args.store)
    for name, given in trainings(args).items():
        if args.only and name not in args.only:
            continue
        options = {"tokens": args.tokens, "batch": args.batch, "lr": args.lr, "seed": given.pop("seed")}
        loop = LoopOptions(**options, validate=10**9, report=50, length=args.length)
        started, method = time.perf_counter(), given.pop("method")
        recipe = {"share": args.share} | ({"samples": args.samples} if method == "prune" else {})
        run_drafts(
            method,
            args.target,
            args.folder / name,
            data,
            **given,
            recipe_options=DRAFTS[method].options(**recipe),
            loop=loop,
            device="cpu" if args.device == "cpu" else None,
            report=lambda line, name=name: print(name, json.dumps(line), flush=True),
        )
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)


def lessons(folder: Path) -> dict[str, dict[str, Any]]:
    """Tokens that each finished model learned from, and how it agrees with the target on held-out ones."""
    found = {}
    for path in sorted(folder.glob("*/*/draft/provenance.json")):
        run, origin = path.parent.parent, json.loads(path.read_text("utf-8"))
        lines = map(json.loads, (run / "log.jsonl").read_text("utf-8").splitlines())
        tokens = max(line["tokens"] for line in lines if "tokens" in line)
        own = {"tokens": tokens, "agreement": origin["validation"]["agreement"]}
        learns = {"learns": origin["learns"]} if "learns" in origin else {}
        found[run.relative_to(folder).as_posix()] = own | learns
    return found


def made(args: argparse.Namespace, name: str) -> str:
    """The folder of a finished model."""
    folder = args.folder / name / "draft"
    if not folder.exists():
        raise SystemExit(f"{folder} is missing: run python benchmarks/drafts.py train first.")
    return str(folder)


class Texts:
    """Prompts in rounds, continued to their ends."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        options = {"dtype": "float32", "device": args.device, "max_batch_size": max(args.texts, 1)}
        self.plain = foredraft.load(args.target, "none", **options)
        self._prompts = in_turns(args.prompts, self.plain)

    def rounds(self) -> range:
        first, every = map(int, self.args.part_of.split("/"))
        return range(first, self.args.rounds, every)

    def drafting(self, spec: str, rule: str | None = None) -> Generator:
        """A generator that drafts all that it can in every step."""
        generator = foredraft.load(self.plain, spec, verifier=rule, max_batch_size=max(self.args.texts, 1))
        draft_always(generator)
        return generator

    def run(self, generator: Generator, temperature: float, number: int, together: bool = True) -> list[Request]:
        """The texts of a round, all at once or one after another."""
        seeds = range(number * self.args.texts, (number + 1) * self.args.texts)
        params = SamplingParams(max_new_tokens=self.args.new_tokens, temperature=temperature)
        found: list[Request] = []
        for group in (seeds,) if together else [(seed,) for seed in seeds]:
            prompts = [self._prompts[seed % len(self._prompts)] for seed in group]
            found += run_texts(generator, prompts, params, group)
        return found


def hits(texts: Texts, done: set[tuple]) -> Iterator[dict[str, Any]]:
    """The rank of each token of the target's texts among the choices of every draft and, at T > 0, the probability that
    SpecInfer's multi-step sampling accepts one of K tokens drawn from one, two or three drafts in turn."""
    args = texts.args
    paths = {name: made(args, name) for names in FAMILIES.values() for name in names}
    target = load_model(args.target, dtype="float32", device=args.device).model
    drafts = {name: load_model(path, dtype="float32", device=args.device).model for name, path in paths.items()}
    for number, temperature in itertools.product(texts.rounds(), args.temperatures):
        if (*_base(args), temperature, number) in done:
            continue
        ranks: list[dict[str, str]] = []
        accepted = {f"{family} {count}": [0.0] * CHOICES for family in FAMILIES for count in (1, 2, 3)}
        for text in texts.run(texts.plain, temperature, number):
            ids = torch.tensor([[*text.prompt, *text.tokens]], device=target.device)
            places, new = slice(len(text.prompt) - 1, -1), ids[0, len(text.prompt) :]
            with torch.inference_mode():
                p = target(ids).logits[0, places]
                q = {name: draft(ids).logits[0, places, : p.shape[1]] for name, draft in drafts.items()}
            ranks.append({name: ranked(each, new) for name, each in q.items()})
            if temperature:
                laws = {name: (each / temperature).softmax(-1) for name, each in q.items()}
                for family, count in itertools.product(FAMILIES, (1, 2, 3)):
                    some = [laws[name] for name in FAMILIES[family][:count]]
                    sums = multi_step((p / temperature).softmax(-1), some)
                    total = accepted[f"{family} {count}"]
                    accepted[f"{family} {count}"] = [a + b for a, b in zip(total, sums, strict=True)]
        tokens = sum(len(each["boosted/1"]) for each in ranks)
        sampled = {key: [round(x, 3) for x in sums] for key, sums in accepted.items()} if temperature else {}
        yield {"tokens": tokens, "ranks": ranks, "accepted": sampled, **_where(temperature, number)}


def ranked(logits: torch.Tensor, tokens: torch.Tensor) -> str:
    """A digit for each token: how many tokens the draft prefers to it, 9 for more."""
    own = logits.gather(1, tokens[:, None])
    return "".join(RANKS[min(rank, 9)] for rank in (logits > own).sum(1).tolist())


def multi_step(p: torch.Tensor, q: Sequence[torch.Tensor]) -> list[float]:
    """Sums over positions: the probability that one of the first K tokens is accepted, K = 1 to 6 (algorithm 2)."""
    sums, missed = [], torch.ones(len(p), device=p.device)
    for choice in range(CHOICES):
        law = q[choice % len(q)]
        missed = missed * (1 - torch.minimum(p, law).sum(1))
        sums.append(float((1 - missed).sum()))
        rest = (p - law).clamp(min=0)
        total = rest.sum(1, keepdim=True)
        p = torch.where(total > 0, rest / total.clamp(min=1e-20), p)
    return sums


def trees(texts: Texts, done: set[tuple]) -> Iterator[dict[str, Any]]:
    """Acceptance of one, two and three drafts whose trees have as many nodes together before they are merged."""
    args = texts.args
    for number, (family, folders), (nodes, by_count) in itertools.product(
        texts.rounds(), FAMILIES.items(), EXPANSIONS.items()
    ):
        for count, expansions in by_count.items():
            if count == 1 and family != "alone":
                continue
            for expansion, rule in itertools.product(expansions, (None, "recursive")):
                heats = [heat for heat in args.temperatures if heat or rule is None]
                keys = {heat: (*_base(args), family, count, nodes, expansion, rule, heat, number) for heat in heats}
                if done.issuperset(keys.values()):
                    continue
                paths = "+".join(made(args, folder) for folder in folders[:count])
                with texts.drafting(f"specinfer:{paths},expansion={expansion}", rule) as generator:
                    for heat in (heat for heat, key in keys.items() if key not in done):
                        found = texts.run(generator, heat, number)
                        about = {"family": family, "models": count, "nodes": nodes, "expansion": expansion}
                        yield {**about, "rule": rule, **_where(heat, number), "texts": counted(found)}


def counted(found: Sequence[Request]) -> list[list[int]]:
    """Tokens, forwards of the target and drafted tokens of each text."""
    return [[len(each.tokens), each.stats.target_forwards, each.stats.drafted] for each in found]


def timed(found: Sequence[Request]) -> list[list[float]]:
    """The same, and seconds after the prompt."""
    times = [each.stats.seconds - each.stats.prefill_seconds for each in found]
    return [[*line, round(each, 4)] for line, each in zip(counted(found), times, strict=True)]


def shapes(texts: Texts, done: set[tuple]) -> Iterator[dict[str, Any]]:
    """Deep and wide drafts of as many parameters: acceptance, time, and latencies by themselves, one text at a time."""
    args = texts.args
    names = {"plain": "none", **{name: f"shape/{name}" for name in SHAPES[named(args)]}}
    specs = {
        (name, length): f"draft_model:{made(args, folder)},num_assistant_tokens={length}" if length else "none"
        for name, folder in names.items()
        for length in ((0,) if name == "plain" else args.lengths)
    }
    generators = {key: texts.drafting(spec) for key, spec in specs.items()}
    for number, temperature in itertools.product(texts.rounds(), args.temperatures):
        for (name, length), generator in generators.items():
            if (*_base(args), name, length, temperature, number) not in done:
                found = texts.run(generator, temperature, number, together=False)
                yield {"shape": name, "length": length, **_where(temperature, number), "texts": timed(found)}
    if texts.rounds().start == 0:
        yield from latencies(generators, args)


def latencies(generators: dict[tuple[str, int], Generator], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Milliseconds of a forward: one token of each draft, and as many of the target as are verified."""
    target = generators["plain", 0].engine.target
    assert isinstance(target, CausalLM)
    timed = {("target", nodes): Draft(target, 256, nodes) for nodes in (1, *(1 + length for length in args.lengths))}
    for name in SHAPES[named(args)]:
        loaded = load_model(made(args, f"shape/{name}"), dtype="float32", device=args.device)
        timed[name, 1] = Draft(CausalLM(loaded.model, verify=False), 256, 1)
    for _ in range(15):
        for each in timed.values():
            each.run(5)
    for (name, nodes), each in timed.items():
        config = each.model.config
        shape = {"layers": config.num_hidden_layers, "hidden": config.hidden_size, "parameters": each.total}
        if name != "target":
            training = json.loads((Path(made(args, f"shape/{name}")) / "provenance.json").read_text("utf-8"))
            shape |= {"validation": training["validation"]}
        milliseconds = round(statistics.median(each.milliseconds[5:]), 4)
        yield {"latency": name, "forward_nodes": nodes, **shape, "milliseconds": milliseconds}


def cascaded(draft: str, middle: str) -> dict[str, str]:
    """Drafters by name. Vertical: the inner drafter drafts for a model. Horizontal: one continues the other's draft."""
    small, gram = f"draft_model:{draft},num_assistant_tokens", "max_gram,num_assistant_tokens"
    down = f"cascade:{draft}+[{gram}=3],num_assistant_tokens"
    return {
        "plain": "none",
        "Max-Gram": f"{gram}=8",
        "draft, 4": f"{small}=4",
        "draft, 8": f"{small}=8",
        "vertical: draft over Max-Gram, 4": f"{down}=4",
        "vertical: draft over Max-Gram, 8": f"{down}=8",
        "vertical: draft over Max-Gram with bigrams, 8": (
            f"cascade:{draft}+[{gram}=3,bigrams=yes],num_assistant_tokens=8"
        ),
        "horizontal: 4 of draft, 4 of Max-Gram": f"relay:[{small}=4]+[{gram}=4]",
        "combined: 4 of draft over Max-Gram, 4 of Max-Gram": f"relay:[{down}=4]+[{gram}=4]",
        "middle, 4": f"draft_model:{middle},num_assistant_tokens=4",
        "middle, 8": f"draft_model:{middle},num_assistant_tokens=8",
        "vertical: middle over draft, 8": f"cascade:{middle}+[{small}=3],num_assistant_tokens=8",
        "vertical: middle over draft over Max-Gram, 8": f"cascade:{middle}+[{down}=3],num_assistant_tokens=8",
        "horizontal: 3 of middle, 3 of draft, 2 of Max-Gram": (
            f"relay:[draft_model:{middle},num_assistant_tokens=3]+[{small}=3]+[{gram}=2]"
        ),
        "interleaved: middle over (2 of draft, 2 of Max-Gram), 8": (
            f"cascade:{middle}+[relay:[{small}=2]+[{gram}=2]],num_assistant_tokens=8"
        ),
        "combined: 4 of middle over draft over Max-Gram, 2 of draft over Max-Gram, 2 of Max-Gram": (
            f"relay:[cascade:{middle}+[{down}=3],num_assistant_tokens=4]+[{down}=2]+[{gram}=2]"
        ),
    }


def cascades(texts: Texts, done: set[tuple]) -> Iterator[dict[str, Any]]:
    """Acceptance, time, and forwards of every model after the prompt, one text at a time."""
    args = texts.args
    middle = args.middle or made(args, "shape/wide")
    calls: Counter[int] = Counter()
    call = CausalLM._call

    def counting(self: CausalLM, step: Any, *given: Any) -> Any:
        calls[sum(each.numel() for each in self.model.parameters())] += step.tokens.shape[1] <= DECODING
        return call(self, step, *given)

    arms = cascaded(args.draft, middle).items()
    with patch.object(CausalLM, "_call", counting):
        for number, (name, spec) in itertools.product(texts.rounds(), arms):
            keys = {heat: (*_base(args), name, heat, number) for heat in args.temperatures}
            if done.issuperset(keys.values()):
                continue
            with texts.drafting(spec) as generator:
                for heat in (heat for heat, key in keys.items() if key not in done):
                    calls.clear()
                    found = texts.run(generator, heat, number, together=False)
                    levels = {str(parameters): count for parameters, count in sorted(calls.items(), reverse=True)}
                    yield {"arm": name, **_where(heat, number), "texts": timed(found), "calls": levels}


def _base(args: argparse.Namespace) -> tuple[str, str]:
    return named(args), Path(args.start or args.draft).name


def _where(temperature: float, number: int) -> dict[str, Any]:
    return {"temperature": temperature, "round": number}


PARTS = {"hits": hits, "trees": trees, "shapes": shapes, "cascades": cascades}
KEYS = {
    "hits": (),
    "trees": ("family", "models", "nodes", "expansion", "rule"),
    "shapes": ("shape", "length"),
    "cascades": ("arm",),
}
"""Names of a cell's key between target and start, and temperature and round."""


def finished(path: Path, part: str) -> set[tuple]:
    cells = read(path).get(part, []) if path.exists() else []
    keys = ("target", "start", *KEYS[part], "temperature", "round")
    return {tuple(cell[key] for key in keys) for cell in cells if "latency" not in cell}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["train", *PARTS])
    parser.add_argument("--folder", type=Path, default=Path("build/drafts"), help="of the trained models")
    parser.add_argument("--target", default="sample", help="sample, or a folder named target-65m")
    parser.add_argument("--draft", default="sample-draft", help="the target's draft model, which training starts from")
    parser.add_argument("--start", help="what training starts from: another draft model, or new: random weights")
    parser.add_argument("--middle", help="the larger draft model of cascades; by default the wide one of train")
    parser.add_argument("--data", nargs="+", default=[], help="train: texts, as of foredraft train --data")
    parser.add_argument("--only", nargs="+", help="train: alone/1, boosted, shape/wide and so on")
    parser.add_argument("--tokens", type=int, default=200_000, help="train: of every model")
    parser.add_argument("--batch", type=int, default=8, help="train: samples a step")
    parser.add_argument("--length", type=int, default=256, help="train: tokens of a sample")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--share", type=float, default=1.0, help="train: of the positions that a step uses")
    parser.add_argument("--samples", type=int, default=32, help="train: of the importance of parts that are pruned")
    parser.add_argument("--store", type=float, default=0.0, help="train: gigabytes of the target's states on disk")
    parser.add_argument("--prompts", nargs="*", default=[], help="files of prompts, read in turns")
    parser.add_argument("--texts", type=int, default=8, help="of a round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--part-of", default="0/1", metavar="I/N", help="every Nth round, from I on")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2, 4, 8], help="shapes: drafted tokens")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.part == "train":
        train(args)
        return
    part, done = args.part, finished(args.out, args.part)
    with args.out.open("a", encoding="utf-8") as file:
        command = f"python benchmarks/drafts.py {shlex.join(sys.argv[1:])}"
        facts = {"target": named(args), "lessons": lessons(args.folder)}
        file.write(json.dumps(provenance(command, **facts)) + "\n")
        for cell in PARTS[part](Texts(args), done):
            target, start = _base(args)
            file.write(json.dumps({"kind": part, "target": target, "start": start, **cell}) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
