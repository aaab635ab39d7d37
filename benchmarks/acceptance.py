"""Acceptance of every method at equal draft sizes, on many prompts of a real model; no times, so any machine will do.

    python benchmarks/acceptance.py --model MODEL --eagle3 HEAD --eagle1 HEAD --prompts ../shared/data/prompts
    python benchmarks/acceptance.py ... --device cuda --processes 8 --seconds 300

A cell is an arm of real_model.py at a fixed size, a rule and a temperature. The first turns of all prompts run in
batches, everything is drafted in every step. Above temperature 0 there are several rules: shared noise; the ratio rules
of the papers, whose drafts are drawn; and ``picked``, where drafts are the likeliest tokens and do not depend on the
target's noise, as in EAGLE's published code. One JSON line for each task of a cell: of each text its tokens, forwards
of the target, how many accepted paths reached depth 1, 2, ..., and, unless the rule draws, a digest, since texts do not
depend on the drafter then. Cells that matter most come first, and a finished one is not run again. The results file
holds no texts. Tables: ``summary.py --write``.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, final
from unittest.mock import PropertyMock, patch

import torch
from acceptance_tables import PICKED, PLAIN, RATIO, RESULTS, SHARED, tables
from origin import provenance
from reading import read
from real_model import DEPTH, FIXED, HEADS, NETWORKS, TASKS, arms, repeated
from seeded_texts import run_texts, tokenized

import foredraft
from foredraft.bench.measure.records import digest
from foredraft.core.draft import Draft
from foredraft.core.drafter import Plan, StepOut, View
from foredraft.core.errors import DrafterError
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.verify import RULES
from foredraft.drafters.common.wrapper import DrafterWrapper
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Constant
from foredraft.engine.request import Sequence as Request
from foredraft.files.provenance import shortened
from foredraft.model.base import TargetModel
from foredraft.model.kv.cache import SlotCache
from foredraft.model.kv.masks import StepIn

CHAINS = (4, 8)
"""Lengths of chains of EAGLE-1, on which traversal is block verification and recursive rejection token verification."""
SWITCHES = {
    "eagle2-expanded": "",
    "eagle2-no-value": ",value=no",
    "eagle2-no-rerank": ",rerank=no",
    "eagle2-neither": ",value=no,rerank=no",
}
"""EAGLE-2's ablation, on a tree that has as many nodes as are expanded."""
NONE = 0
"""A token after a text's end."""
LARGE = 60
"""Nodes of trees that take most of the time, and so come later."""
GREEDY, SAMPLED, DRAWN = 3, 6, 12
"""Laws for each node that a step holds at most: in greedy rows, in sampled ones, and if drafts are drawn."""
BESIDE = 12
"""Other nodes with laws: a level of a draft, and what static trees have beyond the size of their name."""
Key = tuple[str, str, str, float, str]
"""Method, size, rule, temperature, task."""
Prompt = tuple[str, int, list[int]]
"""Task, number in it, tokens."""


@dataclass(frozen=True, slots=True)
class Cell:
    """An arm with its rule at a temperature. ``size``: of the arm's name."""

    method: str
    size: str
    spec: str
    rule: str
    temperature: float

    @property
    def draws(self) -> bool:
        return self.rule in RULES

    @property
    def rank(self) -> tuple[bool, bool, bool, bool, int]:
        """Those of low rank come first: plain decoding; what can be replayed; temperatures 0 and 1; small trees."""
        rules = (SHARED, *RATIO.get(self.method, ()), PICKED)
        large = self.size == str(LARGE)
        return self.method != PLAIN, self.draws, self.temperature not in (0, 1), large, rules.index(self.rule)

    def key(self, task: str) -> Key:
        return self.method, self.size, self.rule, self.temperature, task


def cells(heads: dict[str, str], temperatures: Sequence[float], nodes: Sequence[int]) -> list[Cell]:
    """All cells, those first that matter most."""
    specs = {name: spec for name, spec in arms(heads).items() if not name.endswith(" auto")}
    if "eagle1" in heads:
        shapes = {n: "x".join("1" * n) for n in CHAINS}
        specs |= {f"eagle1-chain {n}": f"eagle1:{heads['eagle1']},tree={shape},{FIXED}" for n, shape in shapes.items()}
        expanded = f"eagle2:{heads['eagle1']},nodes=24,depth=6,top_k=4,{FIXED}"  # as many as a tree without re-rank has
        specs |= {f"{name} 24": f"{expanded}{switches}" for name, switches in SWITCHES.items()}
    if "draft_model" in heads:
        specs |= {f"sequoia {n}": f"sequoia:{heads['draft_model']},nodes={n},depth={DEPTH[n]},{FIXED}" for n in nodes}
    found = []
    for name, spec in specs.items():
        method, _, size = name.partition(" ")
        if method != PLAIN and size != HEADS and int(size) not in nodes:
            continue
        for temperature in temperatures:
            ratio = RATIO.get(method)  # look-ups are picked anyway
            rules = [SHARED, *(() if ratio is None or not temperature else (*ratio, PICKED))]
            found += [Cell(method, size, spec, rule, temperature) for rule in rules]
    return sorted(found, key=lambda cell: cell.rank)


@final
class Picked(DrafterWrapper):
    """Has the inner drafter draft as for greedy rows, so that drafts do not depend on the target's noise."""

    def propose(self, view: View, plan: Plan) -> Draft:
        return super().propose(view.as_greedy(), plan)


class RecordedText:
    """A text's tokens, prompt included, and the target's states at each; stands in for the forwards of the target.

    ``replayed`` is for one row, on a target whose tokens the host chooses.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = torch.tensor([tokens])
        self._next = torch.cat([self._tokens[0, 1:], torch.tensor([NONE])]).float()  # exact below 2**24
        self._states: dict[int, torch.Tensor] = {}

    @contextlib.contextmanager
    def replayed(self, target: TargetModel) -> Iterator[None]:
        """A context in which the target's forwards are those of this text, as far as nodes are on its path."""
        if missing := target.empty_hidden().keys() - self._states.keys():
            self._states |= target.read(self._tokens, sorted(missing))

        def compute(step: StepIn, cache: SlotCache, keep: torch.Tensor | None = None) -> StepOut:
            places = step.positions[0].clamp(max=len(self._next) - 1)
            hidden = {layer: self._states[layer][:, places] for layer in target.empty_hidden()}
            return StepOut(self._next[places if keep is None else places[keep]][None, :, None], hidden)

        def choose(tokens: torch.Tensor, row: int, node: int, *noise: float) -> int:
            return int(tokens[row, node, 0])

        chooses = patch.object(type(target), "choose", PropertyMock(return_value=choose))
        with patch.object(target, "compute", compute), chooses:
            yield


class Bench:
    """The target and the prompts of one process; each is made when it is first needed."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._cache, self._laws = (int(share * args.gigabytes * 2**30) for share in (0.25, 0.75))
        self._recorded: dict[float, dict[tuple[str, int], RecordedText]] = {}  # by temperature, task and number

    @cached_property
    def plain(self) -> Generator:
        args = self._args
        kind = {"weights": args.weights} if args.weights else {"dtype": args.dtype}
        return foredraft.load(args.model, "none", device=args.device, **kind)

    @cached_property
    def prompts(self) -> dict[str, list[list[int]]]:
        return tokenized(self.plain, files(self._args), self._args.count)

    def lines(self, cell: Cell, tasks: Collection[str]) -> list[dict[str, Any]]:
        """Run these tasks of a cell, with fewer rows where a GPU's memory is too small."""
        rows = self._most(cell)
        while True:
            try:
                return self._lines(cell, tasks, rows)
            except (torch.OutOfMemoryError, DrafterError) as error:  # Picked's errors are those of a foreign drafter
                if rows == 1 or not isinstance(error.__cause__ or error, torch.OutOfMemoryError):
                    raise
            torch.cuda.empty_cache()  # the error, which holds tensors, is gone
            rows //= 2

    def _most(self, cell: Cell) -> int:
        """The most rows whose laws fit."""
        laws = DRAWN if cell.draws else SAMPLED if cell.temperature else GREEDY
        nodes = BESIDE + (int(cell.size) if cell.size.isdigit() else 0)
        law = 4 * self.plain.engine.target.vocab_size  # float32
        return max(1, min(self._args.batch, self._laws // (laws * nodes * law)))

    def _lines(self, cell: Cell, tasks: Collection[str], rows: int) -> list[dict[str, Any]]:
        with contextlib.ExitStack() as stack:
            generator = stack.enter_context(self._generator(cell, rows, stack))
            texts = self._texts(generator, cell, tasks)
            nodes = generator.engine.drafter.needs.max_nodes
        found = []
        for task, own in texts.items():
            line = {"kind": "cell", "method": cell.method, "size": cell.size, "rule": cell.rule}
            line |= {"temperature": cell.temperature, "task": task, "nodes": nodes}
            line |= {"new_tokens": self._args.output_tokens, "count": self._args.count}
            if cell.method == PLAIN:
                line["repeated"] = round(statistics.mean(repeated(each.tokens) for each in own), 4)
            found.append(line | {"texts": [shown(each, cell.draws) for each in own]})
        return found

    def _generator(self, cell: Cell, rows: int, stack: contextlib.ExitStack) -> Generator:
        """The generator of a cell; ``stack`` holds what it needs."""
        limits: dict[str, Any] = {"max_batch_size": rows, "kv_cache_memory_bytes": self._cache}
        limits["max_prefill_tokens"] = 2**20  # nobody waits
        verifier = cell.rule if cell.draws else None
        generator = foredraft.load(self.plain, cell.spec, verifier=verifier, **limits)
        if cell.rule != PICKED:
            return generator
        drafter = stack.enter_context(generator).engine.drafter
        return foredraft.load(self.plain, Picked(drafter), policy=Constant(drafter.needs.longest), **limits)

    def _texts(self, generator: Generator, cell: Cell, tasks: Collection[str]) -> dict[str, list[Request]]:
        """The texts of all prompts by task. Long prompts come last: all rows of a cache are as long as the longest."""
        prompts = [(task, number, ids) for task in tasks for number, ids in enumerate(self.prompts[task])]
        prompts.sort(key=lambda each: len(each[2]))
        if self._args.weights and not cell.draws:
            if cell.method == "sequoia":  # the first text measures its tree, for which it needs the target
                self._decoded(generator, prompts[:1], cell.temperature)
            texts = self._replayed(generator, prompts, cell.temperature)
        else:
            texts = self._decoded(generator, prompts, cell.temperature)
        found = {(task, number): text for (task, number, _), text in zip(prompts, texts, strict=True)}
        return {task: [found[task, number] for number in range(len(self.prompts[task]))] for task in tasks}

    def _decoded(
        self, generator: Generator, prompts: Sequence[Prompt], temperature: float, **options: Any
    ) -> list[Request]:
        params = SamplingParams(max_new_tokens=self._args.output_tokens, temperature=temperature, **options)
        seeds = [zlib.crc32(f"{task} {number}".encode()) for task, number, _ in prompts]
        return run_texts(generator, [ids for *_, ids in prompts], params, seeds)

    def _replayed(self, generator: Generator, prompts: Sequence[Prompt], temperature: float) -> list[Request]:
        """What this generator would decode, without forwards of the target."""
        recorded = self._recorded.setdefault(temperature, {})
        missing = [prompt for prompt in prompts if prompt[:2] not in recorded]
        plain = self._decoded(self.plain, missing, temperature, eos_token_id=())  # a step may go beyond the end
        for (task, number, ids), text in zip(missing, plain, strict=True):
            recorded[task, number] = RecordedText([*ids, *text.tokens])
        texts = []
        for prompt in prompts:
            with recorded[prompt[:2]].replayed(generator.engine.target):
                texts += self._decoded(generator, [prompt], temperature)
        return texts


def shown(text: Request, draws: bool) -> list[Any]:
    """What a line has of a text."""
    stats = text.stats
    numbers = [len(text.tokens), stats.target_forwards, list(stats.accepted_by_depth)]
    return numbers if draws else [*numbers, digest(text.tokens)]


def files(args: argparse.Namespace) -> list[Path]:
    return [args.prompts / TASKS[task] for task in args.tasks]


# ---- processes


class Outcome(NamedTuple):
    """A cell's lines, and the time it took, or why there are none."""

    cell: Cell
    lines: list[dict[str, Any]]
    about: str
    failed: bool = False


_bench: list[Bench] = []
"""The one of this process."""


def start(args: argparse.Namespace) -> None:
    """Begin a process that runs cells."""
    if args.processes > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.processes))
    _bench[:] = [Bench(args)]


def run(cell: Cell, tasks: Collection[str], until: float) -> Outcome:
    """Run a cell, if it is not too late."""
    begun = time.time()
    if begun > until:
        return Outcome(cell, [], "too late")
    try:
        lines = _bench[0].lines(cell, tasks)
    except Exception as error:  # the other cells do not depend on this one
        return Outcome(cell, [], f"{error.__class__.__name__}: {error}", failed=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Outcome(cell, lines, f"{time.time() - begun:.1f} s")


def finished(args: argparse.Namespace) -> set[Key]:
    """The tasks of cells that need not run again."""
    if not args.out.exists():
        return set()
    lines = read(args.out).get("cell", [])
    return {
        (line["method"], line["size"], line["rule"], line["temperature"], line["task"])
        for line in lines
        if line["new_tokens"] == args.output_tokens and line["count"] >= args.count
    }


def outcomes(args: argparse.Namespace, todo: dict[Cell, list[str]]) -> Iterator[Outcome]:
    """Run these tasks of cells in order; each outcome as soon as there is one."""
    until = time.time() + args.seconds
    if args.processes == 1:
        start(args)
        yield from (run(cell, tasks, until) for cell, tasks in todo.items())
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, context, start, (args,)) as pool:
        futures = [pool.submit(run, cell, tasks, until) for cell, tasks in todo.items()]
        yield from (future.result() for future in as_completed(futures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name")
    for name in NETWORKS:
        parser.add_argument(f"--{name.replace('_', '-')}", help="folder or hub name")
    parser.add_argument("--prompts", type=Path, required=True, help="folder of the prompt files")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--count", type=int, default=40, help="prompts of each task")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0, 0.6, 1])
    parser.add_argument(
        "--nodes", type=int, nargs="+", choices=DEPTH, default=list(DEPTH), help="sizes of trees and chains"
    )
    parser.add_argument("--only", nargs="+", help="methods, such as eagle3; others are left out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--weights", help="of the native engine, such as int4, instead of a dtype")
    parser.add_argument("--batch", type=int, default=256, help="most rows")
    parser.add_argument("--gigabytes", type=float, default=8, help="memory of a process, but for weights")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then no other cell begins")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    heads = {name: path for name in NETWORKS if (path := getattr(args, name))}
    every, done = cells(heads, args.temperatures, args.nodes), finished(args)
    if args.only:
        every = [cell for cell in every if cell.method in (PLAIN, *args.only)]
    todo = {cell: own for cell in every if (own := [task for task in args.tasks if cell.key(task) not in done])}
    facts: dict[str, Any] = {"dtype": args.weights or args.dtype, "new_tokens": args.output_tokens}
    facts["replayed"] = args.weights is not None
    if args.device != "cpu":
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # shapes vary
        facts["gpu"] = torch.cuda.get_device_name()
    failed = 0
    with args.out.open("a", encoding="utf-8") as out:
        if todo:
            command = " ".join(["python benchmarks/acceptance.py", *map(shortened, sys.argv[1:])])
            out.write(json.dumps(provenance(command, **facts)) + "\n")
        for number, (cell, lines, about, bad) in enumerate(outcomes(args, todo), start=1):
            out.writelines(json.dumps(line) + "\n" for line in lines)
            out.flush()
            failed += bad
            name = f"{cell.method} {cell.size}, {cell.rule}, T={cell.temperature:g}"
            print(f"{number} of {len(todo)}: {name}: {about}", flush=True)
    print(tables(args.out))
    raise SystemExit(f"{failed} cells failed." if failed else 0)


if __name__ == "__main__":
    main()
